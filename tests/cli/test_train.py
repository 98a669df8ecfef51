"""`exactrl train`: overrides, modes, and what is printed where."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from exactrl.cli.options import Settings
from exactrl.cli.progress import LiveEvents, PlainEvents, step_fields, train_events

STEP = {
    "step": 1,
    "train/train_rollout_logprob_abs_diff": 0.0,
    "train/logprob_compared_tokens": 120,
    "train/logprob_mismatch_tokens": 0,
    "train/entropy": 1.25,
    "rollout/raw_reward": 0.5,
    "rollout/response_len/mean": 7.5,
    "perf/rollout_tokens_per_sec": 1000.4,
    "perf/step_time": 2.0,
}


@pytest.fixture
def seen(launch):
    """Fakes a run of two steps; returns the configs that it was given."""
    configs = []

    def train(config, events, resume=False):
        configs.append(config)
        events.on_start({"out": config.run.out, "device": "cpu", "nested": {}})
        for step in (1, 2):
            events.on_progress("rollout", 1, 2)
            events.on_progress("train", 2, 2)
            events.on_step({**STEP, "step": step, **({"eval/heldout/mean": 0.25} if step == 2 else {})})
        summary = {"out": config.run.out, "steps": 2, "report": f"{config.run.out}/report.html"}
        events.on_end(summary)
        return summary

    launch.train = train
    return configs


def test_overrides_in_every_form_and_place(run, seen):
    args = ["--run.steps", "3", "tiny", "--train.lr=0.5", "--no-data.shuffle", "--data.eval.more", "x.jsonl", "-q"]
    assert run("train", *args).code == 0
    config = seen[0]
    assert (config.run.steps, config.train.lr, config.data.shuffle) == (3, 0.5, False)
    assert config.data.eval["more"] == "x.jsonl"


def test_a_value_may_be_negative_or_hold_an_equals_sign(run, seen):
    assert run("train", "tiny", "--run.out=a=b").code == 0
    assert seen[0].run.out == "a=b"
    outcome = run("train", "tiny", "--train.lr", "-1")
    assert "train.lr = -1.0 is not allowed" in outcome.err


def test_named_options_are_settings(run, seen):
    assert run("train", "tiny", "--no-true-on-policy", "--out", "o", "--train-backend", "single").code == 0
    assert seen[0].contract.true_on_policy is False
    assert seen[0].run.out == "o"
    run("train", "tiny", "--true-on-policy", "--contract.true_on_policy", "false")
    assert seen[1].contract.true_on_policy is False


def test_debug_minimal_is_small_and_explicit_settings_win(run, seen):
    assert run("train", "tiny", "--mode", "debug_minimal", "--run.steps", "5").code == 0
    config = seen[0]
    assert (config.run.steps, config.run.eval_every) == (5, 0)
    rollout = config.rollout
    assert (rollout.prompts_per_step, rollout.samples_per_prompt, rollout.max_new_tokens) == (2, 2, 16)


def test_debug_minimal_takes_a_recipe_that_evaluates(run, seen, tmp_path):
    """Settings of evaluation are refused without one, so they go with it."""
    from exactrl.config.recipe import BUNDLED

    recipe = tmp_path / "sampled.toml"
    text = (BUNDLED / "tiny.toml").read_text(encoding="utf-8")
    recipe.write_text(text.replace("[run]\n", "[run]\neval_samples = 4\neval_temperature = 0.6\n"), encoding="utf-8")
    assert run("train", str(recipe)).code == 0
    assert seen[0].run.eval_samples == 4
    assert run("train", str(recipe), "--mode", "debug_minimal").code == 0
    assert (seen[1].run.eval_every, seen[1].run.eval_samples, seen[1].run.eval_temperature) == (0, 1, 0.0)


def test_plain_output_is_one_line_per_step(run, seen):
    lines = run("train", "tiny", "--out", "o").out.splitlines()
    assert lines[0] == "out=o device=cpu"
    assert lines[1] == (
        "step=1 reward=0.5000 response_len=7.5 entropy=1.2500 logprob_diff=0 compared=120 mismatches=0 "
        "tok_per_s=1000 step_time=2.00"
    )
    assert lines[2].endswith(" eval/heldout=0.2500")
    assert lines[3] == ("done: 2 steps; 240 sampled tokens compared, 0 mismatches; run folder o; report o/report.html")
    assert len(lines) == 4


def test_D_23_rows_and_unique_prompts_are_printed():
    screen = Console(file=io.StringIO())
    counts = {"rows": 960, "unique": 30, "prompts": 30, "filtered": 0, "repeated": 930}
    train_events(screen, Settings(), 2, ()).on_start({"out": "o", "data": {"train": counts}})
    assert screen.file.getvalue() == "out=o\ndata train: rows=960 unique=30 prompts=30 filtered=0 repeated=930\n"


def test_quiet_prints_only_the_final_line(run, seen):
    for args in (["-q", "train", "tiny"], ["train", "tiny", "-q"], ["train", "--quiet", "tiny"]):
        out = run(*args).out
        assert out.startswith("done: 2 steps; 240 sampled tokens compared")
        assert out.count("\n") == 1


@pytest.mark.parametrize(
    ("diff", "shown"), [(0.0, "0"), (1e-30, "1e-30"), (5e-324, "4.94e-324"), (0.00012345, "0.000123")]
)
def test_zero_is_shown_only_for_exactly_zero(diff, shown):
    assert step_fields({**STEP, "train/train_rollout_logprob_abs_diff": diff})["logprob_diff"] == shown


def test_difference_without_compared_tokens_is_not_shown():
    assert "logprob_diff" not in step_fields({**STEP, "train/logprob_compared_tokens": 0})
    metrics = {key: value for key, value in STEP.items() if key != "train/logprob_compared_tokens"}
    assert "logprob_diff" not in step_fields(metrics)


def test_absent_metrics_have_no_field():
    assert step_fields({"step": 4}) == {"step": "4"}


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=140, color_system=None, _environ={"TERM": "xterm"})


def test_terminal_gets_a_row_per_step_under_a_heading():
    screen = terminal()
    events = train_events(screen, Settings(), 2, ("heldout",))
    assert isinstance(events, LiveEvents)
    with events:
        events.on_start({"out": "o"})
        events.on_progress("rollout", 3, 10)
        events.on_step(STEP)
        events.on_step({**STEP, "step": 2, "eval/heldout/mean": 0.25, "train/rescore_mismatch_tokens": 4})
    events.conclude({"out": "o", "steps": 2, "report": None})
    text = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", screen.file.getvalue())
    assert re.search(
        r"step +reward +length +entropy +logprob diff +compared +mismatches +tok/s +seconds +heldout", text
    )
    assert re.search(r"1 +0\.5000 +7\.5 +1\.2500 +0 +120 +0 +1000 +2\.00 +-", text)
    assert re.search(r"2 +0\.5000 .* 0\.2500", text)
    assert "4 tokens differ when scored again" in text
    assert "240 sampled tokens compared, 0 mismatches, 4 when scored again; run folder o; report not written" in text


def test_pipe_and_quiet_get_plain_lines():
    assert type(train_events(Console(file=io.StringIO()), Settings(), 2, ())) is PlainEvents
    assert type(train_events(terminal(), Settings(quiet=True), 2, ())) is PlainEvents


def test_live_view_is_stopped_by_an_error():
    events = train_events(terminal(), Settings(), 2, ())
    with pytest.raises(ValueError, match="stop"), events:
        raise ValueError("stop")
    assert events.progress.live.is_started is False
