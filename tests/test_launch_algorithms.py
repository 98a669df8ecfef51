"""Whole runs of the algorithms: exact at every step, with a reference policy, dynamic sampling, filters."""

from __future__ import annotations

import json
import shutil
import sys
from types import ModuleType

import pytest
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
def test_the_penalty_holds_the_policy_back(tmp_path, rewards, place, estimator):
    """The same run with a penalty a thousand times as heavy stays nearer to the reference."""
    rewards.small = lambda sample: sum(sample.token_ids) / 1000
    found = []
    for coef in (0.001, 3.0):
        settings = {"train__kl_in": place, "train__kl_estimator": estimator, "train__lr": 2e-4, "run__steps": 12}
        settings |= {
            "rollout__samples_per_prompt": 8,
            "rollout__kv_tokens": 600,
            "train__kl_coef": coef,
            "train__algorithm": "dr_grpo",
        }
        launch.train(micro(tmp_path / str(coef), reward__name="micro_reward:small", **settings))
        found.append([abs(row["train/kl"]) for row in metrics_of(tmp_path / str(coef))])
    assert found[0][0] == found[1][0] == 0.0
    assert sum(found[1][6:]) < 0.8 * sum(found[0][6:])


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
