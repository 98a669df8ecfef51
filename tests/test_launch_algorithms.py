"""Whole runs of the algorithms: exact at every step, with a reference policy, dynamic sampling, filters."""

from __future__ import annotations

import json
import shutil
import sys
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from exactrl import launch
from exactrl.errors import ModelError, UsageError
from exactrl.model.config import find_model
from tests.test_launch import metrics_of, micro
from tests.train.helpers import one_torch_thread  # noqa: F401


@pytest.fixture
def rewards(monkeypatch):
    """A user's module with reward functions."""
    module = ModuleType("micro_reward")
    module.spread = lambda sample: float(sum(sample.token_ids))
    monkeypatch.setitem(sys.modules, "micro_reward", module)
    return module


pytestmark = pytest.mark.usefixtures("rewards")


def _rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["dr_grpo", "reinforce_pp", "gspo", "cispo", "dapo"])
def test_a_run_of_every_kind_of_algorithm_is_exact(tmp_path, name):
    launch.train(
        micro(
            tmp_path / "r", train__algorithm=name, train__minibatches=2, train__entropy_coef=0.01, run__steps=2,
            train__overlong_cache=4, train__lr_schedule="linear", run__audit_every=1,
        )
    )  # fmt: skip
    rows = metrics_of(tmp_path / "r")
    assert [row["train/lr"] for row in rows] == pytest.approx([5e-5, 2.5e-5])
    for row in rows:
        assert (row["train/logprob_mismatch_tokens"], row["train/logprob_uncompared_tokens"]) == (0, 0)
        assert row["train/grad_norm"] > 0


@pytest.mark.parametrize(
    ("algorithm", "place", "estimator"),
    [("grpo", "loss", "k3"), ("grpo", "loss", "k1"), ("rloo", "reward", "k1"), ("reinforce_pp", "reward", "k2")],
)
def test_kl_to_the_reference_is_exactly_zero_before_the_first_update(tmp_path, algorithm, place, estimator):
    """And not afterwards. The reference is another model object, loaded by itself; audits compare every token."""
    launch.train(
        micro(
            tmp_path / "r", train__algorithm=algorithm, train__kl_coef=0.5, train__kl_in=place, train__lr=1e-2,
            train__kl_estimator=estimator, run__audit_every=1,
        )
    )  # fmt: skip
    rows = metrics_of(tmp_path / "r")
    assert rows[0]["train/kl"] == 0.0
    assert all(row["train/kl"] != 0 for row in rows[1:])
    assert all((row["train/logprob_mismatch_tokens"], row["train/logprob_uncompared_tokens"]) == (0, 0) for row in rows)


@pytest.mark.parametrize(("place", "estimator"), [("loss", "k3"), ("reward", "k1")])
def test_the_penalty_alone_leads_back_to_the_reference(tmp_path, rewards, place, estimator):
    """A policy that is the reference with noise on its weights, and rewards that are all 0: KL falls."""
    rewards.nothing = lambda sample: 0.0
    noisy, generator = tmp_path / "noisy", torch.Generator().manual_seed(0)
    shutil.copytree(find_model("tiny"), noisy)
    tensors = load_file(noisy / "model.safetensors")
    for name, t in tensors.items():
        if t.ndim == 2:
            noise = torch.randn(t.shape, generator=generator) * t.float().std()
            tensors[name] = (t.float() + 0.3 * noise).to(t.dtype)
    save_file(tensors, noisy / "model.safetensors")
    launch.train(
        micro(
            tmp_path / "r", model__path=str(noisy), train__reference="bundled:tiny", train__kl_in=place,
            train__kl_coef=1.0, train__kl_estimator=estimator, train__algorithm="dr_grpo", train__lr=1e-4,
            run__steps=14, rollout__prompts_per_step=16, rollout__samples_per_prompt=4, rollout__kv_tokens=2000,
            rollout__temperature=1.0, reward__name="micro_reward:nothing",
        )
    )  # fmt: skip
    kl = [row["train/kl"] for row in metrics_of(tmp_path / "r")]
    assert kl[0] > 0.1
    assert sum(kl[-4:]) < 0.8 * sum(kl[:4]), kl


def test_a_reference_of_another_vocabulary_is_refused(tmp_path):
    other = tmp_path / "other"
    shutil.copytree(find_model("tiny"), other)
    config = json.loads((other / "config.json").read_text())
    tensors = load_file(other / "model.safetensors")
    embed = "model.embed_tokens.weight"
    save_file({k: v[:100].clone() if k == embed else v for k, v in tensors.items()}, other / "model.safetensors")
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    with pytest.raises(ModelError, match="100 vocabulary entries, the policy 112"):
        launch.train(micro(tmp_path / "r", train__kl_coef=0.1, train__reference=str(other)))


def test_dynamic_sampling_and_overlong_filter_in_a_real_run(tmp_path, rewards):
    """Prompts whose text holds a 7 have differing rewards; audited steps compare the discarded tokens, too."""
    rewards.mixed = lambda sample: float(sample.sample_index) if sample.label.endswith(("1", "3", "5")) else 0.0
    launch.train(
        micro(
            tmp_path / "r", reward__name="micro_reward:mixed", train__dynamic_sampling="true",
            train__overlong_filter="true", run__audit_every=2,
        )
    )  # fmt: skip
    rows = metrics_of(tmp_path / "r")
    assert sum(row["rollout/discarded_groups"] for row in rows) > 0
    drawn: list[str] = []
    for row in rows:
        samples = _rows(tmp_path / "r" / "samples" / f"step_{row['step']:06d}.jsonl")
        assert len(samples) == row["rollout/num_samples"] == 4 + 2 * row["rollout/discarded_groups"]
        cut = [s for s in samples[:4] if s["finish_reason"] == "length"]
        assert row["rollout/overlong_filtered"] == len(cut)
        assert [s["in_loss"] for s in samples[:4]] == [s["finish_reason"] != "length" for s in samples[:4]]
        total = sum(len(s["token_ids"]) for s in samples)
        assert row["train/logprob_compared_tokens"] + row["train/logprob_uncompared_tokens"] == total
        audited = row["step"] in (1, 2)
        assert (row["train/logprob_uncompared_tokens"] == 0) == (audited or not row["rollout/discarded_groups"])
        assert row["train/logprob_mismatch_tokens"] == 0
        drawn += dict.fromkeys(s["id"] for s in samples)
    assert len(drawn) == len(set(drawn))  # every step goes on where the one before stopped


def test_D_04_a_task_without_any_signal_ends_with_a_message(tmp_path, rewards):
    rewards.never = lambda sample: 0.0
    with pytest.raises(UsageError, match="kept 0 of 6 groups in 3 rounds"):
        launch.train(
            micro(
                tmp_path / "r", reward__name="micro_reward:never", train__dynamic_sampling="true",
                train__max_sampling_rounds=3,
            )
        )  # fmt: skip
