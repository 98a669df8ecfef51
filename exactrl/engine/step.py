"""What one step computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from exactrl.engine.counters import Integers
from exactrl.engine.sequence import Sequence


class Chunk(NamedTuple):
    """Tokens start … start + num_tokens - 1 of `seq`; with `samples`, the last row's logits give the next token.

    source  where the last of these tokens is pending: number of the sample of the step before; otherwise -1
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    source: int


@dataclass(slots=True, eq=False)
class Step:
    """S chunks in arrival order, field by field: iterate for one `Chunk` after the other.

    start, num_tokens, source  int64 [S], samples bool [S]: see Chunk
    final                      int64: numbers of the samples that are the last of their sequences, whatever is sampled
    admission                  int64 [S] Sequence.admission: a chunk's blocks are its sequence's as long as that stands
    """

    seqs: list[Sequence]
    start: Integers
    num_tokens: Integers
    samples: NDArray[np.bool_]
    source: Integers
    final: Integers
    admission: Integers

    def __len__(self) -> int:
        return len(self.seqs)

    def __iter__(self) -> Iterator[Chunk]:
        columns = (self.start, self.num_tokens, self.samples, self.source)
        return map(Chunk, self.seqs, *(column.tolist() for column in columns))

    @property
    def decodes(self) -> bool:
        """Whether it is one token of each sequence, and samples the next."""
        return bool((self.num_tokens == 1).all() and self.samples.all())

    @property
    def sampling(self) -> list[Sequence]:
        """The sequences it samples a token of, in order."""
        if self.samples.all():
            return self.seqs
        return [self.seqs[i] for i in np.flatnonzero(self.samples).tolist()]
