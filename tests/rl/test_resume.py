"""What --resume goes on from, what it refuses, and what survives: locks, damaged checkpoints, full disks, Ctrl-C."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from exactrl import launch
from exactrl.errors import CheckpointError, EnvironmentProblem, Interrupted, UsageError
from exactrl.model.config import find_model
from exactrl.rl.run_folder import RunFolder, lock_folder
from exactrl.train import checkpoint as checkpoint_files
from exactrl.train.checkpoint import load_checkpoint, optimizer_digest, read_state, save_checkpoint
from tests.rl.test_kill import config, different, what_counts
from tests.rl.test_run_folder import files
from tests.train.helpers import (
    make_engine,
    make_trainer,
    one_torch_thread,  # noqa: F401
    roll_out,
    unobserved,
    workload,
)


class Watcher(launch.Silent):
    def __init__(self, at_step=None):
        self.notes, self.steps, self.at_step = [], [], at_step

    def on_note(self, text):
        self.notes.append(text)

    def on_step(self, metrics):
        self.steps.append(metrics["step"])
        if self.at_step:
            self.at_step(metrics["step"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("resume") / "whole"
    launch.train(config(out))
    return out


@pytest.fixture
def stopped(whole, tmp_path):
    """A run as a kill after step 4 leaves it, with half a row and a half-written checkpoint behind."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints/step_000005")
    lines = (out / "metrics.jsonl").read_text().splitlines()
    (out / "metrics.jsonl").write_text("\n".join(lines[:4]) + "\n" + lines[4][:60])
    (out / "checkpoints/.step_000005.tmp-77").mkdir()
    (out / "checkpoints/.step_000005.tmp-77/model.safetensors").write_bytes(b"half")
    (out / "report.html").unlink()
    return out


def same_as(whole, out):
    return [
        line
        for mine, theirs in zip(what_counts(out), what_counts(whole), strict=True)
        for line in different(mine, theirs)
    ]


def resume(out, events=None, **changes):
    settings = config(out)
    for key, value in changes.items():
        section, name = key.split("__")
        table = getattr(settings, section).model_copy(update={name: value})
        settings = settings.model_copy(update={section: table})
    return launch.train(settings, events, resume=True)


def test_goes_on_from_the_newest_checkpoint(stopped, whole):
    watcher = Watcher()
    summary = resume(stopped, watcher)
    assert watcher.steps == [5]
    assert same_as(whole, stopped) == []
    assert not list(stopped.glob("**/.*tmp-*"))
    assert summary["steps"] == 5
    rows = [json.loads(line) for line in (stopped / "metrics.jsonl").read_text().splitlines()]
    assert summary["compared_tokens"] == sum(r["train/logprob_compared_tokens"] for r in rows)
    assert json.loads((stopped / "environment.json").read_text())["resumed"][0]["after_step"] == 4


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "config.json"])
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink], ids=["cut", "flip", "gone"])
def test_E_15_a_damaged_checkpoint_is_skipped_and_named(stopped, whole, name, damage):
    if (name, damage) == ("state.json", flip):
        pytest.skip("the last byte of state.json is a newline")
    damage(stopped / "checkpoints/step_000004" / name)
    watcher = Watcher()
    resume(stopped, watcher)
    assert watcher.steps == [4, 5]
    assert len(watcher.notes) == 1
    assert name in watcher.notes[0]
    assert "step_000004 is skipped" in watcher.notes[0]
    assert same_as(whole, stopped) == []
    assert (stopped / "checkpoints/step_000004.damaged").is_dir()  # nothing is thrown away


def test_without_any_checkpoint_it_starts_anew(stopped, whole):
    shutil.rmtree(stopped / "checkpoints")
    watcher = Watcher()
    resume(stopped, watcher)
    assert watcher.steps == [1, 2, 3, 4, 5]
    assert "starts anew" in watcher.notes[0]
    assert same_as(whole, stopped) == []


def test_in_an_empty_place_it_starts(tmp_path, whole):
    resume(tmp_path / "new")
    assert same_as(whole, tmp_path / "new") == []


