"""Rows of data files: JSONL and JSON, `path@[a:b]` slices, `bundled:` paths. Every fault is named by file and row."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from exactrl.errors import DataError

ASSETS = Path(__file__).resolve().parent.parent / "assets"
BUNDLED = "bundled:"

_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?[0-9]*):(?P<stop>-?[0-9]*)\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `where` names it in messages: the file and its 1-based line (JSONL) or row (JSON); `index` counts rows
    of the whole file from 0, before slicing."""

    where: str
    index: int
    value: dict[str, Any]


def read_rows(spec: str) -> list[Row]:
    """Rows of `path`, `path@[a:b]` or `bundled:path`; slices follow Python, negative bounds count from the end.

    A .json file holds one array of objects; any other text file is read as JSONL, where empty lines are skipped (and
    counted in line numbers). Raises DataError for a missing or empty file, a slice without rows, invalid UTF-8, invalid
    JSON, NaN and Infinity, repeated keys, and rows that are not objects.
    """
    name, part = split_slice(spec)
    path = resolve_path(name)
    text = _read_text(path)
    rows = _json_rows(path, text) if path.suffix == ".json" else _jsonl_rows(path, text)
    if not rows:
        raise DataError(f"{path}: holds no rows")
    if not rows[part]:
        raise DataError(f"{spec}: the slice holds no rows; the file has {len(rows)}")
    return rows[part]


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
    if not name.startswith(BUNDLED):
        path = Path(name).expanduser()
        if not path.is_file():
            raise DataError(f"{path}: {'is not a file' if path.exists() else 'no such file'}")
    else:
        path = (ASSETS / name.removeprefix(BUNDLED)).resolve()
        if not path.is_relative_to(ASSETS) or not path.is_file():
            known = ", ".join(sorted(BUNDLED + str(p.relative_to(ASSETS)) for p in ASSETS.rglob("*.jsonl")))
            raise DataError(f"{name}: no such bundled file; there are: {known}")
    if path.suffix == ".parquet":
        raise DataError(f"{path}: parquet cannot be read yet; convert it to JSONL")
    return path


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: byte 0x{content[error.start]:02x} at offset {error.start} is not valid UTF-8"
        ) from None


def _jsonl_rows(path: Path, text: str) -> list[Row]:
    rows: list[Row] = []
    # Not splitlines(): JSON strings may hold U+2028 and other characters that it takes for line ends.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip(" \t\r"):
            where = f"{path}, line {number}"
            rows.append(Row(where, len(rows), _object(_parse(line, where), where)))
    return rows


def _json_rows(path: Path, text: str) -> list[Row]:
    if not text.strip():
        return []
    value = _parse(text, str(path))
    if not isinstance(value, list):
        raise DataError(f"{path}: must hold an array of objects, not {type(value).__name__}; is it JSONL?")
    wheres = [f"{path}, row {number}" for number in range(1, len(value) + 1)]
    return [Row(where, i, _object(item, where)) for i, (where, item) in enumerate(zip(wheres, value, strict=True))]


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a row must be a JSON object, not {type(value).__name__}")
    return value


class _JSONFault(ValueError):
    """Raised by the hooks of `_parse`, to tell a fault that JSON's own grammar allows."""


def _parse(text: str, where: str) -> object:
    def no_constant(name: str) -> NoReturn:
        raise _JSONFault(f"{name} is not a JSON number")

    def number(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise _JSONFault(f"{digits} is too large for a number")
        return value

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            keys = [key for key, _ in pairs]
            raise _JSONFault(f"key {next(k for k in keys if keys.count(k) > 1)!r} appears twice in one object")
        return value

    try:
        return json.loads(text, parse_constant=no_constant, parse_float=number, object_pairs_hook=unique_keys)
    except RecursionError:
        raise DataError(f"{where}: JSON is nested too deeply") from None
    except ValueError as error:
        raise DataError(f"{where}: invalid JSON: {error}") from None
