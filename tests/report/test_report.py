"""The report says what the run folder shows and no more."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from exactrl.errors import DataError, EnvironmentProblem
from exactrl.report import write_report
from exactrl.report.read import read_run
from exactrl.report.scale import linear_axis, log_axis, nice_ticks
from exactrl.report.text import clean, duration, plain
from exactrl.report.verdict import Verdict, judge

COMPARED, MISMATCH = "train/logprob_compared_tokens", "train/logprob_mismatch_tokens"
DIFF = "train/train_rollout_logprob_abs_diff"


def metrics(step: int, **changes: Any) -> dict[str, Any]:
    """A row as training writes it; a change to None removes the metric. `__` in a name stands for `/`."""
    row: dict[str, Any] = {
        "step": step,
        DIFF: 0.0,
        "train/logprob_abs_diff_max": 0.0,
        MISMATCH: 0,
        COMPARED: 1000 + step,
        "train/logprob_uncompared_tokens": 0,
        "train/weight_digest": f"{step:032x}",
        "train/compute_digest": f"{step + 1:032x}",
        "train/loss": -0.01 * step,
        "train/pg_clipfrac": 0.001,
        "train/entropy": 1.0 / step if step else 1.0,
        "train/grad_norm": 0.5,
        "rollout/raw_reward": step / 40,
        "rollout/response_len/mean": 12.5,
        "rollout/response_len/max": 32,
        "rollout/truncated_ratio": 0.1,
        "rollout/zero_std_groups": 3,
        "rollout/num_samples": 64,
        "perf/rollout_time": 1.0,
        "perf/train_time": 2.0,
        "perf/sync_time": 0.1,
        "perf/step_time": 3.25,
        "perf/rollout_tokens_per_sec": 1000.0,
        "perf/train_tokens_per_sec": 500.0,
    }
    row.update({key.replace("__", "/"): value for key, value in changes.items()})
    return {key: value for key, value in row.items() if value is not None}


def sample(index: int, **changes: Any) -> dict[str, Any]:
    row = {"id": f"p{index // 4}", "sample": index % 4, "prompt": "1 + 1 =", "prompt_token_ids": [1, 2, 3]}
    row |= {"text": "2", "token_ids": [7, 8], "logprobs": [-0.5, -0.25], "logprob_bits": ["bf000000", "be800000"]}
    row |= {"finish_reason": "stop", "label": "2", "reward": 1.0, "advantage": 0.5, "weight_version": 0}
    return row | changes


def make_run(path: Path, rows: list[dict[str, Any]], on_policy: bool = True, samples: Any = None) -> Path:
    (path / "samples").mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "config.toml").write_text(
        f'[model]\npath = "tiny"\n[contract]\ntrue_on_policy = {str(on_policy).lower()}\n[run]\nsteps = 40\n'
    )
    (path / "plan.json").write_text('{"contract": "exact-v1"}')
    (path / "environment.json").write_text('{"torch": "2.13.0"}')
    for step, content in (samples or {}).items():
        text = "".join(json.dumps(row) + "\n" for row in content)
        (path / "samples" / f"step_{step:06d}.jsonl").write_text(text)
    return path


def verdict(path: Path, rows: list[dict[str, Any]], on_policy: bool = True) -> Verdict:
    return judge(read_run(make_run(path, rows, on_policy), 6))


class Checker(HTMLParser):
    """Balanced tags, and no tag or attribute that loads or runs anything."""

    VOID = frozenset({"meta", "path", "rect", "circle", "polyline"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in {"script", "link", "img", "iframe", "object", "use", "image"}
        assert not [
            name for name, _ in attrs if name in {"src", "href", "xlink:href", "style"} or name.startswith("on")
        ]
        if tag not in self.VOID or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID or tag == "rect":
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page(run: Path) -> str:
    text = write_report(run).read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert not re.search(r"https?://|@import|url\(", text)
    return text


def test_complete_run(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": 0, "eval/arithmetic/mean": 0.1}]
    rows += [metrics(step, eval__arithmetic__mean=0.9 if step == 40 else None) for step in range(1, 41)]
    run = make_run(tmp_path / "demo", rows, samples={s: [sample(i) for i in range(9)] for s in (1, 2, 3, 4, 5)})
    text = page(run)
    total = sum(1000 + step for step in range(1, 41))
    assert f"0 of {total:,} compared tokens differ" in text
    assert 'class="verdict good"' in text
    assert "Steps 1 to 40." in text
    assert "0 sampled tokens were not compared" in text
    assert "0.1 → 0.9" in text
    assert "0.0625" in text  # mean reward of steps 1 to 4
    assert "2 min 10 s" in text
    assert "exactly 0 at each of 40 steps" in text
    assert text.count("<svg") == 12
    assert text.count("<svg") == text.count("<desc")
    for step in (1, 3, 5):
        assert f"step_00000{step}.jsonl" in text
    assert "step_000002.jsonl" not in text
    assert "The first 6 of 9 rows; 3 more are not shown." in text
    assert "No row has" not in text
    assert "could not read" not in text


def test_same_folder_same_bytes_and_nothing_left_beside(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo", [metrics(1)])
    before = sorted(path.name for path in run.iterdir())
    assert write_report(run, tmp_path / "a.html").read_bytes() == write_report(run, tmp_path / "b.html").read_bytes()
    assert sorted(path.name for path in run.iterdir()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html", "demo"]


def test_mismatch_is_the_headline(tmp_path: Path) -> None:
    rows = [metrics(1), metrics(2, **{MISMATCH: 3, DIFF: 2e-5}), metrics(3, **{MISMATCH: 1, DIFF: 1e-6})]
    run = make_run(tmp_path / "run", rows)
    text = page(run)
    assert "MISMATCH at step 2: 3 of 1,002 compared tokens differ, mean difference 2e-05; 2 steps differ" in text
    assert 'class="verdict bad"' in text
    assert "0 of" not in text
    assert "exactly 0 at" not in text


@pytest.mark.parametrize(
    "change",
    [
        {DIFF: 1e-9},
        {DIFF: float("nan")},
        {"train/logprob_abs_diff_max": float("inf")},
        {"train/rescore_mismatch_tokens": 1},
    ],
)
def test_any_difference_counts_even_when_the_token_count_says_zero(tmp_path: Path, change: dict[str, Any]) -> None:
    found = verdict(tmp_path / "run", [metrics(1), metrics(2, **change)])
    assert found.tone == "bad"
    assert found.headline.startswith("MISMATCH at step 2")


@pytest.mark.parametrize(
    "change", [{COMPARED: 0}, {COMPARED: None}, {MISMATCH: None}, {DIFF: None}, {COMPARED: "many"}]
)
def test_zero_is_never_claimed_without_a_comparison(tmp_path: Path, change: dict[str, Any]) -> None:
    nothing = verdict(tmp_path / "none", [metrics(1, **change)])
    assert nothing.tone == "warn"
    assert nothing.headline.startswith("No token was compared")
    some = verdict(tmp_path / "some", [metrics(1), metrics(2, **change)])
    assert some.tone == "warn"
    assert "1 of 2 steps lack the comparison" in some.headline
    assert "No comparison at step 2." in some.detail


def test_off_is_labelled(tmp_path: Path) -> None:
    found = verdict(tmp_path / "off", [metrics(1, **{MISMATCH: 900, DIFF: 0.01})], on_policy=False)
    assert (found.tone, found.headline) == ("off", "True on-policy is off: 900 of 1,001 compared tokens differ")
    found = verdict(tmp_path / "none", [metrics(1, **{COMPARED: 0, MISMATCH: 0})], on_policy=False)
    assert found.headline == "True on-policy is off: no token was compared"


def test_half_written_last_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [metrics(1), metrics(2)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics(3))[:50])
    text = page(run)
    assert "metrics.jsonl, line 3 (the last) is half written; it is skipped." in text
    assert "0 of 2,003 compared tokens differ" in text
    assert "has not reached its 40 steps" in text


def test_a_broken_line_in_the_middle_takes_the_green_away(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [metrics(1)])
    (run / "metrics.jsonl").write_text(f"{json.dumps(metrics(1))}\n\x00\x00\n{json.dumps(metrics(3))}\n")
    text = page(run)
    assert "metrics.jsonl, line 2 is not a JSON object; it is skipped." in text
    assert 'class="verdict warn"' in text


def test_missing_files_and_absent_metrics_are_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, COMPARED: 5, MISMATCH: 0, DIFF: 0.0}))
    text = page(run)
    for name in ("config.toml", "plan.json", "environment.json"):
        assert f"{name} is missing." in text
    assert "No row has rollout/raw_reward, rollout/zero_std_groups." in text
    assert "Whether true on-policy was switched on is not known" in text
    assert "There are no samples to show." in text
    assert "Mean reward" not in text
    assert "Wall time" not in text


def test_nan_is_marked_and_gaps_stay_gaps(tmp_path: Path) -> None:
    rows = [metrics(step) for step in range(1, 8)]
    rows[2]["train/entropy"] = float("nan")
    del rows[4]["train/grad_norm"]
    text = page(make_run(tmp_path / "run", rows))
    assert "entropy: NaN" in text
    assert '<text class="nan"' in text
    assert "1 values not finite" in text
    figure = text[text.index("<b>Gradient norm</b>") :].split("</figure>")[0]
    assert figure.count("<polyline") == 2


def test_samples_are_escaped_cut_and_fall_back_to_ids(tmp_path: Path) -> None:
    rows = [
        sample(0, text="<script>alert('x')</script>\x1b[31m\ud800"),
        sample(1, text="y" * 2000),
        sample(2, text=None, prompt=None),
        {"id": "bare"},
    ]
    text = page(make_run(tmp_path / "run", [metrics(1)], samples={1: rows}))
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;␛[31m\\ud800" in text
    assert "… 800 more characters not shown" in text
    assert "2 token ids:</span> 7 8" in text
    assert "3 token ids:</span> 1 2 3" in text
    assert "The first 4 of 4 rows; that is all of them." in text


def test_nothing_to_show_is_an_error_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere is not a folder"):
        write_report(tmp_path / "nowhere")
    run = tmp_path / "empty"
    run.mkdir()
    with pytest.raises(DataError, match=r"empty/metrics\.jsonl does not exist"):
        write_report(run)
    (run / "metrics.jsonl").write_text('{"step": 1, "tr')
    with pytest.raises(DataError, match=r"empty/metrics\.jsonl has no readable row"):
        write_report(run)
    assert not (run / "report.html").exists()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [metrics(1)])
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        write_report(run, tmp_path / "no" / "such" / "report.html")
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        write_report(run, tmp_path)


def test_only_samples_or_only_an_evaluation_still_make_a_page(tmp_path: Path) -> None:
    text = page(make_run(tmp_path / "samples", [], samples={1: [sample(0)]}))
    assert "No token was compared" in text
    text = page(make_run(tmp_path / "eval", [{"step": 0, "eval/aime/mean": 0.25}]))
    assert "evaluated once" in text
    assert "No token was compared" in text


def test_long_runs_stay_small_and_keep_their_spikes(tmp_path: Path) -> None:
    rows = [metrics(step) for step in range(1, 3001)]
    rows[1234][DIFF] = 0.5
    text = page(make_run(tmp_path / "run", rows))
    assert len(text) < 800_000
    assert "MISMATCH at step 1,235" in text
    assert "mean difference: 0 to 0.5" in text


def test_ticks_and_axes() -> None:
    assert nice_ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert nice_ticks(0, 3, whole=True) == [0, 1, 2, 3]
    assert linear_axis([], 100, 0).ticks[0] == 0
    for values in ([0.0], [5.0], [-3.0, 2.0], [1e-300], [1e300, -1e300], [7, 7 + 1e-9], [1e16]):
        axis = linear_axis(values, 100, 0, from_zero=False)
        assert all(-1e-6 <= axis(value) <= 100 + 1e-6 for value in values)
        assert len(axis.ticks) < 20
    log = log_axis([0.0, 1e-7, 3e-2], 100, 0)
    assert (log(0.0), log(1e-1)) == (100, 0)
    assert log(1e-7) < 100


def test_numbers_as_text() -> None:
    assert [plain(v) for v in (None, 0, 312418, -0.5, 1e-7, 1234.56)] == [
        "–",
        "0",
        "312,418",
        "−0.5",
        "1e-07",
        "1,234.6",
    ]
    assert [duration(v) for v in (12.34, 245, 7620)] == ["12.3 s", "4 min 05 s", "2 h 07 min"]
    assert clean("a<b>\x00\n\x7f") == "a&lt;b&gt;␀\n␡"


def test_uncompared_tokens_are_in_the_headline(tmp_path: Path) -> None:
    rows = [metrics(step) | {"train/logprob_uncompared_tokens": 48} for step in (1, 2)]
    text = page(make_run(tmp_path / "run", rows))
    assert 'class="verdict warn"' in text
    assert "compared tokens differ; 96 sampled tokens were not compared" in text


@pytest.mark.parametrize("steps", [0, 2])
def test_a_run_that_parity_stopped_says_so(tmp_path: Path, steps: int) -> None:
    """The step that failed has no metrics row, so the rows alone look perfect."""
    run = make_run(tmp_path / "run", [metrics(step) for step in range(1, steps + 1)])
    failure = {"type": "ParityError", "message": "rollout and train logprob differ", "after_step": steps}
    (run / "failure.json").write_text(json.dumps(failure))
    text = page(run)
    assert 'class="verdict bad"' in text
    assert f"STOPPED by the parity check after step {steps}" in text
    assert "rollout and train logprob differ" in text
