"""Whole supervised runs on the bundled model, and the Python API."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal

import numpy as np
import pytest
import torch

import exactrl
from exactrl.config import load_sft_recipe
from exactrl.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EnvironmentProblem,
    Interrupted,
    ModelError,
    NonFiniteError,
    UsageError,
)
from exactrl.launch import sft_run as launch_sft
from exactrl.model.config import find_model, read_config
from exactrl.model.folder import load_model
from exactrl.model.weights import initial_weights, master_digest
from exactrl.ops import Ops
from tests.ops.helpers import CONTRACT
from tests.rl.test_run_folder import files
from tests.test_launch import Events, metrics_of, without_times
from tests.train.helpers import one_torch_thread  # noqa: F401

ROWS = "bundled:arithmetic/sft.jsonl"
KEYS = {
    "step", "epoch", "train/loss", "train/num_tokens", "train/grad_norm", "train/lr", "train/weight_digest",
    "train/entropy", "perf/step_time", "perf/train_tokens_per_sec",
}  # fmt: skip


def micro(out, **changes):
    """7 rows in batches of 3, two epochs: 6 updates, the third and the last of a single row."""
    settings = {
        "data.train": f"{ROWS}@[:7]", "data.eval.rest": f"{ROWS}@[7:10]", "train.batch_size": 3, "train.lr": 3e-5,
        "train.warmup_steps": 0, "train.lr_schedule": "constant", "run.epochs": 2, "run.eval_every": 2,
        "run.out": str(out),
    }  # fmt: skip
    for key, value in changes.items():
        settings[key.replace("__", ".")] = value
    return load_sft_recipe("tiny_sft", [(k, str(v)) for k, v in settings.items()])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder, metrics rows, summary, events) of one run."""
    out = tmp_path_factory.mktemp("runs") / "first"
    events = Events()
    summary = exactrl.sft(micro(out), events)
    return out, metrics_of(out), summary, events


