"""Whole runs of a micro recipe on the bundled model, and the Python API."""

from __future__ import annotations

import json
import sys
from functools import partial
from types import ModuleType
from typing import ClassVar

import numpy as np
import pytest
import torch

import exactrl
from exactrl import launch
from exactrl.config import load_recipe
from exactrl.contract import noise_key
from exactrl.errors import (
    ConfigError,
    DataError,
    EnvironmentProblem,
    ExactRLError,
    ModelError,
    NonFiniteError,
    ParityError,
    RequestError,
    UsageError,
)
from exactrl.model.config import find_model
from exactrl.model.folder import load_model
from exactrl.model.weights import master_digest
from exactrl.ops import Ops
from exactrl.types import Request, SamplingParams
from tests.ops.helpers import CONTRACT
from tests.rl.test_run_folder import files
from tests.train.helpers import bit_list, one_torch_thread, one_ulp, trajectories  # noqa: F401

KEYS = {
    "step", "train/train_rollout_logprob_abs_diff", "train/logprob_abs_diff_max", "train/logprob_mismatch_tokens",
    "train/logprob_compared_tokens", "train/logprob_uncompared_tokens", "train/weight_digest", "train/compute_digest",
    "train/loss", "train/pg_clipfrac", "train/entropy", "train/grad_norm", "train/lr", "rollout/raw_reward",
    "rollout/response_len/mean", "rollout/response_len/max", "rollout/truncated_ratio", "rollout/zero_std_groups",
    "rollout/num_samples", "perf/rollout_time", "perf/train_time", "perf/sync_time", "perf/step_time",
    "perf/rollout_tokens_per_sec", "perf/train_tokens_per_sec",
}  # fmt: skip


def micro(out, **changes):
    """2 prompts x 2 samples, 12 new tokens, 3 steps; hot, since the bundled model is sure of itself."""
    settings = {
        "run.steps": 3, "run.eval_every": 0, "run.audit_every": 2, "rollout.prompts_per_step": 2,
        "rollout.samples_per_prompt": 2, "rollout.max_new_tokens": 12, "rollout.kv_tokens": 128,
        "rollout.temperature": 2.5, "reward.name": "micro_reward:spread", "run.out": str(out),
    }  # fmt: skip
    for key, value in changes.items():
        settings[key.replace("__", ".")] = value
    return load_recipe("tiny", [(k, str(v)) for k, v in settings.items()])


