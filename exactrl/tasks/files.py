"""Rows of data files: JSONL, JSON and parquet, `path@[a:b]` slices, `bundled:` paths. Faults are named by file and row.

Files are read in blocks of rows, so that memory does not grow with the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from exactrl.errors import DataError
from exactrl.tasks.json_text import parse_json

ASSETS = Path(__file__).resolve().parent.parent / "assets"
BUNDLED = "bundled:"
BLOCK_ROWS = 1024

_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?[0-9]*):(?P<stop>-?[0-9]*)\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `source` and the 1-based `place` name it in messages (JSONL: the line; others: the row); `index` counts
    rows of the whole file from 0, before slicing."""

    source: str
    place: int
    index: int
    value: dict[str, Any]

    @property
    def where(self) -> str:
        return f"{self.source} {self.place}"


class Block(Protocol):
    """Consecutive rows of a file."""

    start: int

    def __len__(self) -> int: ...

    def rows(self, positions: Sequence[int] | None = None, columns: Sequence[str] | None = None) -> list[Row]:
        """Rows at these positions of the block (all), with at least these columns (all), as plain Python values.
        `columns` are keys as in a recipe; a dotted key means the column before its first dot where no column has the
        whole name."""
        ...

    def distinct(self, columns: Sequence[str] | None = None) -> tuple[list[int], NDArray[np.int64]]:
        """Positions, ascending, of rows such that every row equals one of them in these columns (all), and for each row
        of the block the number of that one. Equal rows may be missed, different ones are never taken for equal."""
        ...


class RowBlock:
    """Rows that are Python values already."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows
        self.start = rows[0].index

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, positions: Sequence[int] | None = None, columns: Sequence[str] | None = None) -> list[Row]:
        return self._rows if positions is None else [self._rows[i] for i in positions]

    def distinct(self, columns: Sequence[str] | None = None) -> tuple[list[int], NDArray[np.int64]]:
        return list(range(len(self))), np.arange(len(self))


def read_rows(spec: str) -> list[Row]:
    """All rows of `spec`, as read_blocks gives them."""
    return [row for block in read_blocks(spec) for row in block.rows()]


def read_blocks(spec: str) -> Iterator[Block]:
    """Rows of `path`, `path@[a:b]` or `bundled:path`; slices follow Python, negative bounds count from the end.

    A .parquet file is read as such; a .json file holds one array of objects (and is read whole); any other file is
    JSONL in UTF-8, where empty lines are skipped (and counted in line numbers). Raises DataError for a missing or empty
    file, a slice without rows, invalid UTF-8, invalid JSON, NaN and Infinity, repeated keys, rows that are not objects.
    """
    name, part = split_slice(spec)
    path = resolve_path(name)
    if path.suffix == ".parquet":
        from exactrl.tasks.parquet import parquet_blocks  # pyarrow takes long to import

        blocks: Iterator[Block] = parquet_blocks(path, part)
    else:
        blocks = _text_blocks(path, part)
    empty = True
    for block in blocks:
        empty = False
        yield block
    if empty:
        count = count_rows(path)
        raise DataError(f"{spec}: the slice holds no rows; the file has {count}" if count else f"{path}: holds no rows")


def count_rows(path: Path) -> int:
    """Rows of a whole file; of a JSONL file all lines that are not empty, without a look at what they hold."""
    if path.suffix == ".parquet":
        from exactrl.tasks.parquet import open_parquet

        return open_parquet(path).metadata.num_rows
    if path.suffix == ".json":
        return sum(1 for _ in _json_rows(path))
    return sum(1 for _ in _lines(path))


def split_slice(spec: str) -> tuple[str, slice]:
    """The path and the slice of `path@[a:b]`; the whole file where there is no slice. DataError for a malformed one."""
    match = _SLICE.fullmatch(spec)
    if match is None:
        if spec.endswith("]") and "@[" in spec:
            raise DataError(f"{spec}: a slice is written path@[a:b] with whole numbers, e.g. data.jsonl@[0:100]")
        return spec, slice(None)
    try:
        start, stop = (int(match[k]) if match[k] else None for k in ("start", "stop"))
    except ValueError:
        raise DataError(f"{spec}: a slice bound must be a whole number of ordinary size") from None
    return match["path"], slice(start, stop)


def resolve_path(name: str) -> Path:
    """`bundled:x` is a file that comes with the package; anything else is an ordinary path. DataError if missing."""
    try:
        return _bundled_path(name) if name.startswith(BUNDLED) else _ordinary_path(name)
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, a name too long, the home of an unknown user
        raise DataError(f"{name}: not a usable path: {error}") from error


def _ordinary_path(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataError(f"{path}: {'is not a file' if path.exists() else 'no such file'}")
    return path


def _bundled_path(name: str) -> Path:
    path = (ASSETS / name.removeprefix(BUNDLED)).resolve()
    if not path.is_relative_to(ASSETS) or not path.is_file():
        known = ", ".join(sorted(BUNDLED + str(p.relative_to(ASSETS)) for p in ASSETS.rglob("*.jsonl")))
        raise DataError(f"{name}: no such bundled file; there are: {known}")
    return path


def _text_blocks(path: Path, part: slice) -> Iterator[Block]:
    rows = _json_rows(path) if path.suffix == ".json" else _jsonl_rows(path, part)
    if path.suffix == ".json":
        rows = iter(list(rows)[part])
    while block := list(islice(rows, BLOCK_ROWS)):
        yield RowBlock(block)


def _jsonl_rows(path: Path, part: slice) -> Iterator[Row]:
    """Rows of a slice; lines outside it are not parsed. Only bounds need the number of rows, and so a pass before."""
    whole = part == slice(None)
    start, stop, _ = (0, 0, 1) if whole else part.indices(count_rows(path))
    for index, (number, text) in enumerate(_lines(path)):
        if not whole and index >= stop:
            return
        if index >= start:
            where = f"{path}, line {number}"
            yield Row(f"{path}, line", number, index, _object(parse_json(text, where), where))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not empty, numbered from 1. Split at newlines only: JSON strings may hold U+2028 and other
    characters that str.splitlines takes for line ends."""
    offset = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = _decode(line, f"{path}, line {number}", offset)
                offset += len(line)
                if text.strip(" \t\r\n"):
                    yield number, text
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _json_rows(path: Path) -> Iterator[Row]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    text = _decode(content, str(path), 0)
    value = parse_json(text, str(path)) if text.strip() else []
    if not isinstance(value, list):
        raise DataError(f"{path}: must hold an array of objects, not {type(value).__name__}; is it JSONL?")
    for index, item in enumerate(value):
        yield Row(f"{path}, row", index + 1, index, _object(item, f"{path}, row {index + 1}"))


def _decode(content: bytes, where: str, offset: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        place = f"byte 0x{content[error.start]:02x} at offset {offset + error.start}"
        raise DataError(f"{where}: {place} is not valid UTF-8") from None


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a row must be a JSON object, not {type(value).__name__}")
    return value