def test_a_complete_run_is_left_as_it_is(whole):
    before, watcher = files(whole), Watcher()
    summary = resume(whole, watcher)
    assert (watcher.steps, summary["steps"]) == ([], 5)
    assert "is complete" in watcher.notes[0]
    assert files(whole) == before


def test_without_resume_a_run_is_refused_untouched(stopped):
    before = files(stopped)
    with pytest.raises(UsageError, match="--resume"):
        launch.train(config(stopped))
    assert files(stopped) == before


@pytest.mark.parametrize(
    ("key", "value"), [("train__lr", 1e-3), ("rollout__seed", 1), ("run__steps", 9), ("train__kl_in", "reward")]
)
def test_other_settings_are_refused_by_name(stopped, key, value):
    """run.steps, too: this run's learning rate falls over run.steps."""
    before = files(stopped)
    with pytest.raises(CheckpointError, match=key.replace("__", r"\.")):
        resume(stopped, **{key: value})
    assert files(stopped) == before


def test_E_32_settings_that_change_no_bit_may_change(stopped, whole):
    resume(stopped, rollout__kv_tokens=2048, rollout__max_concurrent=3, run__audit_every=0, run__checkpoint_every=5)
    assert read_state(stopped / "checkpoints/step_000005") == read_state(whole / "checkpoints/step_000005")


def test_other_data_are_refused(stopped, monkeypatch):
    real = launch.rl_run.run_identity
    monkeypatch.setattr(launch.rl_run, "run_identity", lambda *a: {**real(*a), "data_digest": "other"})
    before = files(stopped)
    with pytest.raises(CheckpointError, match="data digest was"):
        resume(stopped)
    assert files(stopped) == before


def test_another_tokenizer_is_refused(tmp_path, whole):
    """The weights come from the checkpoint, the tokens from the model folder."""
    model, out = tmp_path / "model", tmp_path / "run"
    shutil.copytree(find_model("tiny"), model)

    def settings():
        made = config(out)
        return made.model_copy(update={"model": made.model.model_copy(update={"path": str(model)})})

    with pytest.raises(Interrupted):
        launch.train(settings(), Watcher(lambda step: os.kill(os.getpid(), signal.SIGHUP)))
    (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text() + " ")
    with pytest.raises(CheckpointError, match="model digest was"):
        launch.train(settings(), resume=True)


def test_an_ignored_signal_stays_ignored(tmp_path, whole):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launch.train(config(tmp_path / "run"), Watcher(lambda step: os.kill(os.getpid(), signal.SIGHUP)))
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert same_as(whole, tmp_path / "run") == []


def test_missing_rows_are_refused(stopped):
    lines = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    (stopped / "metrics.jsonl").write_text("".join(lines[:2]))
    with pytest.raises(CheckpointError, match="rows are not steps 1 to 4"):
        resume(stopped)
    assert (stopped / "checkpoints/step_000004").is_dir()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"\xff\xfe" + data,
        lambda data: b"5\n" + data[data.index(b"\n") + 1 :],
        lambda data: data.replace(b"train/logprob_compared_tokens", b"other", 1),
        lambda data: b"[" * 100_000 + b"\n" + data,
    ],
    ids=["no text", "no row", "key gone", "deep"],
)
@pytest.mark.parametrize("complete", [False, True], ids=["goes on", "complete"])
def test_damaged_rows_are_refused(whole, stopped, tmp_path, damage, complete):
    run = shutil.copytree(whole, tmp_path / "complete") if complete else stopped
    (run / "metrics.jsonl").write_bytes(damage((run / "metrics.jsonl").read_bytes()))
    before = files(run)
    with pytest.raises(CheckpointError, match=r"metrics.jsonl: row 1 is "):
        resume(run)
    assert {**files(run), ".lock": b""} == {**before, ".lock": b""}