@pytest.fixture(scope="module", autouse=True)
def rewards():
    """A user's module with reward functions."""
    module = ModuleType("micro_reward")
    module.seen = []

    def spread(sample) -> float:
        module.seen.append(sample)
        return float(sum(sample.token_ids))

    module.spread = spread
    module.broken = lambda sample: 1 / 0
    module.sometimes = lambda sample: 1.0 if sample.sample_index else 1 / 0
    module.infinite = lambda sample: float("inf")
    sys.modules["micro_reward"] = module
    yield module
    del sys.modules["micro_reward"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder, metrics rows, summary, events) of one run."""
    out = tmp_path_factory.mktemp("runs") / "first"
    events = Events()
    summary = launch.train(micro(out, run__eval_every=2, data__train="bundled:arithmetic/train.jsonl@[0:4]",
                                 **{"data__eval__few": "bundled:arithmetic/heldout.jsonl@[0:3]"},
                                 data__eval__heldout="bundled:arithmetic/heldout.jsonl@[0:1]"), events)  # fmt: skip
    return out, metrics_of(out), summary, events


class Events(launch.Silent):
    def __init__(self):
        self.steps, self.phases, self.end = [], [], None

    def on_step(self, metrics):
        self.steps.append(metrics)

    def on_progress(self, phase, done, total):
        self.phases.append((phase, done, total))

    def on_end(self, summary):
        self.end = summary


def metrics_of(out) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def without_times(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]


SCHEDULING = {"rollout/preemptions", "rollout/prefix_hit_tokens", "rollout/recomputed_tokens", "rollout/engine_steps"}


def comparable(rows: list[dict]) -> list[dict]:
    """What no limit of the engine may change."""
    return [{k: v for k, v in row.items() if k not in SCHEDULING} for row in without_times(rows)]


def test_metrics_are_complete_and_exact(run):
    _, rows, summary, _ = run
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert set(row) >= KEYS
        assert row["train/train_rollout_logprob_abs_diff"] == row["train/logprob_abs_diff_max"] == 0
        assert row["train/logprob_mismatch_tokens"] == row["train/logprob_uncompared_tokens"] == 0
        assert row["train/logprob_compared_tokens"] == round(4 * row["rollout/response_len/mean"]) > 0
        assert row["rollout/num_samples"] == 4
        assert row["train/grad_norm"] > 0
        assert all(not isinstance(v, float) or np.isfinite(v) for v in row.values())
    assert [row.get("train/rescore_mismatch_tokens") for row in rows] == [0, 0, None]
    assert [("eval/few/mean" in row, "eval/heldout/mean" in row) for row in rows] == [(True, True)] * 3
    assert len({row["train/weight_digest"] for row in rows}) == 3
    assert len({row["train/compute_digest"] for row in rows}) == 3
    assert summary["steps"] == 3
    assert summary["compared_tokens"] == sum(row["train/logprob_compared_tokens"] for row in rows)
    assert summary["mismatch_tokens"] == 0


def test_events_see_the_run(run):
    _, rows, summary, events = run
    assert events.steps == rows
    assert events.end == summary
    assert {phase for phase, _, _ in events.phases} == {"rollout", "train", "eval"}


def test_run_folder_is_complete(run):
    out, _, summary, _ = run
    names = {p.name for p in out.iterdir()}
    assert names >= {"config.toml", "plan.json", "environment.json", "metrics.jsonl", "samples", "checkpoints"}
    assert {name for name in names if name.startswith(".")} == {".lock"}
    assert (out / "report.html").read_text().startswith("<!")
    assert (summary["out"], summary["report"]) == (str(out), str(out / "report.html"))
    config = load_recipe(out / "config.toml")
    assert (config.run.steps, config.rollout.max_new_tokens, config.reward.name) == (3, 12, "micro_reward:spread")
    assert exactrl.config.to_toml(config) == (out / "config.toml").read_text()
    assert json.loads((out / "plan.json").read_text())["true_on_policy"] is True
    assert json.loads((out / "environment.json").read_text())["seed"] == 0
    proof = json.loads((out / "certificate.json").read_text())
    assert (proof["device"], proof["kernels"]) == ("cpu", "exact-v1 numba kernels")
    assert proof["kernel_sources_digest"] == json.loads((out / "environment.json").read_text())["kernel_sources_digest"]


def test_sample_rows(run):
    out, rows, _, _ = run
    ids = set()
    for step, metrics in enumerate(rows, 1):
        samples = [json.loads(line) for line in (out / f"samples/step_{step:06d}.jsonl").read_text().splitlines()]
        assert [s["sample"] for s in samples] == [0, 1, 0, 1]
        assert sum(len(s["token_ids"]) for s in samples) == metrics["train/logprob_compared_tokens"]
        assert np.mean([s["reward"] for s in samples]) == metrics["rollout/raw_reward"]
        for s in samples:
            assert set(s) == {
                "id", "sample", "prompt", "prompt_token_ids", "token_ids", "text", "logprobs", "logprob_bits",
                "finish_reason", "label", "reward", "reward_error", "reward_reason", "advantage", "in_loss",
                "weight_version",
            }  # fmt: skip
            assert s["weight_version"] == step - 1
            assert s["reward"] == sum(s["token_ids"])
            assert len(s["token_ids"]) == len(s["logprobs"])
            assert tuple(int(b, 16) for b in s["logprob_bits"]) == bit_list(s["logprobs"])
            ids.add((step, s["id"], s["sample"], tuple(s["token_ids"])))
        assert abs(samples[0]["advantage"] + samples[1]["advantage"]) < 1e-9
    assert len({i[3] for i in ids}) > 8


def test_checkpoint_is_a_model_folder(run):
    out, rows, _, _ = run
    folder = out / "checkpoints/step_000003"
    assert [p.name for p in (out / "checkpoints").iterdir()] == [folder.name]
    model = load_model(folder, Ops(CONTRACT), torch.bfloat16, trainable=True)
    assert master_digest(model) == rows[-1]["train/weight_digest"]
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(theirs.get_input_embeddings().weight, model.embed.master)
    (completion,) = exactrl.Engine(str(folder)).generate(["1+2\n"], SamplingParams(4))
    assert 1 <= len(completion.token_ids) <= 4


def test_limits_of_the_engine_change_no_bit_of_a_run(tmp_path, run):
    out, rows, _, _ = run
    config = load_recipe(out / "config.toml", [("run.out", str(tmp_path / "again")), ("rollout.max_concurrent", "3"),
                                               ("rollout.chunk_tokens", "9"), ("rollout.kv_tokens", "0")])  # fmt: skip
    launch.train(config)
    assert comparable(rows) == comparable(metrics_of(tmp_path / "again"))
    for name in ("samples/step_000003.jsonl", "checkpoints/step_000003/model.safetensors"):
        assert (out / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_the_same_recipe_gives_the_same_metrics(tmp_path, run):
    launch.train(load_recipe(run[0] / "config.toml", [("run.out", str(tmp_path / "again"))]))
    assert without_times(metrics_of(tmp_path / "again")) == without_times(run[1])


def test_another_seed_gives_another_run(tmp_path, run):
    launch.train(micro(tmp_path / "r", rollout__seed=1, run__steps=1))
    (row,) = metrics_of(tmp_path / "r")
    assert row["train/weight_digest"] != run[1][0]["train/weight_digest"]


def test_an_existing_run_is_not_touched(run):
    before = files(run[0])
    with pytest.raises(UsageError, match="already holds a run"):
        launch.train(micro(run[0]))
    assert files(run[0]) == before


@pytest.mark.parametrize("side", ["engine", "trainer"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_ulp_on_one_side_stops_the_run_before_weights_change(tmp_path, monkeypatch, side, dtype):
    trainers = []
    fault = one_ulp("layers.1.swiglu")
    plain = launch.build.Trainer

    def make_trainer(*args, **settings):
        trainers.append(plain(*args, **settings, see=fault if side == "trainer" else None))
        trainers.append(trainers[0].master_digest())
        return trainers[0]

    monkeypatch.setattr(launch.build, "Trainer", make_trainer)
    if side == "engine":
        monkeypatch.setattr(launch.build, "NativeEngine", partial(launch.build.NativeEngine, see=fault))
    with pytest.raises(ParityError, match="logprob differ") as caught:
        launch.train(micro(tmp_path / "r", model__dtype=dtype, run__audit_every=0))
    assert caught.value.exit_code == 3
    trainer, digest = trainers
    assert (trainer.version, trainer.master_digest()) == (0, digest)
    assert metrics_of(tmp_path / "r") == []
    assert not (tmp_path / "r/checkpoints").exists()


def test_a_later_minibatch_is_only_seen_by_audits(tmp_path):
    """4 samples in 2 minibatches: half are compared by the gradient forward, all of them on audited steps."""
    launch.train(micro(tmp_path / "r", train__minibatches=2, run__steps=3))
    for row in metrics_of(tmp_path / "r"):
        compared, rest = row["train/logprob_compared_tokens"], row["train/logprob_uncompared_tokens"]
        assert compared + rest == round(4 * row["rollout/response_len/mean"])
        assert (rest == 0) == (row["step"] in (1, 2))
        assert row.get("train/rescore_mismatch_tokens") == (0 if row["step"] in (1, 2) else None)


def test_without_true_on_policy_differences_are_reported(tmp_path):
    launch.train(micro(tmp_path / "r", contract__true_on_policy="false", rollout__prompts_per_step=4, run__steps=2))
    rows = metrics_of(tmp_path / "r")
    assert len(rows) == 2
    for row in rows:
        assert row["train/logprob_compared_tokens"] > 0
        assert row["train/train_rollout_logprob_abs_diff"] < 0.1
        assert (row["train/logprob_mismatch_tokens"] > 0) == (row["train/logprob_abs_diff_max"] > 0)
    assert sum(row["train/logprob_mismatch_tokens"] for row in rows) > 0


def test_reward_errors(tmp_path):
    with pytest.raises(UsageError, match=r"#0 with ZeroDivisionError.*reward\.on_error"):
        launch.train(micro(tmp_path / "stop", reward__name="micro_reward:broken"))
    launch.train(micro(tmp_path / "zero", reward__name="micro_reward:sometimes", reward__on_error="zero", run__steps=1))
    (row,) = metrics_of(tmp_path / "zero")
    assert (row["rollout/failed_rewards"], row["rollout/raw_reward"]) == (2, 0.5)
    with pytest.raises(UsageError, match="nothing can be trained on"):
        launch.train(micro(tmp_path / "drop", reward__name="micro_reward:sometimes", reward__on_error="drop"))
    launch.train(micro(tmp_path / "left", reward__name="micro_reward:sometimes", reward__on_error="drop", run__steps=1,
                       rollout__samples_per_prompt=3))  # fmt: skip
    (row,) = metrics_of(tmp_path / "left")
    assert (row["rollout/failed_rewards"], row["rollout/raw_reward"]) == (2, 1.0)
    assert row["train/logprob_uncompared_tokens"] == 0  # dropped samples are compared, too
    samples = [json.loads(s) for s in (tmp_path / "left/samples/step_000001.jsonl").read_text().splitlines()]
    assert [(s["reward"], s["in_loss"]) for s in samples] == [(None, False), (1.0, True), (1.0, True)] * 2
    assert "ZeroDivisionError" in samples[0]["reward_error"]
    assert samples[1]["reward_error"] is None


def test_a_first_step_without_any_signal_is_named(tmp_path, rewards):
    """Mostly it is the wrong reward for the prompts. Dynamic sampling has a message of its own."""

    class Notes(Events):
        notes: ClassVar[list] = []

        def on_note(self, text):
            self.notes.append(text)

    rewards.same = lambda sample: 0.5
    launch.train(micro(tmp_path / "r", reward__name="micro_reward:same"), Notes())
    assert len(Notes.notes) == 1
    assert "step 1: all 4 rewards are 0.5, so nothing was learnt" in Notes.notes[0]
    Notes.notes.clear()
    launch.train(micro(tmp_path / "math", reward__name="math", run__steps=1), Notes())
    assert "no_answer 4" in Notes.notes[0]
    launch.train(micro(tmp_path / "other"), Notes())
    assert len(Notes.notes) == 1


def test_a_reward_that_is_not_finite_stops_the_run(tmp_path):
    with pytest.raises((NonFiniteError, UsageError), match=r"#0.*finite|finite.*#0|inf.*#0"):
        launch.train(micro(tmp_path / "r", reward__name="micro_reward:infinite"))


def test_a_reward_sees_the_whole_sample(run, rewards):
    sample = rewards.seen[0]
    assert sample.text is not None
    assert sample.label.isdigit()
    assert (len(sample.logprobs), sample.logprobs.dtype) == (len(sample.token_ids), np.float32)


def test_problems_found_before_the_run_leave_no_folder(tmp_path):
    cases = [
        (ModelError, {"model__path": "no-such-model"}),
        (ConfigError, {"reward__name": "no_such_module:f"}),
        (ConfigError, {"reward__name": "micro_reward:no_such_function"}),
        (DataError, {"data__train": "no-such-file.jsonl"}),
        (DataError, {"data__max_prompt_tokens": 5}),
        (ConfigError, {"contract__k_leaves": 256}),
    ]
    for error, changes in cases:
        with pytest.raises(error):
            launch.train(micro(tmp_path / "r", **changes))
        assert not (tmp_path / "r").exists(), changes


def test_overlong_prompts_error_or_filter(tmp_path):
    data = tmp_path / "data.jsonl"
    rows = [{"id": str(i), "prompt": "1+2\n" * (1 + 30 * (i % 2)), "label": "3"} for i in range(6)]
    data.write_text("".join(json.dumps(r) + "\n" for r in rows))
    with pytest.raises(DataError, match=r"line 2.*more than data\.max_prompt_tokens = 64"):
        launch.train(micro(tmp_path / "r", data__train=data))
    launch.train(micro(tmp_path / "r", data__train=data, data__overlong_prompts="filter"))
    for step in (1, 2, 3):
        lines = (tmp_path / f"r/samples/step_{step:06d}.jsonl").read_text().splitlines()
        assert all(int(json.loads(line)["id"].partition("@")[0]) % 2 == 0 for line in lines)


def test_checkpoints_are_kept_and_pruned(tmp_path):
    launch.train(micro(tmp_path / "r", run__checkpoint_every=1, run__keep_checkpoints=2))
    assert sorted(p.name for p in (tmp_path / "r/checkpoints").iterdir()) == ["step_000002", "step_000003"]


def test_plan_names_what_the_switch_derives(tmp_path):
    exact, off = (launch.plan(micro(tmp_path, contract__true_on_policy=v)) for v in ("true", "false"))
    assert json.loads(json.dumps(exact)) == exact
    assert exact["contract"]["digest"] == CONTRACT.digest
    assert (exact["true_on_policy"], off["true_on_policy"]) == (True, False)
    for section in ("kernels", "check", "train"):
        assert exact[section] != off[section]
    on_gpu = {"model__dtype": "bfloat16", "run__device": "cuda"}
    kernels = [launch.plan(micro(tmp_path, contract__true_on_policy=v, **on_gpu))["kernels"] for v in ("true", "false")]
    assert ["certified" in text["linear"] for text in kernels] == [True, False]
    with pytest.raises(ConfigError, match="k_leaves 256 does not divide"):
        launch.plan(micro(tmp_path, contract__k_leaves=256))


def test_every_setting_of_the_trainer_arrives(tmp_path):
    settings = {
        "train__lr": 0.25, "train__betas": "[0.5, 0.75]", "train__weight_decay": 0.125, "train__grad_clip": 3.0,
        "train__minibatches": 2, "train__max_tokens_per_microbatch": 77, "train__loss_aggregation": "sequence-mean",
        "train__clip_low": 0.1, "train__clip_high": 0.4,
    }  # fmt: skip
    for exact in (True, False):
        config = micro(tmp_path, contract__true_on_policy=str(exact).lower(), model__dtype="float32", **settings)
        trainer = launch.build.build_trainer(config, find_model("tiny"))
        matrices, vectors = trainer.optimizer.param_groups
        assert (matrices["lr"], matrices["betas"], matrices["weight_decay"]) == (0.25, (0.5, 0.75), 0.125)
        assert (vectors["lr"], vectors["betas"], vectors["weight_decay"]) == (0.25, (0.5, 0.75), 0.0)
        assert (trainer.grad_clip, trainer.minibatches, trainer.budget) == (3.0, 2, 77)
        assert (trainer.aggregation, trainer.clip) == ("sequence-mean", (0.1, 0.4))
        assert trainer.recompute_old_logprobs is not exact
        assert (trainer.model.ops.exact, trainer.model.dtype) == (exact, torch.float32)


def test_settings_of_the_algorithm_arrive(tmp_path):
    config = micro(
        tmp_path, train__algorithm="dr_grpo", train__entropy_coef=0.25, train__dual_clip=3.0, train__lr=0.5,
        train__lr_schedule="linear", train__warmup_steps=1, train__min_lr_ratio=0.5, train__overlong_cache=5,
    )  # fmt: skip
    trainer = launch.build.build_trainer(config, find_model("tiny"))
    assert (trainer.aggregation, trainer.max_new_tokens, trainer.entropy_coef) == ("constant-length", 12, 0.25)
    assert trainer.algorithm.loss.keywords == {"dual_clip": 3.0}
    assert [trainer.lr_at(step) for step in (1, 2, 3)] == [0.25, 0.5, 0.375]
    assert launch.build.loop_plan(config, ()).shaping.overlong_cache == 5
    assert launch.plan(config)["train"]["loss_aggregation"] == "constant-length"
    plain = launch.build.build_trainer(micro(tmp_path, contract__true_on_policy="false"), find_model("tiny")).model
    with pytest.raises(ConfigError, match="entropy"):
        launch.build.Trainer(plain, trainer.algorithm, lr=1.0, entropy_coef=0.1)


def test_every_setting_of_the_engine_arrives(tmp_path):
    settings = {"rollout__max_concurrent": 7, "rollout__kv_tokens": 100, "rollout__chunk_tokens": 13}
    for exact in (True, False):
        config = micro(tmp_path, contract__true_on_policy=str(exact).lower(), contract__k_leaves=4, **settings)
        engine = launch.build.build_engine(config, find_model("tiny"))
        scheduler = engine.scheduler
        assert (scheduler.max_concurrent, scheduler.chunk_tokens, scheduler.max_model_tokens) == (7, 13, 64 + 12)
        assert engine.allocator.num_blocks == 7  # 100 tokens in blocks of 16
        assert (engine.model.ops.exact, engine.model.leaves) == (exact, 4)


@pytest.fixture(scope="module")
def engine():
    return exactrl.Engine("tiny", kv_tokens=1024)


def test_engine_generates_from_text_ids_and_requests(engine):
    params = exactrl.SamplingParams(max_new_tokens=20, temperature=2.0)
    text = "Add the numbers column by column.\n21+84+14\n"
    ids = engine.encode(text)
    (from_text,) = engine.generate([text], params)
    (from_ids,) = engine.generate([list(ids)], params)
    request = Request("0", ids, SamplingParams(20, 2.0, engine.eos_ids), noise_key(0, "generate", 0, 0, "0", 0))
    (from_request,) = engine.generate([request])
    assert trajectories([from_text]) == trajectories([from_ids]) == trajectories([from_request])
    seeds = [engine.generate([text], params, seed=s)[0].token_ids for s in range(4)]
    assert seeds[0] == from_text.token_ids
    assert len(set(map(tuple, seeds))) > 1
    for c in engine.generate([text] * 4, exactrl.SamplingParams(max_new_tokens=60)):
        assert (c.finish_reason == "stop") == (c.token_ids[-1] in engine.eos_ids)
    with pytest.raises(ConfigError, match="SamplingParams"):
        engine.generate([text])
    with pytest.raises(RequestError, match="empty prompt"):
        engine.generate([""], params)


def test_generate_rows_do_not_depend_on_limits():
    prompts = [("a", "1+2+3\n"), ("b", [10, 11, 12, 13]), ("c", "Add the numbers column by column.\n")]
    common = {"samples": 2, "seed": 3, "temperature": 2.0, "max_new_tokens": 10, "dtype": "bfloat16",
              "true_on_policy": True, "on_progress": lambda *a: None}  # fmt: skip

    def rows(**limits):
        found = launch.generate("tiny", prompts, **common, **limits)
        return [(r["id"], r["sample"], r["token_ids"], r["text"], bit_list(r["logprobs"])) for r in found]

    wide = rows(max_concurrent=64, kv_tokens=0, chunk_tokens=2048)
    assert [r[:2] for r in wide] == [(p, s) for p in "abc" for s in (0, 1)]
    assert wide == rows(max_concurrent=2, kv_tokens=64, chunk_tokens=3)
    assert wide[0][2] != wide[1][2]


def test_train_is_callable_before_and_after_its_room_is_imported(tmp_path):
    """exactrl.train is the function of interfaces.md and the room exactrl/train at once."""
    from exactrl.train.trainer import Trainer

    assert exactrl.Trainer is Trainer
    for i in range(2):
        assert exactrl.train(micro(tmp_path / str(i), **{"run.steps": "1"}))["steps"] == 1


def test_a_parity_failure_is_written_down_and_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(launch.build, "build_trainer", lambda c, f, make=launch.build.build_trainer: faulty(make(c, f)))
    with pytest.raises(ParityError):
        launch.train(micro(tmp_path / "run"))
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert failure["type"] == "ParityError"
    assert "STOPPED by the parity check" in (tmp_path / "run" / "report.html").read_text()


def test_a_disk_that_refuses_failure_json_does_not_hide_the_failure(tmp_path, monkeypatch):
    def full(self, error, after_step):
        raise EnvironmentProblem("no space left")

    monkeypatch.setattr(launch.rl_run.RunFolder, "write_failure", full)
    monkeypatch.setattr(launch.build, "build_trainer", lambda c, f, make=launch.build.build_trainer: faulty(make(c, f)))
    with pytest.raises(ParityError):
        launch.train(micro(tmp_path / "run"))


def faulty(trainer):
    trainer.see = lambda name, x: x * 1.25 if name == "norm" else x
    return trainer


def test_a_prompt_that_cannot_be_served_is_refused_before_the_run_folder_exists(tmp_path):
    with pytest.raises(RequestError, match="KV tokens"):
        launch.train(micro(tmp_path / "run", **{"rollout.kv_tokens": "32"}))
    assert not (tmp_path / "run").exists()


def test_a_stop_token_outside_the_vocabulary_is_refused_before_the_run_folder_exists(tmp_path):
    with pytest.raises(ConfigError, match=r"rollout.stop_token_ids: 112 is no token.* 0 to 111"):
        launch.train(micro(tmp_path / "run", **{"rollout.stop_token_ids": "3,112"}))
    assert not (tmp_path / "run").exists()


def test_own_stop_tokens_are_not_part_of_the_text(tmp_path):
    newline = exactrl.Engine("tiny").encode("\n")[0]
    settings = {"rollout.stop_token_ids": str(newline), "rollout.temperature": "1.0", "run.steps": "1"}
    launch.train(micro(tmp_path / "run", **settings))
    rows = [json.loads(x) for x in (tmp_path / "run" / "samples" / "step_000001.jsonl").read_text().splitlines()]
    stopped = [r for r in rows if r["finish_reason"] == "stop"]
    assert stopped
    assert all(r["token_ids"][-1] == newline and not r["text"].endswith("\n") for r in stopped)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({}, "device cuda needs a GPU and this machine has none; use the device cpu"),
        ({"model.dtype": "float32"}, "bfloat16 models, not float32"),
        ({"contract.true_on_policy": "false"}, "device cuda needs a GPU and this machine has none"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_cannot_be_used_is_named(tmp_path, settings, part) -> None:
    config = load_recipe("tiny", [("run.device", "cuda"), ("run.out", str(tmp_path / "run")), *settings.items()])
    with pytest.raises(ExactRLError, match=part):
        launch.train(config)
    assert not (tmp_path / "run").exists()
