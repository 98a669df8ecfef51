"""Reads a run folder as it is: complete, still running, killed half way, or with files missing.

Whatever cannot be read is named in `Run.notes`, which the page shows; nothing is skipped silently and no absent metric
becomes a number.
"""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exactrl.errors import DataError

Row = dict[str, Any]
Points = list[tuple[float, float]]

DETAIL_FILES = ("config.toml", "plan.json", "environment.json", "certificate.json", "failure.json")
OPTIONAL_FILES = ("certificate.json", "failure.json")


@dataclass(frozen=True, slots=True)
class SampleFile:
    """The first rows of one samples/step_*.jsonl; `total` counts all readable and unreadable lines of the file."""

    name: str
    rows: list[Row]
    total: int


@dataclass(frozen=True, slots=True)
class Run:
    """What a run folder holds.

    rows        metrics.jsonl in file order, each with a finite `step`
    lost        lines of metrics.jsonl that are unreadable, other than a half-written last one
    config      parsed config.toml, None when missing or unreadable
    texts       file name -> text, for the files shown as they are
    failure     failure.json of a run that ended early
    sample_files  how many samples/step_*.jsonl there are; `samples` holds the first, middle and last of them
    """

    path: Path
    rows: list[Row]
    lost: int
    notes: list[str]
    config: Row | None
    texts: dict[str, str]
    sample_files: int
    samples: list[SampleFile]
    failure: Row | None = None

    def setting(self, section: str, key: str) -> Any:
        """A value of config.toml, None when it is not there."""
        table = (self.config or {}).get(section)
        return table.get(key) if isinstance(table, dict) else None


def number(row: Row, key: str) -> float | None:
    """The metric as a float (NaN and infinities included), None when absent or not a number."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def series(rows: Iterable[Row], key: str) -> Points:
    """(step, value) of every row that has the metric, in file order, non-finite values included."""
    found = ((float(row["step"]), number(row, key)) for row in rows)
    return [(step, value) for step, value in found if value is not None]


def is_training_row(row: Row) -> bool:
    """False only for a row that holds nothing but an evaluation (such as the one before the first step)."""
    keys = [key for key in row if key != "step"]
    only_eval = all(key.startswith(("eval/", "perf/")) for key in keys) and any(k.startswith("eval/") for k in keys)
    return not only_eval


def read_run(run_dir: Path, rows_per_file: int) -> Run:
    """Reads the folder. Raises DataError, naming the path, where nothing can be shown."""
    if not run_dir.is_dir():
        raise DataError(f"{run_dir} is not a folder; give the folder that `exactrl train` wrote (its --out)")
    notes: list[str] = []
    rows, lost = _read_metrics(run_dir / "metrics.jsonl", notes)
    texts = _read_texts(run_dir, notes)
    names = sorted((run_dir / "samples").glob("step_*.jsonl"))
    picked = [names[i] for i in sorted({0, len(names) // 2, len(names) - 1})] if names else []
    samples = [file for path in picked if (file := _read_samples(path, rows_per_file, notes)) is not None]
    failure = _parse_failure(texts.get("failure.json"), notes)
    if not rows and not failure and not any(file.rows for file in samples):
        why = "has no readable row" if (run_dir / "metrics.jsonl").is_file() else "does not exist"
        raise DataError(f"{run_dir / 'metrics.jsonl'} {why}, and there are no samples: nothing to report yet")
    config = _parse_config(texts.get("config.toml"), notes)
    return Run(run_dir, rows, lost, notes, config, texts, len(names), samples, failure)


def _parse_failure(text: str | None, notes: list[str]) -> Row | None:
    """failure.json of a run that ended early; unreadable content still counts as a failure."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        notes.append("failure.json is not a JSON object.")
        return {"type": "unknown", "message": text[:500]}
    return value


def _parse_lines(data: bytes) -> list[tuple[int, Row | None]]:
    """(line number, object) of every line that is not blank; None for a line that is not a JSON object."""
    parsed: list[tuple[int, Row | None]] = []
    for line_number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError):
            value = None
        parsed.append((line_number, value if isinstance(value, dict) else None))
    return parsed


def _read_metrics(path: Path, notes: list[str]) -> tuple[list[Row], int]:
    data = _read_bytes(path, notes)
    if data is None:
        return [], 0
    parsed = _parse_lines(data)
    rows: list[Row] = []
    lost = 0
    for i, (line_number, row) in enumerate(parsed):
        if row is None and i == len(parsed) - 1:
            notes.append(f"metrics.jsonl, line {line_number} (the last) is half written; it is skipped.")
        elif row is None:
            lost += 1
            notes.append(f"metrics.jsonl, line {line_number} is not a JSON object; it is skipped.")
        elif not math.isfinite(step := _step_of(row)):
            lost += 1
            notes.append(f"metrics.jsonl, line {line_number} has no usable `step`; it is skipped.")
        else:
            rows.append({**row, "step": step})
    _note_disorder(rows, notes)
    return rows, lost


def _step_of(row: Row) -> float:
    step = number(row, "step")
    return math.nan if step is None else step


def _note_disorder(rows: list[Row], notes: list[str]) -> None:
    steps = [row["step"] for row in rows if is_training_row(row)]
    for before, after in itertools.pairwise(steps):
        if after <= before:
            notes.append(f"metrics.jsonl: step {after:g} follows step {before:g}; every row is counted and drawn.")
            return


def _read_bytes(path: Path, notes: list[str]) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        notes.append(f"{path.name} is missing.")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}.")
    return None


def _read_texts(run_dir: Path, notes: list[str]) -> dict[str, str]:
    texts = {}
    for name in DETAIL_FILES:
        if name in OPTIONAL_FILES and not (run_dir / name).exists():
            continue
        data = _read_bytes(run_dir / name, notes)
        if data is not None:
            text = data.decode("utf-8", errors="backslashreplace")
            texts[name] = _pretty(text, name, notes) if name.endswith(".json") else text
    return texts


def _pretty(text: str, name: str, notes: list[str]) -> str:
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        notes.append(f"{name} is not valid JSON; it is shown as it is.")
        return text


def _parse_config(text: str | None, notes: list[str]) -> Row | None:
    if text is None:
        return None
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        notes.append("config.toml is not valid TOML; it is shown as it is.")
        return None


def _read_samples(path: Path, limit: int, notes: list[str]) -> SampleFile | None:
    data = _read_bytes(path, notes)
    if data is None:
        return None
    parsed = _parse_lines(data)
    bad = [str(line_number) for line_number, row in parsed if row is None]
    if bad:
        shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        notes.append(f"samples/{path.name}: line {shown} unreadable or half written; skipped.")
    return SampleFile(path.name, [row for _, row in parsed if row is not None][:limit], len(parsed))
