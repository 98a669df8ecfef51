"""Parquet files in blocks of rows, as plain Python values; repeated rows are found without making Python values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from exactrl.errors import DataError
from exactrl.tasks.files import Row

# The larger the blocks, the more repeats of a repeated data set meet in one.
BLOCK_BYTES = 96 << 20
MOST_BLOCK_ROWS = 1 << 18
# Lists longer than this are not compared element by element.
LONGEST_LIST = 32

_PLAIN = (
    pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary, pa.types.is_integer,
    pa.types.is_floating, pa.types.is_boolean, pa.types.is_temporal, pa.types.is_decimal,
)  # fmt: skip


def open_parquet(path: Path) -> pq.ParquetFile:
    """Reads through a small buffer: pandas writes row groups of a million rows. Raises DataError."""
    try:
        file = pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from error
    names = file.schema_arrow.names
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path}: column {repeated[0]!r} appears twice")
    return file


def parquet_blocks(path: Path, part: slice) -> Iterator[ParquetBlock]:
    """Blocks of the rows of a slice; row groups outside it are not read. Raises DataError."""
    file = open_parquet(path)
    start, stop, _ = part.indices(file.metadata.num_rows)
    groups, index, first = [], 0, 0
    for group in range(file.num_row_groups):
        size = file.metadata.row_group(group).num_rows
        if index + size <= start:
            first = index + size
        elif index < stop:
            groups.append(group)
        index += size
    if start >= stop or not groups:
        return
    index = first
    try:
        for batch in file.iter_batches(_block_rows(file, groups), row_groups=groups):
            low, high = max(start - index, 0), min(stop - index, len(batch))
            if low < high:
                yield ParquetBlock(path, index + low, batch.slice(low, high - low))
            index += len(batch)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}, after row {index}: cannot be read: {error}") from error


def _block_rows(file: pq.ParquetFile, groups: list[int]) -> int:
    """Rows that take about BLOCK_BYTES, going by the first ones: the sizes in the file's metadata are of encoded data,
    where a repeated value counts once."""
    sample = next(file.iter_batches(1024, row_groups=groups[:1]))
    return max(1, min(BLOCK_BYTES * len(sample) // max(sample.nbytes, 1), MOST_BLOCK_ROWS))


class ParquetBlock:
    """Consecutive rows as Arrow columns."""

    def __init__(self, path: Path, start: int, batch: pa.RecordBatch) -> None:
        self.start = start
        self._source = f"{path}, row"
        self._batch = batch

    def __len__(self) -> int:
        return len(self._batch)

    def rows(self, positions: Sequence[int] | None = None, columns: Sequence[str] | None = None) -> list[Row]:
        batch = self._batch.select(self._columns(columns))
        if positions is None:
            positions = range(len(batch))
        else:
            batch = batch.take(pa.array(positions, pa.int64()))
        places = [self.start + position for position in positions]
        values = self._values(batch, places)
        return [Row(self._source, i + 1, i, value) for i, value in zip(places, values, strict=True)]

    def distinct(self, columns: Sequence[str] | None = None) -> tuple[list[int], NDArray[np.int64]]:
        codes = np.zeros(len(self), np.int64)
        for name in self._columns(columns):
            codes = _combine(codes, _codes(self._batch.column(name)))
        _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
        order = np.argsort(first, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        return first[order].tolist(), rank[inverse]

    def _columns(self, keys: Sequence[str] | None) -> list[str]:
        """The columns behind keys; all where a key has none, so that the message about it can name them."""
        names = self._batch.schema.names
        wanted = names if keys is None else [key if key in names else key.split(".")[0] for key in keys]
        return [name for name in names if name in wanted] if set(wanted) <= set(names) else names

    def _values(self, batch: pa.RecordBatch, places: Sequence[int]) -> list[dict[str, Any]]:
        try:
            return batch.to_pylist()
        except UnicodeDecodeError:
            for i, place in enumerate(places):
                for name in batch.schema.names:
                    try:
                        batch.column(name)[i].as_py()
                    except UnicodeDecodeError as error:
                        message = f"{self._source} {place + 1}, key {name!r}: not valid UTF-8: {error.reason}"
                        raise DataError(message) from None
            raise


def _codes(array: pa.Array) -> NDArray[np.int64]:
    """A number for each element; equal numbers mean equal elements. Elements of unusual types get one each."""
    kind = array.type
    if any(test(kind) for test in _PLAIN):
        return array.dictionary_encode(null_encoding="encode").indices.to_numpy().astype(np.int64)
    if pa.types.is_null(kind):
        return np.zeros(len(array), np.int64)
    if pa.types.is_struct(kind):
        codes = pc.is_null(array).to_numpy(zero_copy_only=False).astype(np.int64)
        for field in array.flatten():
            codes = _combine(codes, _codes(field))
        return codes
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _list_codes(array)
    return np.arange(len(array))


def _list_codes(array: pa.Array) -> NDArray[np.int64]:
    lengths = pc.list_value_length(array).fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    longest = int(lengths.max(initial=0))
    if longest > LONGEST_LIST:
        return np.arange(len(array))
    starts = array.offsets.to_numpy()[:-1].astype(np.int64)
    low = int(starts[0]) if len(starts) else 0
    high = int(array.offsets[-1].as_py()) if len(starts) else 0
    elements = _codes(array.values.slice(low, high - low))
    codes = lengths + 1
    for position in range(longest):
        has = lengths > position
        element = np.zeros(len(array), np.int64)
        element[has] = elements[starts[has] - low + position] + 1
        codes = _combine(codes, element)
    return codes


def _combine(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers of pairs, small again: each side is below the number of rows or of list elements, far from overflow."""
    if not len(a):
        return a
    return np.unique(a * (int(b.max()) + 1) + b, return_inverse=True)[1].reshape(-1)
