"""Batches in which attention must not change a bit: one row, a few rows, chunks and whole sequences, in pages of every
size and packed, with lengths on every side of a block's, a split's and a page's end.

All rows are rows of a few source sequences, whose results are known for every position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from exactrl.contract import AttentionShape
from exactrl.ops.cuda.attention import AttentionRows


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of pieces int64 [S, 3]: (source sequence, position of the first row, rows).

    own_pages   each piece has pages of its own, with NaN from its length on; else pieces of one source share the pages
                of the whole source, in which later keys are numbers like any other
    every       only each so-manieth piece is asked for; rows of the others must stay as they are
    with_lse    whether the log-sum-exp is asked for
    """

    name: str
    pieces: np.ndarray
    own_pages: bool
    every: int = 1
    with_lse: bool = True

    def few(self, most_rows: int | None, group: int) -> bool:
        """Whether an implementation limited to so many rows x grouped heads of a sequence can take what is asked."""
        return most_rows is None or int(self.pieces[:: self.every, 2].max()) * group <= most_rows


@dataclass(slots=True)
class Batch:
    """What an implementation gets for a case, and the rows of the source results it must give back."""

    rows: AttentionRows
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    source: torch.Tensor  # int64 [T]: row of the sources
    piece: np.ndarray  # int64 [T]: piece of each row
    asked: np.ndarray = field(repr=False)  # int64: pieces asked for


def boundaries(shape: AttentionShape, most: int) -> list[int]:
    """Lengths one before, on and one after every multiple of a block, a split and a page up to `most`; 1 and `most`.

    Of pages smaller than a block only those of the first two blocks, of blocks only those of the first two splits and
    the last.
    """
    near = {1, most}
    page = shape.page_size or shape.kv_block
    for step, until in (
        (min(page, shape.kv_block), 2 * shape.kv_block),
        (shape.kv_block, 2 * shape.kv_split),
        (max(page, shape.kv_block), 2 * shape.kv_split),
        (shape.kv_split, most),
    ):
        near |= {n + d for n in range(step, min(until, most) + 1, step) for d in (-1, 0, 1)}
    return sorted(n for n in near if 1 <= n <= most)


def cases(shape: AttentionShape, lengths: Sequence[int]) -> Iterator[Case]:
    """Of source sequences of `lengths` rows; the longest decides where boundaries end."""
    longest = int(np.argmax(lengths))
    ends = boundaries(shape, lengths[longest])
    whole = [(i, 0, n) for i, n in enumerate(lengths)]
    if not shape.page_size:
        yield Case("whole sequences, packed", _pieces(whole), False)
        yield Case("the same backwards, every second one", _pieces(whole[::-1]), False, every=2)
        some = ends[:: max(1, len(ends) // 24)]
        yield Case("one sequence cut short at many lengths, packed", _pieces([(longest, 0, n) for n in some]), False)
        for i, n in enumerate(lengths):
            yield Case(f"a sequence of {n} alone, packed", _pieces([(i, 0, n)]), False, with_lse=False)
        return
    decode = [(longest, end - 1, 1) for end in ends]
    yield Case("decode at boundaries, NaN beyond", _pieces(decode), True)
    yield Case("decode at boundaries, every third sequence", _pieces(decode), True, every=3, with_lse=False)
    yield Case("decode of one sequence", _pieces(decode[-1:]), True)
    yield Case("decode at every position", _pieces([(i, p, 1) for i, n in enumerate(lengths) for p in range(n)]), False)
    for count in (2, 3, 4, 8, 16):
        few = [(longest, end - count, count) for end in ends if end >= count]
        if few:
            yield Case(f"the last {count} rows at boundaries", _pieces(few), True)
    chunks = [[(i, p, min(c, n - p)) for i, n in enumerate(lengths) for p in range(0, n, c)] for c in _chunks(shape)]
    for size, pieces in zip(_chunks(shape), chunks, strict=True):
        yield Case(f"chunks of {size}", _pieces(pieces), False)
    yield Case("chunks, NaN beyond", _pieces([p for p in chunks[-1] if p[0] == longest][-4:]), True)
    yield Case("whole sequences", _pieces(whole), True)
    mixed = [piece for pair in zip(decode, whole * len(decode), strict=False) for piece in pair][: 4 * len(lengths)]
    yield Case("decode rows among whole sequences", _pieces(mixed), True, every=2)
    yield Case("whole sequences among decode rows", _pieces([*mixed[1:], mixed[0]]), True, every=2)


def _chunks(shape: AttentionShape) -> tuple[int, ...]:
    return (shape.kv_block + 3, shape.kv_split - 1, shape.kv_split)


def _pieces(pieces: Sequence[tuple[int, int, int]]) -> np.ndarray:
    return np.array(pieces, np.int64).reshape(-1, 3)


def build(
    case: Case, shape: AttentionShape, lengths: Sequence[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Batch:
    """q, k, v of the whole sources, side by side."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    source, first, counts = case.pieces.T
    piece = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    rows_at = torch.from_numpy((starts[source] + first)[piece] + within).to(q.device)
    keys = first + counts
    if shape.page_size:
        k, v, tables = _paged(case, shape, lengths, keys, k, v)
    else:
        k, v, tables = k[rows_at], v[rows_at], None
    rows = AttentionRows.build(counts, keys, tables, q.device)
    return Batch(rows, q[rows_at].contiguous(), k, v, rows_at, piece, np.arange(0, len(counts), case.every))


def _paged(
    case: Case, shape: AttentionShape, lengths: Sequence[int], keys: np.ndarray, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """(k pages, v pages, tables): pages in shuffled order, NaN in every slot that holds no key, a third of them unused.

    Table entries beyond a sequence name a page of NaN.
    """
    size, starts = shape.page_size, np.concatenate([[0], np.cumsum(lengths)])
    held = keys if case.own_pages else np.asarray(lengths)  # keys of each owner of pages
    origin = starts[case.pieces[:, 0]] if case.own_pages else starts[:-1]
    pages = -(-held // size)
    total = int(pages.sum())
    order = np.random.default_rng(total).permutation(total + total // 2 + 1)
    width = int(pages.max())
    tables = np.full((len(held), width + 1), order[-1], np.int32)
    tables[:, :width][np.arange(width) < pages[:, None]] = order[:total]
    owner = np.repeat(np.arange(len(held)), held)
    position = np.arange(held.sum()) - np.repeat(np.cumsum(held) - held, held)
    slots = torch.from_numpy(tables[owner, position // size].astype(np.int64) * size + position % size).to(k.device)
    at = torch.from_numpy(origin[owner] + position).to(k.device)
    caches = []
    for t in (k, v):
        cache = torch.full((len(order) * size, *t.shape[1:]), torch.nan, dtype=t.dtype, device=t.device)
        cache[slots] = t[at]
        caches.append(cache.view(-1, size, *t.shape[1:]))
    return caches[0], caches[1], tables if case.own_pages else tables[case.pieces[:, 0]]
