"""`exactrl sft`: overrides, what is printed where, and a recipe of the wrong kind."""

from __future__ import annotations

import io
import re
import sys
from types import ModuleType

import pytest
from rich.console import Console

from exactrl.cli.options import Settings
from exactrl.cli.progress import SFT_VIEW, LiveEvents, train_events
from exactrl.errors import Interrupted

STEP = {
    "step": 1,
    "epoch": 1,
    "train/loss": 2.5,
    "train/num_tokens": 320,
    "train/grad_norm": 0.75,
    "train/lr": 1e-4,
    "train/entropy": 1.0,
    "perf/train_tokens_per_sec": 1000.4,
    "perf/step_time": 2.0,
}
SUMMARY = {"out": "o", "steps": 2, "loss": 1.25, "checkpoint": "o/checkpoints/step_000002"}


@pytest.fixture
def seen(monkeypatch):
    """Fakes a run of two steps; returns the configs that it was given."""
    configs = []

    def sft(config, events, resume=False):
        configs.append(config)
        events.on_start({"model": config.model.path, "steps": 2, "data": {}})
        for step in (1, 2):
            events.on_progress("train", 0, 64)
            events.on_step({**STEP, "step": step, **({"eval/rest/loss": 0.25} if step == 2 else {})})
        events.on_end(SUMMARY)
        return SUMMARY

    fake = ModuleType("exactrl.launch")
    fake.sft = sft
    monkeypatch.setitem(sys.modules, "exactrl.launch", fake)
    return configs


def test_overrides_in_every_form(run, seen):
    args = ["--run.epochs", "3", "tiny_sft", "--train.lr=0.5", "--no-data.append_eos", "--out", "o", "-q"]
    assert run("sft", *args).code == 0
    config = seen[0]
    assert (config.run.epochs, config.train.lr, config.data.append_eos, config.run.out) == (3, 0.5, False, "o")


def test_plain_output_is_one_line_per_step(run, seen):
    lines = run("sft", "tiny_sft").out.splitlines()
    assert lines == [
        "model=bundled:tiny steps=2",
        "step=1 epoch=1 loss=2.5000 tokens=320 grad_norm=0.75 lr=0.0001 tok_per_s=1000 step_time=2.00",
        "step=2 epoch=1 loss=2.5000 tokens=320 grad_norm=0.75 lr=0.0001 tok_per_s=1000 step_time=2.00 eval/rest=0.2500",
        "done: 2 steps; last loss 1.2500; run folder o; model o/checkpoints/step_000002",
    ]
    quiet = run("sft", "tiny_sft", "-q").out
    assert quiet == lines[-1] + "\n"


def test_terminal_gets_a_row_per_step_and_learns_the_number_of_steps():
    screen = Console(
        file=io.StringIO(), force_terminal=True, width=140, color_system=None, _environ={"TERM": "xterm"}
    )  # fmt: skip
    events = train_events(screen, Settings(), 0, ("rest",), SFT_VIEW)
    assert isinstance(events, LiveEvents)
    with events:
        events.on_start({"steps": 2})
        assert events.progress.tasks[0].total == 2
        events.on_step({**STEP, "eval/rest/loss": 0.5})
    text = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", screen.file.getvalue())
    assert re.search(r"step +epoch +loss +tokens +grad norm +lr +tok/s +seconds +rest", text)
    assert re.search(r"1 +1 +2\.5000 +320 +0\.75 +0\.0001 +1000 +2\.00 +0\.5000", text)


def test_help_lists_the_settings_of_this_kind_of_recipe(run):
    out = run("sft", "--help").out
    assert "--data.response_key" in out
    assert "--run.epochs" in out
    assert "--rollout." not in out
    assert "--data.response_key" not in run("train", "--help").out


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["sft", "tiny"], "run it with `exactrl train`"),
        (["train", "tiny_sft"], "run it with `exactrl sft`"),
        (["plan", "tiny_sft"], "run it with `exactrl sft`"),
        (["sft", "tiny_sft", "--run.epoch", "1"], "did you mean run.epochs?"),
        (["sft", "tiny_sft", "--run.epochs"], "--run.epochs needs a value (an integer, at least 0)"),
        (["sft", "tiny_sft", "--no-run.epochs"], "--no-run.epochs does not exist"),
        (["sft", "tiny_sft", "--epochs", "1"], "--run.epochs"),
        (["sft", "tiny_sft", "--run.steps", "5"], "exactly one says how long the run is"),
        (["sft"], "RECIPE"),
    ],
)
def test_usage_errors_name_what_was_meant(run, seen, launch, args, expected):
    launch.plan = None
    outcome = run(*args)
    assert (outcome.code, outcome.out, seen) == (2, "", [])
    assert expected in outcome.err


def test_ctrl_c_exits_with_130(run, seen, monkeypatch):
    def sft(config, events, resume=False):
        raise Interrupted("interrupted after step 1 of 2; see o")

    sys.modules["exactrl.launch"].sft = sft
    outcome = run("sft", "tiny_sft")
    assert (outcome.code, outcome.err) == (130, "error: interrupted after step 1 of 2; see o\n")