def test_metrics(run):
    _, rows, summary, events = run
    assert [(row["step"], row["epoch"]) for row in rows] == [(i + 1, 1 + i // 3) for i in range(6)]
    for row in rows:
        assert set(row) >= KEYS
        assert not any("clip" in key or "logprob" in key or "rollout" in key for key in row)
        assert all(not isinstance(v, float) or np.isfinite(v) for v in row.values())
    assert ["eval/rest/loss" in row for row in rows] == [True, True, False, True, False, True]
    assert len({row["train/weight_digest"] for row in rows}) == 6
    per_epoch = [sum(row["train/num_tokens"] for row in rows[i : i + 3]) for i in (0, 3)]
    assert per_epoch[0] == per_epoch[1]
    assert rows[2]["train/num_tokens"] < rows[0]["train/num_tokens"] / 2
    assert rows[5]["eval/rest/loss"] < rows[0]["eval/rest/loss"]
    assert (events.steps, events.end) == (rows, summary)
    assert {phase for phase, _, _ in events.phases} == {"train", "eval"}


def test_run_folder(run):
    out, rows, summary, _ = run
    assert {p.name for p in out.iterdir()} == {
        ".lock",
        "certificate.json",
        "config.toml",
        "environment.json",
        "metrics.jsonl",
        "checkpoints",
        "samples",
    }
    config = load_sft_recipe(out / "config.toml")
    assert (config.run.epochs, config.train.batch_size) == (2, 3)
    data = json.loads((out / "environment.json").read_text())["data"]
    assert data == {"train": {"rows": 7, "filtered": 0}, "rest": {"rows": 3, "filtered": 0}}
    assert summary["checkpoint"] == str(out / "checkpoints/step_000006")
    assert (summary["out"], summary["steps"], summary["loss"]) == (str(out), 6, rows[-1]["train/loss"])
    model = load_model(out / "checkpoints/step_000006", Ops(CONTRACT), torch.bfloat16, trainable=True)
    assert master_digest(model) == rows[-1]["train/weight_digest"]
    engine = exactrl.Engine(summary["checkpoint"])
    (completion,) = engine.generate(["Add the numbers column by column.\n11+22+33\n"], exactrl.SamplingParams(40))
    assert completion.finish_reason == "stop"


def test_the_first_loss_is_that_of_the_rows(run):
    """The mean over the batch's response tokens, end tokens included, prompts not."""
    _, rows, _, _ = run
    config = micro("unused")
    folder = find_model(config.model.path)
    examples = launch_sft.load_rows(config, folder)[""].examples
    trainer = launch_sft.build_trainer(config, folder, 6)
    _, batch = launch_sft.Batches(examples, 3, 0, True).batch(1)
    scores = np.concatenate(trainer.score(batch)).astype(np.float64)
    assert len(scores) == rows[0]["train/num_tokens"] == sum(len(e.text) + 1 for e in batch)  # one token per character
    assert rows[0]["train/loss"] == pytest.approx(-scores.mean(), rel=1e-6)
    held_out = np.concatenate(trainer.score(launch_sft.load_rows(config, folder)["rest"].examples)).astype(np.float64)
    assert rows[0]["eval/rest/loss"] == pytest.approx(-held_out.mean(), rel=1e-6), "before any update"


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(run, tmp_path):
    out, rows, _, _ = run
    exactrl.sft(micro(tmp_path / "again"))
    assert without_times(metrics_of(tmp_path / "again")) == without_times(rows)
    assert files(tmp_path / "again/checkpoints") == files(out / "checkpoints")
    exactrl.sft(micro(tmp_path / "other", run__seed=1))
    assert metrics_of(tmp_path / "other")[-1]["train/weight_digest"] != rows[-1]["train/weight_digest"]


def test_steps_instead_of_epochs_go_through_the_same_batches(run, tmp_path):
    _, rows, _, _ = run
    changes = {"run__epochs": 0, "run__steps": 4, "run__checkpoint_every": 1, "run__keep_checkpoints": 2}
    exactrl.sft(micro(tmp_path / "r", **changes))
    found = metrics_of(tmp_path / "r")
    assert [r["train/weight_digest"] for r in found] == [r["train/weight_digest"] for r in rows[:4]]
    assert sorted(p.name for p in (tmp_path / "r/checkpoints").iterdir()) == ["step_000003", "step_000004"]


def test_a_folder_with_a_run_is_left_alone(run):
    out, _, _, _ = run
    before = files(out)
    with pytest.raises(UsageError, match="already holds a run"):
        exactrl.sft(micro(out))
    assert files(out) == before


class Stop(Events):
    def on_step(self, metrics):
        super().on_step(metrics)
        if metrics["step"] == 2:
            raise KeyboardInterrupt


def test_ctrl_c_keeps_the_rows_so_far(run, tmp_path):
    with pytest.raises(Interrupted, match="interrupted after step 2 of 6; go on") as caught:
        exactrl.sft(micro(tmp_path / "r"), Stop())
    assert caught.value.exit_code == 130
    assert without_times(metrics_of(tmp_path / "r")) == without_times(run[1][:2])
    failure = json.loads((tmp_path / "r/failure.json").read_text())
    assert (failure["type"], failure["after_step"]) == ("KeyboardInterrupt", 2)


@pytest.mark.parametrize("how", ["signal", "at once", "checkpoint lost"])
def test_a_resumed_run_is_the_uninterrupted_one(run, tmp_path, how):
    """Weights, moments and rows, whether the run was asked to stop, killed, or its newest checkpoint was damaged."""
    out, whole = tmp_path / "r", tmp_path / "whole"

    class Ended(Events):
        def on_step(self, metrics):
            super().on_step(metrics)
            if metrics["step"] == 4 and how == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            elif metrics["step"] == 4:
                raise KeyboardInterrupt

    exactrl.sft(micro(whole, run__checkpoint_every=2))
    with pytest.raises(Interrupted, match="after step 4 of 6; go on with --resume"):
        exactrl.sft(micro(out, run__checkpoint_every=2), Ended())
    if how == "checkpoint lost":
        (out / "checkpoints/step_000002/optimizer.safetensors").unlink()
    events = Events()
    exactrl.sft(micro(out, run__checkpoint_every=2), events, resume=True)
    first = {"signal": 5, "at once": 3, "checkpoint lost": 1}[how]
    assert [row["step"] for row in events.steps] == list(range(first, 7))
    assert without_times(metrics_of(out)) == without_times(metrics_of(whole)) == without_times(run[1])
    states = [json.loads((f / "checkpoints/step_000006/state.json").read_text()) for f in (out, whole)]
    assert states[0] == states[1]
    assert exactrl.sft(micro(out, run__checkpoint_every=2), Events(), resume=True)["steps"] == 6
    with pytest.raises(CheckpointError, match=r"train\.lr was 3e-05, is 0\.1"):
        exactrl.sft(micro(out, train__lr=0.1), resume=True)


def test_a_small_exact_model_trains_on_one_torch_thread_and_gives_the_others_back(tmp_path):
    seen = []
    events = Stop()
    events.on_start = lambda info: None
    events.on_progress = lambda *_: seen.append(torch.get_num_threads())
    torch.set_num_threads(2)
    try:
        for exact in ("true", "false"):
            with pytest.raises(Interrupted):
                exactrl.sft(micro(tmp_path / exact, contract__true_on_policy=exact, run__eval_every=0), events)
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert seen == [1, 1, 2, 2]


def broken_from_step(step: int, build=launch_sft.build_trainer):
    """Trainers whose final norm turns to NaN before an update."""

    def build_trainer(config, folder, steps):
        trainer = build(config, folder, steps)
        see = lambda name, x: x * math.nan if name == "norm" and trainer.version == step - 1 else x  # noqa: E731
        trainer.see = see
        return trainer

    return build_trainer


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(run, tmp_path, monkeypatch):
    monkeypatch.setattr(launch_sft, "build_trainer", broken_from_step(3))
    with pytest.raises(NonFiniteError, match=r"step 3: response token 0 .* logprob nan"):
        exactrl.sft(micro(tmp_path / "r", run__eval_every=0))
    assert [r["train/weight_digest"] for r in metrics_of(tmp_path / "r")] == [
        r["train/weight_digest"] for r in run[1][:2]
    ]
    assert not (tmp_path / "r/checkpoints").exists()
    assert "step 3" in json.loads((tmp_path / "r/failure.json").read_text())["message"]
    monkeypatch.setattr(launch_sft, "build_trainer", broken_from_step(1))
    with pytest.raises(NonFiniteError, match=r"step 0: the loss on data\.eval\.rest is nan"):
        exactrl.sft(micro(tmp_path / "eval"))


def test_a_full_disk_does_not_hide_why_a_run_ended(tmp_path, monkeypatch):
    def full(self, error, after_step):
        raise EnvironmentProblem("no space left")

    monkeypatch.setattr(launch_sft.RunFolder, "write_failure", full)
    with pytest.raises(Interrupted):
        exactrl.sft(micro(tmp_path / "r"), Stop())


def test_problems_found_before_the_run_leave_no_folder(tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(find_model("tiny") / "config.json", bare)
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"id": "a", "prompt": "1" * 300, "response": "2" * 300}))
    cases = [
        (ModelError, "no-such-model", {"model__path": "no-such-model"}),
        (ModelError, r"tokenizer\.json", {"model__path": bare}),
        (DataError, "no such file", {"data__train": "no-such-file.jsonl"}),
        (DataError, "key 'answer': missing", {"data__response_key": "answer"}),
        (DataError, r"line 1, keys .*more than data\.max_tokens = 20", {"data__max_tokens": 20}),
        (DataError, "601 tokens, more than the model's max_position_embeddings = 512", {"data__train": long,
                                                                                       "data__max_tokens": 1000}),
        (ConfigError, "leaves none of the run's 6 steps", {"train__warmup_steps": 6}),
        (ConfigError, "k_leaves 256 does not divide", {"contract__k_leaves": 256}),
    ]  # fmt: skip
    for error, message, changes in cases:
        with pytest.raises(error, match=message):
            exactrl.sft(micro(tmp_path / "r", **changes))
        assert not (tmp_path / "r").exists(), changes


