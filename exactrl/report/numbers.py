"""Key numbers of a run and the table of every metric."""

from __future__ import annotations

import math
from statistics import fmean, median

from exactrl.report.read import Points, Row, Run, is_training_row, number, series
from exactrl.report.text import clean, duration, plain

Tile = tuple[str, str, str]  # name, value, small print; plain text


def key_numbers(run: Run) -> str:
    """Tiles; one whose metric is absent is left out."""
    rows = [row for row in run.rows if is_training_row(row)]
    tiles = _reward(rows) + _held_out(run.rows) + _steps(run, rows) + _wall_time(rows) + _speed(rows)
    items = "".join(
        f"<div><dt>{clean(name)}</dt><dd>{clean(value)}<small>{clean(small)}</small></dd></div>"
        for name, value, small in tiles
    )
    return f'<section aria-label="Key numbers"><dl class="keys">{items}</dl></section>' if items else ""


def eval_names(rows: list[Row]) -> list[str]:
    """Names of held-out tables, from `eval/<name>/mean`, in order of appearance."""
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("eval/") and key.endswith("/mean"))
    return [key.removeprefix("eval/").removesuffix("/mean") for key in keys]


def _finite(points: Points) -> Points:
    return [(step, value) for step, value in points if math.isfinite(value)]


def _span(points: Points) -> str:
    first, last = points[0][0], points[-1][0]
    return f"step {plain(first)}" if first == last else f"steps {plain(first)} to {plain(last)}"


def _reward(rows: list[Row]) -> list[Tile]:
    points = _finite(series(rows, "rollout/raw_reward"))
    if len(points) < 2:
        return [("Mean reward", plain(value), f"step {plain(step)}, the only one") for step, value in points]
    count = math.ceil(len(points) / 10)
    parts = (("first", points[:count]), ("last", points[-count:]))
    return [(f"Mean reward, {name} tenth", plain(fmean(y for _, y in part), 3), _span(part)) for name, part in parts]


def _held_out(rows: list[Row]) -> list[Tile]:
    tiles: list[Tile] = []
    for name in eval_names(rows):
        points = _finite(series(rows, f"eval/{name}/mean"))
        if len(points) > 1:
            (x0, y0), (x1, y1) = points[0], points[-1]
            tiles.append(
                (f"Held-out {name}", f"{plain(y0, 3)} → {plain(y1, 3)}", f"step {plain(x0)} → step {plain(x1)}")
            )
        elif points:
            tiles.append((f"Held-out {name}", plain(points[0][1], 3), f"step {plain(points[0][0])}, evaluated once"))
    return tiles


def _steps(run: Run, rows: list[Row]) -> list[Tile]:
    planned = run.setting("run", "steps")
    small = f"of {plain(planned)} planned" if isinstance(planned, int) else "training steps"
    return [("Steps", plain(len({row["step"] for row in rows})), small)]


def _wall_time(rows: list[Row]) -> list[Tile]:
    times = _finite(series(rows, "perf/step_time"))
    if not times:
        return []
    seconds = math.fsum(value for _, value in times)
    scope = "sum of step times" if len(times) == len(rows) else f"sum over {len(times)} of {len(rows)} steps"
    return [("Wall time", duration(seconds), scope)]


def _speed(rows: list[Row]) -> list[Tile]:
    tiles: list[Tile] = []
    for name in ("rollout", "train"):
        points = _finite(series(rows, f"perf/{name}_tokens_per_sec"))
        if points:
            speed = median(value for _, value in points)
            value = plain(round(speed)) if speed >= 100 else plain(speed)
            tiles.append((f"{name.capitalize()} tokens/s", value, "median over steps"))
    return tiles


def metrics_table(rows: list[Row]) -> str:
    """Every metric by name with its first, last, lowest and highest value; digests and other text: first and last."""
    keys = dict.fromkeys(key for row in rows for key in row if key != "step")
    if not keys:
        return ""
    body = "".join(_metric_row(rows, key) for key in keys)
    names = ("rows", "first", "last", "lowest", "highest")
    head = "".join(f'<th scope="col" class="num">{name}</th>' for name in names)
    return (
        '<details><summary>Every metric</summary><div class="wide"><table><thead><tr><th scope="col">metric</th>'
        f"{head}</tr></thead><tbody>{body}</tbody></table></div></details>"
    )


def _metric_row(rows: list[Row], key: str) -> str:
    values = [value for row in rows if (value := number(row, key)) is not None]
    if values:
        low_high = [plain(min(values)), plain(max(values))] if all(map(math.isfinite, values)) else ["not finite"] * 2
        cells = [plain(len(values)), plain(values[0]), plain(values[-1]), *low_high]
    else:
        texts = [str(row[key]) for row in rows if row.get(key) is not None]
        ends = [text[:12] + ("…" if len(text) > 12 else "") for text in (texts[:1] + texts[-1:])] or ["–", "–"]
        cells = [plain(len(texts)), *ends, "–", "–"]
    tds = "".join(f'<td class="num">{clean(cell)}</td>' for cell in cells)
    return f'<tr><th scope="row">{clean(key)}</th>{tds}</tr>'