def test_rows_with_other_line_ends_are_the_same_rows(stopped, whole):
    rows = (stopped / "metrics.jsonl").read_bytes()
    (stopped / "metrics.jsonl").write_bytes(rows.replace(b"\n", b"\r\n"))
    resume(stopped)
    assert same_as(whole, stopped) == []
    assert b"\r" not in (stopped / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("config_is", ["missing", "folder"])
def test_a_run_without_its_settings_is_refused_untouched(stopped, config_is):
    (stopped / "config.toml").unlink()
    if config_is == "folder":
        (stopped / "config.toml").mkdir()
    before = files(stopped)
    with pytest.raises(CheckpointError, match=r"no config\.toml"):
        resume(stopped)
    assert files(stopped) == before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", 3), ("step", -5), ("step", "4"), ("step", 4.0), ("step", True), ("cursor", None), ("cursor", -7),
        ("cursor", 10**40), ("weight_version", None), ("files", {}), ("files", [1, 2]), ("files", {"a": [1]}),
        ("master_digest", ...),
    ],
)  # fmt: skip
def test_a_state_that_is_none_of_this_run_is_skipped_and_named(stopped, whole, key, value):
    path = stopped / "checkpoints/step_000004/state.json"
    state = json.loads(path.read_text())
    state[key] = value
    if value is ...:
        del state[key]
    path.write_text(json.dumps(state))
    watcher = Watcher()
    resume(stopped, watcher)
    assert watcher.steps == [4, 5]
    assert "step_000004 is skipped" in watcher.notes[0]
    assert same_as(whole, stopped) == []


def test_a_weight_version_of_another_step_is_refused(stopped):
    """The learning rate of a schedule hangs on it."""
    path = stopped / "checkpoints/step_000004/state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "weight_version": 77}))
    with pytest.raises(CheckpointError, match="weight version was 77"):
        resume(stopped)


def test_strange_files_stay_where_they_are(stopped, whole):
    strange = ["samples/step_abc.jsonl", "samples/step_.jsonl", "checkpoints/step_x", "checkpoints/notes.txt"]
    for name in strange:
        (stopped / name).write_text("mine")
    resume(stopped)
    assert [(stopped / name).read_text() for name in strange] == ["mine"] * 4


def test_a_damaged_environment_is_named(stopped):
    (stopped / "environment.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"environment\.json: damaged"):
        resume(stopped)


def test_a_run_that_came_and_went_in_the_meantime_is_not_cut(stopped, whole, monkeypatch):
    """Between the choice of a checkpoint and the lock lie seconds of loading."""
    build = launch.rl_run.build.build_task

    def meanwhile(*arguments):
        shutil.rmtree(stopped)
        shutil.copytree(whole, stopped)
        return build(*arguments)

    monkeypatch.setattr(launch.rl_run.build, "build_task", meanwhile)
    with pytest.raises(UsageError, match="changed by another run"):
        resume(stopped)
    assert {**files(stopped), ".lock": b""} == {**files(whole), ".lock": b""}


def _hold(path, ready, done):
    lock = lock_folder(path)
    ready.set()
    done.wait(30)
    lock.release()


def test_two_runs_never_share_a_folder(stopped):
    """The lock dies with its process, also by kill -9."""
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(stopped, ready, done))
    process.start()
    assert ready.wait(60)
    before = files(stopped)
    with pytest.raises(UsageError, match="in use by another run"):
        resume(stopped)
    assert files(stopped) == before
    process.kill()
    process.join()
    RunFolder(stopped, go_on_after=4).close()


def test_a_lock_is_released_when_the_run_ends(tmp_path):
    for _ in range(2):
        RunFolder(tmp_path / "run").close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_the_run_after_its_step_and_loses_nothing(tmp_path, whole, number):
    """Step 3 has no checkpoint of its own; the signal makes one."""
    out = tmp_path / "run"
    before = signal.getsignal(number)
    watcher = Watcher(lambda step: step == 2 and os.kill(os.getpid(), number))
    settings = config(out).model_copy(update={"run": config(out).run.model_copy(update={"checkpoint_every": 0})})
    with pytest.raises(Interrupted, match="after step 2 of 5; go on with --resume"):
        launch.train(settings, watcher)
    assert signal.getsignal(number) == before
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step_000002"]
    assert "stopping after this step" in watcher.notes[0]
    resume(out)
    assert same_as(whole, out) == []


