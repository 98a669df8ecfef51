"""Which charts a report has, and which of them a run cannot fill."""

from __future__ import annotations

from exactrl.report.charts import Chart, Series, draw
from exactrl.report.numbers import eval_names
from exactrl.report.read import Row, Run, is_training_row, series
from exactrl.report.text import clean
from exactrl.report.verdict import COMPARED, DIFF, UNCOMPARED

# (metric, name, colour, kind)
Line = tuple[str, str, int, str]


def chart_sections(run: Run) -> list[str]:
    """HTML per section. A metric that no row has is named below its section instead of being drawn as zero."""
    rows = run.rows
    if not rows:
        return []
    steps = sorted({float(row["step"]) for row in rows if is_training_row(row)})
    xs = sorted({float(row["step"]) for row in rows})
    sections = {
        "Learning": [_reward(rows), _zero_std(rows)],
        "Agreement of rollout and trainer": [_difference(rows), _tokens(rows)],
        "Responses": [_length(rows), _single(rows, "Truncated responses", "share", "rollout/truncated_ratio")],
        "Optimisation": [
            _single(rows, "Entropy", "nats per token", "train/entropy"),
            _single(rows, "Loss", "", "train/loss", from_zero=False),
            _single(rows, "Gradient norm", "before clipping", "train/grad_norm"),
            _single(rows, "Clipped tokens", "share", "train/pg_clipfrac"),
        ],
        "Time": [_time(rows), _speed(rows)],
    }
    return [_section(title, charts, steps, xs, f"s{i}") for i, (title, charts) in enumerate(sections.items())]


def _section(title: str, charts: list[tuple[Chart, list[str]]], steps: list[float], xs: list[float], ident: str) -> str:
    drawable = [chart for chart, _ in charts if any(s.points for s in chart.series)]
    figures = [draw(chart, steps, xs, f"{ident}-{i}") for i, chart in enumerate(drawable)]
    absent = [key for _, keys in charts for key in keys]
    note = f'<p class="note">No row has {clean(", ".join(absent))}.</p>' if absent else ""
    drawn = f'<div class="charts">{"".join(figures)}</div>' if figures else ""
    return f"<section><h2>{clean(title)}</h2>{note}{drawn}</section>"


def _lines(rows: list[Row], lines: list[Line]) -> tuple[list[Series], list[str]]:
    """The series and the names of the metrics that no row has."""
    found = [(key, Series(name, series(rows, key), color, kind)) for key, name, color, kind in lines]
    return [item for _, item in found], [key for key, item in found if not item.points]


def _single(rows: list[Row], title: str, unit: str, key: str, from_zero: bool = True) -> tuple[Chart, list[str]]:
    items, absent = _lines(rows, [(key, title.lower(), 1, "line")])
    return Chart(title, unit, items, from_zero=from_zero), absent


def _reward(rows: list[Row]) -> tuple[Chart, list[str]]:
    held_out: list[Line] = [
        (f"eval/{name}/mean", f"held-out {name}", 2 + i % 3, "points") for i, name in enumerate(eval_names(rows))
    ]
    items, absent = _lines(rows, [("rollout/raw_reward", "training reward", 1, "line"), *held_out])
    return Chart("Reward", "mean per response", items), absent


def _zero_std(rows: list[Row]) -> tuple[Chart, list[str]]:
    items, absent = _lines(rows, [("rollout/zero_std_groups", "groups", 3, "bar")])
    return Chart("Groups without a learning signal", "all rewards equal", items, whole=True), absent


def _difference(rows: list[Row]) -> tuple[Chart, list[str]]:
    items, absent = _lines(rows, [(DIFF, "mean difference", 1, "line")])
    count = len(items[0].points)
    note = f"exactly 0 at each of {count:,} steps" if count > 1 else "exactly 0"
    title = "Rollout against trainer logprob"
    return Chart(title, "mean |difference|", items, log_when_nonzero=True, zero_note=note), absent


def _tokens(rows: list[Row]) -> tuple[Chart, list[str]]:
    items, absent = _lines(rows, [(COMPARED, "compared", 1, "bar"), (UNCOMPARED, "not compared", 2, "bar")])
    return Chart("Sampled tokens", "per step", items, whole=True), absent


def _length(rows: list[Row]) -> tuple[Chart, list[str]]:
    lines: list[Line] = [
        ("rollout/response_len/mean", "mean", 1, "line"),
        ("rollout/response_len/max", "longest", 2, "line"),
    ]
    items, absent = _lines(rows, lines)
    return Chart("Response length", "tokens", items), absent


def _time(rows: list[Row]) -> tuple[Chart, list[str]]:
    parts = [(f"perf/{name}_time", name, i, "bar") for i, name in enumerate(("rollout", "train", "sync"), start=1)]
    items, absent = _lines(rows, parts)
    return Chart("Step time", "seconds", items), absent


def _speed(rows: list[Row]) -> tuple[Chart, list[str]]:
    lines = [(f"perf/{name}_tokens_per_sec", name, i, "line") for i, name in enumerate(("rollout", "train"), start=1)]
    items, absent = _lines(rows, lines)
    return Chart("Throughput", "tokens per second", items), absent
