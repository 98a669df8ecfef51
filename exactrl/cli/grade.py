"""`exactrl grade`: responses with their golds in, verdicts out, one JSONL row each."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from exactrl.cli.options import NoColor, Quiet, Verbose
from exactrl.errors import DataError, UsageError

if TYPE_CHECKING:
    from exactrl.tasks.grading.outcome import Grade
    from exactrl.tasks.grading.pool import Pool

EXAMPLE = "Example: exactrl grade responses.jsonl --reward math --out graded.jsonl"
_ADDED = ("correct", "extracted", "reason")
_BATCH = 512


@dataclass(frozen=True, slots=True)
class Row:
    """`text` is the line as it was read: it is printed again unchanged, but for what is added at its end."""

    text: str
    response: str
    gold: str


class RewardName(StrEnum):
    math = "math"
    dapo = "dapo"


def grade(
    ctx: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSONL rows with response and gold; - = stdin.")],
    reward: Annotated[RewardName, typer.Option(help="Rules: last box, or last `Answer:` line.")] = RewardName.math,
    out: Annotated[Path | None, typer.Option(help="JSONL file to write [stdout].", metavar="FILE")] = None,
    timeout: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds for one row.")] = 5.0,
    response_key: Annotated[str, typer.Option(help="Key of the response; text in files of eval.")] = "response",
    gold_key: Annotated[str, typer.Option(help="Key of the right answer; label in files of eval.")] = "gold",
    workers: Annotated[int, typer.Option(min=0, max=256, help="Processes for formulas; 0 = one per core.")] = 0,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_color: NoColor = False,
) -> None:
    """Grade responses. Prints each row, in order, with correct, extracted and reason added; counts go to stderr. A file
    is checked as a whole before any work; from stdin and pipes, rows before a faulty one are printed."""
    from exactrl.cli.rows import open_output
    from exactrl.tasks.grading.outcome import COUNT_OF
    from exactrl.tasks.grading.pool import Pool

    keys = (response_key, gold_key)
    if out is not None and out.exists() and Path(file).exists() and out.samefile(file):
        raise UsageError(f"--out {out} is the file that is read; give another name")
    if Path(file).is_file():
        for _ in _rows(file, keys):
            pass
    begin = time.perf_counter()
    counts: Counter[str] = Counter(dict.fromkeys(COUNT_OF.values(), 0))
    pool = Pool(workers)
    try:
        with open_output(out) as write:
            for row, found in _graded(_rows(file, keys), reward.value, timeout, pool):
                counts[COUNT_OF[found.reason]] += 1
                write(_line(row, found))
    finally:
        pool.close()
        if not ctx.obj.quiet:
            sys.stderr.write(_summary(counts, time.perf_counter() - begin) + "\n")


def _graded(rows: Iterator[Row], rules: str, timeout_s: float, pool: Pool) -> Iterator[tuple[Row, Grade]]:
    """Rows with their verdicts, in batches, so that memory stays the same however long the input. Where a row is
    faulty, those before it come first and then its DataError."""
    from exactrl.tasks.grading.grade import grade_many

    fault: DataError | None = None
    while fault is None:
        batch: list[Row] = []
        try:
            for row in islice(rows, _BATCH):
                batch.append(row)
        except DataError as error:
            fault = error
        if not batch and fault is None:
            return
        pairs = [(row.response, row.gold) for row in batch]
        yield from zip(batch, grade_many(pairs, timeout_s, rules=rules, pool=pool), strict=True)
    raise fault


def _rows(file: str, keys: tuple[str, str]) -> Iterator[Row]:
    """Rows of a file, or of stdin for "-", one at a time. Empty lines are skipped, and counted in line numbers.

    Raises DataError naming file and line: not UTF-8, not one JSON object, a key missing, of the wrong type or taken.
    """
    name = "stdin" if file == "-" else file
    if file == "-" and sys.stdin is None:
        raise DataError("stdin is closed; give a file, or rows on stdin")
    try:
        stream = sys.stdin.buffer if file == "-" else Path(file).open("rb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from error
    with nullcontext(stream) if file == "-" else stream as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _row(line, f"{name}:{number}", *keys)


def _row(line: bytes, where: str, response_key: str, gold_key: str) -> Row:
    from exactrl.tasks.grading.gold import gold_text

    try:
        text = line.decode("utf-8").strip()
        row = json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte 0x{line[error.start]:02x} is not valid UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not a line of JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row must be a JSON object, not {type(row).__name__}")
    for key in (response_key, gold_key):
        if key not in row:
            have = ", ".join(map(repr, row)) or "nothing"
            raise DataError(f"{where}, key {key!r}: missing; the row has {have} (see --response-key, --gold-key)")
    if not isinstance(row[response_key], str):
        raise DataError(f"{where}, key {response_key!r}: must be a text, not {type(row[response_key]).__name__}")
    if taken := [key for key in _ADDED if key in row]:
        raise DataError(f"{where}, key {taken[0]!r}: this is what grading adds; rename it")
    try:
        return Row(text, row[response_key], gold_text(row[gold_key]))
    except ValueError as error:
        raise DataError(f"{where}, key {gold_key!r}: {error}") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return row


def _line(row: Row, found: Grade) -> str:
    values = (found.correct, found.extracted, found.reason)
    # Half a surrogate pair cannot be written as UTF-8, only as an escape.
    escape = any("\ud800" <= character <= "\udfff" for character in found.extracted or "")
    added = json.dumps(dict(zip(_ADDED, values, strict=True)), ensure_ascii=escape)
    return f"{row.text.removesuffix('}').rstrip()}, {added.removeprefix('{')}"


def _summary(counts: Counter[str], seconds: float) -> str:
    total = counts.total()
    kinds = ", ".join(f"{number} {kind.replace('_', ' ')}" for kind, number in counts.items())
    return f"{total} rows: {kinds}; {total / seconds:.0f} rows/s"
