"""Counting bit differences, and saying where the first one is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from exactrl.types import Completion

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where the bit patterns of two tensors of one shape and dtype differ, bool."""
    view = _INTEGERS[a.element_size()]
    return a.detach().contiguous().view(view) != b.detach().contiguous().view(view)


@dataclass(slots=True)
class Tally:
    """Values compared and found different so far. `first` describes the first difference; `notes` say what was varied
    and counted (preemptions, prefix hits), so that a rung which varied nothing shows it."""

    compared: int = 0
    mismatched: int = 0
    first: str = ""
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    skipped: str = ""  # why the rung could not apply

    def tensors(self, a: torch.Tensor, b: torch.Tensor, what: str) -> None:
        """Bit patterns of two tensors of one shape and dtype (NaN equals the same NaN, -0 differs from +0)."""
        assert a.shape == b.shape, (what, a.shape, b.shape)
        assert a.dtype == b.dtype, (what, a.dtype, b.dtype)
        different = differing(a, b)
        count = int(different.sum())
        self.compared += a.numel()
        if count and not self.mismatched:
            at = tuple(int(i) for i in different.nonzero()[0])
            self.first = f"{what}, element {at}: {float(a[at]):.9g} and {float(b[at]):.9g}"
        self.mismatched += count

    def arrays(self, a: Sequence[np.ndarray], b: Sequence[np.ndarray], what: str) -> None:
        """float32 arrays, pair by pair."""
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            self.tensors(torch.from_numpy(np.array(x)), torch.from_numpy(np.array(y)), f"{what}, sequence {i}")

    def trajectories(self, a: Sequence[Completion], b: Sequence[Completion], what: str) -> None:
        """Tokens and logprob bits, token by token; after a differing token the rest of the response differs, too."""
        for x, y in zip(a, b, strict=True):
            n = max(len(x.token_ids), len(y.token_ids))
            same = [t == u for t, u in zip(x.token_ids, y.token_ids, strict=False)]
            diverged = same.index(False) if False in same else min(len(x.token_ids), len(y.token_ids))
            p, q = (np.ascontiguousarray(c.logprobs[:diverged]).view(np.int32) for c in (x, y))
            different = np.flatnonzero(p != q)
            self.compared += n
            count = len(different) + n - diverged
            if count and not self.mismatched:
                i = int(different[0]) if len(different) else diverged
                self.first = f"{what}: request {x.id}, response token {i}"
                if i < diverged:
                    self.first += f": logprob {float(x.logprobs[i]):.9g} and {float(y.logprobs[i]):.9g}"
                else:
                    self.first += ": another token was sampled"
            self.mismatched += count

    def require(self, condition: bool, problem: str) -> None:
        """Fails the rung when what it is about did not happen (no preemption, no prefix hit)."""
        if not condition:
            self.problems.append(problem)
