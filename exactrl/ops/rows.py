"""Query rows of a batch on the host: which sequence, position and cache slot each one is. Numpy only.

Legend: T rows, S sequences; rows of one sequence are consecutive. starts int64 [S + 1]: first row of each sequence;
first int64 [S]: position of each sequence's first row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


def row_positions(starts: Integers, first: Integers) -> Integers:
    """int64 [T]."""
    return np.arange(starts[-1]) + np.repeat(first - starts[:-1], np.diff(starts))


def row_slots(starts: Integers, first: Integers, tables: NDArray[np.int32], page_size: int) -> Integers:
    """page * page_size + offset of each row, int64 [T]; tables int32 [S, P]."""
    sequence, position = np.repeat(np.arange(len(first)), np.diff(starts)), row_positions(starts, first)
    return tables[sequence, position // page_size].astype(np.int64) * page_size + position % page_size


def row_owners(starts: Integers, first: Integers, sequences: Integers) -> Integers:
    """(sequence number, position) of every row, int64 [T, 2]; `sequences` int64 [S] are the numbers."""
    return np.stack([np.repeat(sequences, np.diff(starts)), row_positions(starts, first)], 1)


def consecutive_pages(lengths: Integers, page_size: int) -> NDArray[np.int32]:
    """Page tables of sequences laid out one after the other, int32 [S, P], padded with 0."""
    pages = -(-lengths // page_size)
    tables = np.cumsum(pages)[:, None] - pages[:, None] + np.arange(pages.max())
    return np.where(np.arange(pages.max()) < pages[:, None], tables, 0).astype(np.int32)