def test_a_second_signal_ends_it_at_once(tmp_path):
    out = tmp_path / "run"

    class Twice(Watcher):
        def on_progress(self, phase, done, total):
            if self.steps == [1] and phase == "rollout" and done:
                os.kill(os.getpid(), signal.SIGINT)

    watcher = Twice()
    with pytest.raises(Interrupted, match="after step 1 of 5"):
        launch.train(config(out), watcher)
    assert watcher.steps == [1]
    resume(out)


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    out, real = tmp_path / "run", checkpoint_files.save_file
    count = []

    def full(tensors, path, **options):
        count.append(path)
        if len(count) == 3:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(tensors, path, **options)

    monkeypatch.setattr(checkpoint_files, "save_file", full)
    with pytest.raises(EnvironmentProblem, match=r"step_000003: cannot be written: .*No space left"):
        launch.train(config(out))
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step_000001", "step_000002"]
    read_state(out / "checkpoints/step_000002")


def test_E_17_old_checkpoints_go_by_step_number_and_a_busy_one_only_warns(tmp_path, monkeypatch):
    out = RunFolder(tmp_path / "run")
    for step in (30, 25, 100000):
        out.checkpoint_path(step).mkdir(parents=True)
    assert out.prune_checkpoints(2) == []
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == ["step_000030", "step_100000"]

    def busy(path):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(shutil, "rmtree", busy)
    assert "step_000030 cannot be removed" in out.prune_checkpoints(1)[0]
    out.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_weights_and_moments_come_back_bit_for_bit(tmp_path, dtype):
    """Moments are stored by Hugging Face name; another trainer goes on exactly as the first."""
    samples = roll_out(make_engine(dtype), workload())
    trainer, other = make_trainer(dtype), make_trainer(dtype, seed=9)
    for _ in range(2):
        trainer.step(samples, audit=False, observe=unobserved)
    save_checkpoint(trainer, tmp_path / "c", {"step": 2}, tmp_path)
    with safe_open(tmp_path / "c/optimizer.safetensors", "pt") as f:
        assert "exp_avg.model.layers.0.self_attn.k_proj.weight" in set(f.keys())
    state = read_state(tmp_path / "c")
    assert (state["step"], state["weight_version"]) == (2, 2)
    load_checkpoint(other, tmp_path / "c", state)
    assert optimizer_digest(other) == optimizer_digest(trainer)
    for t in (trainer, other):
        t.step(samples, audit=False, observe=unobserved)
    assert (other.master_digest(), other.compute_digest()) == (trainer.master_digest(), trainer.compute_digest())
    assert optimizer_digest(other) == optimizer_digest(trainer) != state["optimizer_digest"]


def test_a_checkpoint_before_any_update_has_no_moments(tmp_path):
    trainer, other = make_trainer(), make_trainer(seed=3)
    other.step(roll_out(make_engine(seed=3), workload()), audit=False, observe=unobserved)
    save_checkpoint(trainer, tmp_path / "c", {"step": 0}, tmp_path)
    load_checkpoint(other, tmp_path / "c", read_state(tmp_path / "c"))
    assert optimizer_digest(other) == optimizer_digest(trainer)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    from tests.model.test_qwen3 import config as model_config

    trainer = make_trainer()
    save_checkpoint(trainer, tmp_path / "c", {"step": 0}, tmp_path)
    other = make_trainer(c=model_config(num_layers=1))
    with pytest.raises(UsageError, match="not of this model"):
        load_checkpoint(other, tmp_path / "c", read_state(tmp_path / "c"))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_who_may_read_a_checkpoint_is_up_to_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        save_checkpoint(make_trainer(), tmp_path / "c", {"step": 0}, tmp_path)
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "c").iterdir()} == dict.fromkeys(
        ["config.json", "model.safetensors", "optimizer.safetensors", "state.json"], oct(mode)
    )


def test_the_command_line(tmp_path, whole, capsys):
    from exactrl.cli import main

    assert sys.modules["exactrl.launch"] is launch
    out = tmp_path / "run"
    call = partial(main)
    arguments = ["train", str(whole / "config.toml"), "--out", str(out)]
    assert call([*arguments, "--resume", "-q"]) == 0
    assert call(arguments) == 2
    assert "go on with --resume" in capsys.readouterr().err
    assert call([*arguments, "--resume"]) == 0
    assert "is complete" in capsys.readouterr().out
    assert call([*arguments, "--resume", "--train.lr", "1"]) == 2
    assert "train.lr was" in capsys.readouterr().err