def test_filtered_rows_are_counted(tmp_path):
    data = tmp_path / "rows.jsonl"
    rows = [{"id": str(i), "prompt": "1+2\n", "response": "3" * (1 + 80 * (i % 2))} for i in range(6)]
    data.write_text("".join(json.dumps(r) + "\n" for r in rows))
    events = Events()
    events.on_start = lambda info: events.phases.append((info["rows"], info["filtered"], info["steps"]))
    exactrl.sft(micro(tmp_path / "r", data__train=data, data__max_tokens=84, data__overlong_rows="filter"), events)
    assert events.phases[0] == (3, 3, 2)
    assert json.loads((tmp_path / "r/environment.json").read_text())["data"]["train"] == {"rows": 3, "filtered": 3}


def test_random_weights_need_no_weight_file_and_follow_their_seed(tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(find_model("tiny") / name, bare)
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        exactrl.sft(micro(tmp_path / "r", model__path=bare))
    settings = {"model__path": bare, "model__init": "random", "run__epochs": 1, "run__eval_every": 0}
    losses = {}
    for seed in (0, 1):
        summary = exactrl.sft(micro(tmp_path / str(seed), model__seed=seed, **settings))
        losses[seed] = metrics_of(tmp_path / str(seed))[0]["train/loss"]
        assert (tmp_path / str(seed) / "checkpoints/step_000003/tokenizer.json").is_file()
        load_model(launch_sft.Path(summary["checkpoint"]), Ops(CONTRACT), torch.float32, trainable=False)
    assert losses[0] != losses[1]
    assert all(abs(loss - math.log(112)) < 0.5 for loss in losses.values())  # near uniform over the vocabulary


def test_fresh_weights_are_normal_with_the_initializer_range():
    config = read_config(find_model("tiny"))
    assert config.initializer_range == 0.02
    first, again = (dict(initial_weights(config, 3)) for _ in range(2))
    assert set(first) == {name for name, _ in load_tensors()}
    for name, w in first.items():
        assert torch.equal(w, again[name])
        if w.ndim == 1:
            assert torch.equal(w, torch.ones_like(w)), name
        else:
            assert abs(float(w.mean())) < 5 * 0.02 / math.sqrt(w.numel()), name
            assert abs(float(w.std()) / 0.02 - 1) < 5 / math.sqrt(2 * w.numel()), name
    assert not torch.equal(
        first["model.embed_tokens.weight"], dict(initial_weights(config, 4))["model.embed_tokens.weight"]
    )


def load_tensors():
    from exactrl.model.folder import read_tensors

    return read_tensors(find_model("tiny"))


def test_every_setting_of_the_trainer_arrives(tmp_path):
    settings = {
        "train__lr": 0.25, "train__betas": "[0.5, 0.75]", "train__weight_decay": 0.125, "train__grad_clip": 3.0,
        "train__max_tokens_per_microbatch": 77, "train__loss_aggregation": "sequence-mean", "model__dtype": "float32",
        "train__lr_schedule": "linear", "train__warmup_steps": 1, "train__min_lr_ratio": 0.5, "contract__k_leaves": 4,
    }  # fmt: skip
    for exact in (True, False):
        config = micro(tmp_path, contract__true_on_policy=str(exact).lower(), **settings)
        trainer = launch_sft.build_trainer(config, find_model("tiny"), 3)
        matrices, vectors = trainer.optimizer.param_groups
        assert (matrices["lr"], matrices["betas"], matrices["weight_decay"]) == (0.25, (0.5, 0.75), 0.125)
        assert (vectors["lr"], vectors["betas"], vectors["weight_decay"]) == (0.25, (0.5, 0.75), 0.0)
        assert (trainer.grad_clip, trainer.minibatches, trainer.budget) == (3.0, 1, 77)
        assert (trainer.aggregation, trainer.algorithm.name) == ("sequence-mean", "sft")
        assert [trainer.lr_at(step) for step in (1, 2, 3)] == pytest.approx([0.125, 0.25, 0.1875])
        assert (trainer.model.ops.exact, trainer.model.dtype, trainer.model.leaves) == (exact, torch.float32, 4)


def test_the_bundled_recipe_lowers_the_held_out_loss(tmp_path):
    """Half of its epochs; what the whole run reaches stands in the recipe."""
    exactrl.sft(load_sft_recipe("tiny_sft", [("run.epochs", "2"), ("run.out", str(tmp_path / "r"))]))
    rows = metrics_of(tmp_path / "r")
    assert [row["step"] for row in rows if "eval/rest/loss" in row] == [1, 7, 14]
    assert 0.03 < rows[0]["eval/rest/loss"] < 0.07
    assert rows[-1]["eval/rest/loss"] < 0.5 * rows[0]["eval/rest/loss"]


def test_plain_kernels_learn_too(run, tmp_path):
    exactrl.sft(micro(tmp_path / "r", contract__true_on_policy="false"))
    for plain, exact in zip(metrics_of(tmp_path / "r"), run[1], strict=True):
        assert plain["train/loss"] == pytest.approx(exact["train/loss"], rel=0.3, abs=0.02)
