"""What every step moves of every running sequence."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


class Counters:
    """One row for each running sequence, in the order of Scheduler.running; each name is a view, int64 [rows].

    A step moves thousands of them by one: as arrays that takes microseconds, as attributes a good part of a step.

    issued     leading tokens whose KV is in the cache or being computed
    ahead      tokens once all that are being sampled are known
    limit      tokens at which it ends: Sequence.max_tokens
    room       tokens that its blocks hold
    prefill    tokens that count as prompt or as recomputed when they are computed; those behind were generated
    sample     number of the token that the step scheduled last samples of it, among the samples of that step; -1: none
    admission  Sequence.admission
    """

    NAMES = ("issued", "ahead", "limit", "room", "prefill", "sample", "admission")
    issued: Integers
    ahead: Integers
    limit: Integers
    room: Integers
    prefill: Integers
    sample: Integers
    admission: Integers

    def __init__(self, max_rows: int) -> None:
        self._table = np.zeros((len(self.NAMES), max_rows), np.int64)
        self.resize(0)

    def append(self, **values: int) -> None:
        """Adds a row: a value for each of NAMES."""
        rows = len(self.issued)
        self._table[:, rows] = [values[name] for name in self.NAMES]
        self.resize(rows + 1)

    def keep(self, rows: NDArray[np.bool_]) -> None:
        """Closes the gaps that the others leave."""
        kept = self._table[:, : len(rows)][:, rows]
        self.resize(kept.shape[1])
        self._table[:, : kept.shape[1]] = kept

    def resize(self, rows: int) -> None:
        """Keeps the first `rows`."""
        for name, column in zip(self.NAMES, self._table, strict=True):
            setattr(self, name, column[:rows])
