"""Line and stacked-bar charts as inline SVG: a few hundred lines of markup, no library, no script.

Every chart of a page shares the step axis, so that one glance compares them. Colours come from the page's CSS classes
(c1 to c4) and differ in dash or shape too. A <title> per step is the tooltip; <desc> is the text alternative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from exactrl.report.read import Points
from exactrl.report.scale import Axis, linear_axis, log_axis, nice_ticks, tick_label
from exactrl.report.text import clean, plain

WIDTH, HEIGHT = 440, 232
LEFT, RIGHT, TOP, BOTTOM = 50, 428, 12, 196
MAX_COLUMNS = 240


@dataclass(frozen=True, slots=True)
class Series:
    """kind: "line" (breaks where a step lacks the metric), "points" (sparse, joined by dashes) or "bar" (stacked)."""

    name: str
    points: Points
    color: int
    kind: str = "line"


@dataclass(frozen=True, slots=True)
class Chart:
    """What to draw. `zero_note` is written into the plot when every value is exactly 0."""

    title: str
    unit: str
    series: list[Series]
    from_zero: bool = True
    log_when_nonzero: bool = False
    whole: bool = False
    zero_note: str = ""


def draw(chart: Chart, steps: list[float], xs: list[float], ident: str) -> str:
    """A <figure>. `xs` are all steps of the run, `steps` those of training only; both sorted and distinct."""
    shown = [s for s in chart.series if s.points]
    finite = {s.name: [(x, y) for x, y in s.points if math.isfinite(y)] for s in shown}
    columns = _columns(xs)
    x_axis = _step_axis(xs)
    still = bool(chart.zero_note) and all(y == 0 for s in shown for _, y in s.points)
    # A line that is 0 throughout has no scale: it runs through the middle, with 0 as the only label.
    y_axis = Axis(-1, 1, [0.0], BOTTOM, TOP) if still else _value_axis(chart, shown, finite, columns)
    parts = [_grid(x_axis, y_axis)]
    parts += _bars([s for s in shown if s.kind == "bar"], finite, columns, x_axis, y_axis)
    for item in shown:
        if item.kind != "bar":
            parts += _line(item, finite[item.name], steps, x_axis, y_axis)
    parts += [_broken(x, x_axis) for s in shown for x, y in s.points if not math.isfinite(y)]
    if still:
        parts.append(f'<text class="say" x="{(LEFT + RIGHT) / 2}" y="{y_axis(0) - 16}">{clean(chart.zero_note)}</text>')
    parts += _hits(shown, columns, x_axis)
    desc = " ".join(_describe(s.name, finite[s.name], len(s.points)) for s in shown)
    return (
        f"<figure><figcaption><b>{clean(chart.title)}</b> <span>{clean(chart.unit)}</span>{_legend(shown)}"
        "</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{ident}-t {ident}-d">'
        f'<title id="{ident}-t">{clean(chart.title)}</title><desc id="{ident}-d">{clean(desc)}</desc>'
        f"{''.join(parts)}</svg></figure>"
    )


def _columns(xs: list[float]) -> list[list[float]]:
    """Neighbouring steps that share one bar and one tooltip; single steps up to MAX_COLUMNS of them."""
    size = max(1, math.ceil(len(xs) / MAX_COLUMNS))
    return [xs[i : i + size] for i in range(0, len(xs), size)]


def _step_axis(xs: list[float]) -> Axis:
    low, high = xs[0], xs[-1]
    ticks = [t for t in nice_ticks(low, max(high, low + 1), count=7, whole=True) if low <= t <= high]
    return Axis(low - 0.5, high + 0.5, ticks or [low], LEFT, RIGHT)


def _value_axis(chart: Chart, shown: list[Series], finite: dict[str, Points], columns: list[list[float]]) -> Axis:
    values = [y for s in shown if s.kind != "bar" for _, y in finite[s.name]]
    bars = [_means(finite[s.name], columns) for s in shown if s.kind == "bar"]
    values += [math.fsum(v or 0.0 for v in stack) for stack in zip(*bars, strict=True)]
    if chart.log_when_nonzero and any(v > 0 for v in values) and all(v >= 0 for v in values):
        return log_axis(values, BOTTOM, TOP)
    return linear_axis(values, BOTTOM, TOP, chart.from_zero, chart.whole)


def _grid(x_axis: Axis, y_axis: Axis) -> str:
    parts = []
    for tick in y_axis.ticks:
        y = y_axis(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
        parts.append(f'<text class="ty" x="{LEFT - 7}" y="{y + 4:.1f}">{tick_label(tick)}</text>')
    for tick in x_axis.ticks:
        x = x_axis(tick)
        parts.append(f'<path class="tick" d="M{x:.1f} {BOTTOM}v4"/>')
        parts.append(f'<text class="tx" x="{x:.1f}" y="{BOTTOM + 18}">{tick_label(tick)}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}"/>')
    parts.append(f'<text class="tx" x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 3}">step</text>')
    return "".join(parts)


def _means(points: Points, columns: list[list[float]]) -> list[float | None]:
    """Mean per column, None where no step of it has the metric."""
    by_step: dict[float, list[float]] = {}
    for x, y in points:
        by_step.setdefault(x, []).append(y)
    grouped = [[y for x in column for y in by_step.get(x, ())] for column in columns]
    return [math.fsum(ys) / len(ys) if ys else None for ys in grouped]


def _bars(
    items: list[Series], finite: dict[str, Points], columns: list[list[float]], x_axis: Axis, y_axis: Axis
) -> list[str]:
    parts, floor = [], [0.0] * len(columns)
    for item in items:
        for i, value in enumerate(_means(finite[item.name], columns)):
            if not value:
                continue
            left, right = x_axis(columns[i][0] - 0.5), x_axis(columns[i][-1] + 0.5)
            gap = min(1.5, (right - left) * 0.15)
            bottom, top = y_axis(floor[i]), y_axis(floor[i] + value)
            # Hairline bars beside the coloured ones would vanish: nothing that is not 0 is drawn thinner than 0.6.
            height = max(0.6, bottom - top)
            parts.append(
                f'<rect class="c{item.color} bar" x="{left + gap:.2f}" y="{bottom - height:.2f}" '
                f'width="{max(0.4, right - left - 2 * gap):.2f}" height="{height:.2f}"/>'
            )
            floor[i] += value
    return parts


def _line(item: Series, points: Points, steps: list[float], x_axis: Axis, y_axis: Axis) -> list[str]:
    segments = [points] if item.kind == "points" else _segments(points, steps)
    parts, radius = [], 3.6 if len(points) <= 60 else 1.6
    for segment in segments:
        kept = _thin(segment)
        path = " ".join(f"{x_axis(x):.1f},{y_axis(y):.1f}" for x, y in kept)
        if len(kept) > 1:
            parts.append(f'<polyline class="c{item.color} {item.kind}" points="{path}"/>')
        if item.kind == "points" or len(kept) == 1:
            parts += [
                f'<circle class="c{item.color} dot" cx="{x_axis(x):.1f}" cy="{y_axis(y):.1f}" r="{radius}"/>'
                for x, y in kept
            ]
    return parts


def _segments(points: Points, steps: list[float]) -> list[Points]:
    """Cuts a line where a step between two of its points lacks the metric, so that a gap looks like one."""
    index = {step: i for i, step in enumerate(steps)}
    segments: list[Points] = []
    for point in points:
        here = index.get(point[0], -2)
        last = index.get(segments[-1][-1][0], -2) if segments else -9
        if segments and here - last <= 1:
            segments[-1].append(point)
        else:
            segments.append([point])
    return segments


def _thin(points: Points) -> Points:
    """Keeps the lowest and highest point of every chunk of a very long line: no spike is lost."""
    size = math.ceil(len(points) / MAX_COLUMNS)
    if size <= 2:
        return points
    kept: Points = []
    for i in range(0, len(points), size):
        chunk = points[i : i + size]
        extremes = {chunk.index(min(chunk, key=_value)), chunk.index(max(chunk, key=_value))}
        kept += [chunk[j] for j in sorted(extremes)]
    return kept


def _value(point: tuple[float, float]) -> float:
    return point[1]


def _broken(step: float, x_axis: Axis) -> str:
    return f'<text class="nan" x="{x_axis(step):.1f}" y="{TOP + 10}">×</text>'


def _hits(shown: list[Series], columns: list[list[float]], x_axis: Axis) -> list[str]:
    """One invisible full-height strip per column with the tooltip of all series."""
    by_step: dict[str, dict[float, list[float]]] = {s.name: {} for s in shown}
    for item in shown:
        for x, y in item.points:
            by_step[item.name].setdefault(x, []).append(y)
    parts = []
    for column in columns:
        lines = [f"step {plain(column[0])}" if len(column) == 1 else f"steps {plain(column[0])} to {plain(column[-1])}"]
        for item in shown:
            values = [y for x in column for y in by_step[item.name].get(x, ())]
            if len(values) == 1:
                lines.append(f"{item.name}: {plain(values[0])}")
            elif values:
                lines.append(f"{item.name}: {plain(min(values))} to {plain(max(values))}")
        left, right = x_axis(column[0] - 0.5), x_axis(column[-1] + 0.5)
        parts.append(
            f'<rect class="hit" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{BOTTOM - TOP}">'
            f"<title>{clean(chr(10).join(lines))}</title></rect>"
        )
    return parts


def _legend(shown: list[Series]) -> str:
    if len(shown) < 2:
        return ""
    keys = "".join(f'<li><i class="k{s.color} {s.kind}" aria-hidden="true"></i>{clean(s.name)}</li>' for s in shown)
    return f"<ul>{keys}</ul>"


def _describe(name: str, points: Points, count: int) -> str:
    if not points:
        return f"{name}: no finite value."
    ys = [y for _, y in points]
    text = f"{name}: {plain(ys[0])} at step {plain(points[0][0])}, {plain(ys[-1])} at step {plain(points[-1][0])}"
    text += f", between {plain(min(ys))} and {plain(max(ys))}"
    return text + (f", {count - len(points)} values not finite." if count > len(points) else ".")
