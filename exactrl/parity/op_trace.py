"""Engine and trainer op by op: what each op put out for every (sample, position), and the first bit that differs.

A trace keeps every op's output of all rows (memory: rows x the sum of all op widths), so trace a few short requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from exactrl.model.qwen3 import Probe, Qwen3
from exactrl.ops.transfer import key_bits
from exactrl.parity.compare import differing
from exactrl.types import Completion, Request, Sample

if TYPE_CHECKING:  # concrete classes arrive as arguments
    from exactrl.engine.engine import Engine
    from exactrl.train.trainer import Trainer

# (sequence number, position) of the rows of one event, int64 [n, 2], and the op's output for them [n, ...].
Recorded = tuple[torch.Tensor, torch.Tensor]


class Trace:
    """A probe that records what `inner` lets through. Rows of "logprob" and "sample" carry the position that predicts.

    The engine numbers its sequences over its lifetime; a trainer numbers the samples of each micro-batch anew, which
    `numbered_anew` undoes.
    """

    def __init__(self, inner: Probe, *, numbered_anew: bool = False) -> None:
        self.inner, self.numbered_anew = inner, numbered_anew
        self.ops: dict[str, list[Recorded]] = {}  # in model order
        self._rows = torch.empty(0, 2, dtype=torch.int64)
        self._num_sequences = 0

    def __call__(self, name: str, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(name, x)
        if name == "rows":
            first = torch.tensor([self._num_sequences if self.numbered_anew else 0, 0])
            self._rows = x + first
            self._num_sequences = int(self._rows[:, 0].max()) + 1
        elif name == "predicting":
            self._rows = self._rows[x.cpu()]
        else:
            self.ops.setdefault(name, []).append((self._rows, x.detach()))
        return x

    def table(self, op: str) -> Recorded:
        """All rows of an op, in the order they were computed."""
        parts = self.ops[op]
        return torch.cat([rows for rows, _ in parts]), torch.cat([x for _, x in parts])


class TrainerTrace(Trace):
    """Draws, too, each token from the trainer's own hidden states: what the engine should have sampled."""

    def __init__(self, inner: Probe, model: Qwen3, requests: Sequence[Request]) -> None:
        super().__init__(inner, numbered_anew=True)
        self.model, self.requests = model, requests

    def __call__(self, name: str, x: torch.Tensor) -> torch.Tensor:
        x = super().__call__(name, x)
        if name == "predicting":
            self._predicting = x
        elif name == "logprob":
            super().__call__("sample", self._draw())
        return x

    @torch.no_grad()
    def _draw(self) -> torch.Tensor:
        hidden = self.ops["norm"][-1][1][self._predicting]
        requests = [self.requests[i] for i in self._rows[:, 0].tolist()]
        temperatures = torch.tensor([r.params.temperature for r in requests], dtype=torch.float32).to(hidden.device)
        keys = key_bits([r.noise_key for r in requests]).to(hidden.device)
        return self.model.ops.sample(
            hidden, self.model.head, temperatures, keys, (self._rows[:, 1] + 1).to(hidden.device)
        )[0]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first element that differs: `op` as the model names it ("layers.3.k"), index of the sample, position of the
    row, element of that row; `values` are both sides' in words."""

    op: str
    sample: int
    position: int
    element: tuple[int, ...]
    values: str

    def describe(self, name: str) -> str:
        """`name` is the sample's."""
        return f"{self.op}, sample {name}, position {self.position}, element {self.element}: {self.values}"


@dataclass(slots=True)
class Comparison:
    """Elements compared and found different; rows that only one side computed, as (op, sample, position)."""

    compared: int
    mismatched: int
    first: Difference | None
    only_ours: list[tuple[str, int, int]]
    only_theirs: list[tuple[str, int, int]]


def compare(ours: Trace, theirs: Trace) -> Comparison:
    """Bit for bit, op by op in model order, rows aligned by (sample, position).

    `ours` may hold a row several times (recomputed after a preemption): each is compared. `first` is the first in model
    order, then in the order `ours` computed the rows.
    """
    result = Comparison(0, 0, None, [], [])
    for op in ours.ops:
        rows, a = ours.table(op)
        their_rows, b = theirs.table(op)
        keys, their_keys = _keys(rows), _keys(their_rows)
        order = np.argsort(their_keys)
        known = their_keys[order]
        assert (np.diff(known) > 0).all(), f"{op}: the second trace holds a row twice"
        both = np.flatnonzero(np.isin(keys, known))
        at = torch.from_numpy(order[np.searchsorted(known, keys[both])])
        result.only_ours += [(op, *row) for row in rows[torch.from_numpy(~np.isin(keys, known))].tolist()]
        result.only_theirs += [(op, *row) for row in their_rows[torch.from_numpy(~np.isin(their_keys, keys))].tolist()]
        taken = torch.from_numpy(both)
        _compare_rows(result, op, rows[taken], a[taken], b[at])
    return result


def _keys(rows: torch.Tensor) -> NDArray[np.int64]:
    """(sequence, position) as one number, int64 [n]."""
    pairs = rows.numpy()
    return (pairs[:, 0] << 32) | pairs[:, 1]


def _compare_rows(result: Comparison, op: str, rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    result.compared += a.numel()
    if a.dtype != b.dtype or a.shape != b.shape:
        result.mismatched += a.numel()
        if result.first is None and a.numel():
            kinds = " and ".join(f"{x.dtype} {tuple(x.shape[1:])}" for x in (a, b))
            sample, position = rows[0].tolist()
            result.first = Difference(op, sample, position, (), kinds)
        return
    different = differing(a, b)
    count = int(different.sum())
    if count and result.first is None:
        row, *element = different.nonzero()[0].tolist()
        values = " and ".join(f"{x[(row, *element)].item():.9g}" for x in (a, b))
        sample, position = rows[row].tolist()
        result.first = Difference(op, sample, position, tuple(element), values)
    result.mismatched += count


@contextmanager
def _recording(side: Engine | Trainer, trace: Trace) -> Iterator[None]:
    side.see = trace
    try:
        yield
    finally:
        side.see = trace.inner


def trace_engine(engine: Engine, requests: Sequence[Request]) -> tuple[Trace, list[Completion]]:
    """`engine` has generated nothing before: its sequence numbers are indices of `requests`."""
    trace = Trace(engine.see)
    with _recording(engine, trace):
        completions = engine.generate(requests)
    return trace, completions


def trace_scoring(trainer: Trainer, requests: Sequence[Request], samples: Sequence[Sample]) -> TrainerTrace:
    return _trace_trainer(trainer, requests, lambda: trainer.score(samples))


def trace_gradient_forward(trainer: Trainer, requests: Sequence[Request], samples: Sequence[Sample]) -> TrainerTrace:
    """The forward that gradients flow through, in a real step: the trainer's weights are others afterwards."""
    return _trace_trainer(trainer, requests, lambda: trainer.step(samples, audit=False, observe=lambda *seen: None))


def _trace_trainer(trainer: Trainer, requests: Sequence[Request], forward: Callable[[], object]) -> TrainerTrace:
    trace = TrainerTrace(trainer.see, trainer.model, requests)
    with _recording(trainer, trace):
        forward()
    return trace
