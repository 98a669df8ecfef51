"""Makes certificates of attention: which implementations keep the reference's bits on this machine, which is fastest.

The reference attends whole source sequences once. Every implementation then serves batches of the same rows (decode,
a few rows, chunks, whole sequences; attention_cases.py) on the same data (attention_data.py), and output and
log-sum-exp must have the bits of the reference, row by row; rows that were not asked for must stay untouched. The
reference's own bits are held to the same. One difference anywhere refuses an implementation for this shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from exactrl.contract import ATTENTION_KINDS, AttentionShape
from exactrl.errors import CertificationError
from exactrl.ops.cuda.attention import AttentionImplementation, AttentionRows
from exactrl.parity.attention_cases import Batch, Case, build, cases
from exactrl.parity.attention_data import KINDS, attention_inputs
from exactrl.parity.certify import best, bits
from exactrl.parity.compare import differing

LENGTHS = (1, 17, 65, 513, 1100, 2200)
"""Of the source sequences: past the fourth split, with every position to 1100 once among many."""
UNTOUCHED = -12352.0  # exact in bf16, and nothing that attention of our data gives
Times = Callable[[AttentionShape, str, Mapping[str, AttentionImplementation]], Mapping[str, Mapping[str, float]]]
"""Workload -> seconds of each implementation of one kind."""


@dataclass(frozen=True, slots=True)
class AttentionRefusal:
    """The first difference of one implementation; values are bit patterns. `what` is "out", "lse", or "a row that was
    not asked for". `sequence` is the number of keys of the sequence, `position` that of the row, from 0."""

    implementation: str
    case: str
    data: str
    what: str
    sequence: int
    position: int
    element: tuple[int, ...]
    found: str
    expected: str
    mismatched_rows: int
    failing_cases: int

    def __str__(self) -> str:
        if not self.mismatched_rows:
            return f"{self.implementation} does not run ({self.case}): {self.found}"
        if self.position < 0:
            return f"{self.implementation} gives other bits every time ({self.case}, {self.data} data)"
        return (
            f"{self.implementation} differs from the reference ({self.case}, {self.data} data) in "
            f"{self.mismatched_rows} rows, first position {self.position} of a sequence of {self.sequence}, "
            f"{self.what} {list(self.element)}: {self.found} instead of {self.expected}; "
            f"{self.failing_cases} batches differ"
        )


class NotFinite(CertificationError):
    """What the reference makes of some data holds NaN or infinity."""


@dataclass(slots=True)
class AttentionResult:
    """`choices`: kind -> implementation. `seconds`: kind -> workload -> implementation -> seconds. `left_out`: data on
    which a library's kernel, whose code is the definition, is not finite itself; never of our own order."""

    shape: AttentionShape
    choices: dict[str, str]
    refused: list[AttentionRefusal]
    compared_rows: int
    batches: int
    seconds: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @classmethod
    def nothing(cls, shape: AttentionShape, name: str, why: str) -> AttentionResult:
        """No choice: the only implementation of this order cannot be certified."""
        return cls(shape, {}, [AttentionRefusal(name, "all batches", "", "", 0, -1, (), why, "", 0, 0)], 0, 0)

    def to_json(self) -> dict[str, Any]:
        """Of the times only those of the choices; the rest is shown, not kept."""
        chosen = {
            kind: {workload: times[name] for workload, times in self.seconds[kind].items()}
            for kind, name in self.choices.items()
        }
        refused = [asdict(refusal) for refusal in self.refused]
        rest = {"compared_rows": self.compared_rows, "batches": self.batches, "left_out": self.left_out}
        return {
            "shape": asdict(self.shape), "choices": self.choices, "seconds": chosen, "refused": refused, **rest,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Sources:
    """Whole sequences side by side and what the reference makes of them: out [T, H, D], lse [H, T]."""

    lengths: Sequence[int]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def _sources(
    shape: AttentionShape, lengths: Sequence[int], kind: str, device: str, reference: AttentionImplementation
) -> _Sources:
    q, k, v = attention_inputs(shape, lengths, kind, device)
    rows = AttentionRows.build(np.array(lengths), np.array(lengths), None, device)
    out, lse = _outputs(q)
    try:
        reference.attend(q, k, v, rows, out, lse, np.arange(len(lengths)))
    except Exception as error:
        raise CertificationError(f"{shape}: the reference kernel does not run here: {error}") from error
    if not (torch.isfinite(out).all() and torch.isfinite(lse).all()):
        raise NotFinite(f"{shape}: the reference kernel gives a value that is not finite ({kind} data)")
    return _Sources(lengths, q, k, v, out, lse)


def _outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), untouched."""
    lse = torch.full((q.shape[1], q.shape[0]), UNTOUCHED, dtype=torch.float32, device=q.device)
    return torch.full_like(q, UNTOUCHED), lse


def _attend(implementation: AttentionImplementation, case: Case, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _outputs(batch.q)
    given = lse if case.with_lse else None
    implementation.attend(batch.q, batch.k, batch.v, batch.rows, out, given, batch.asked)
    return out, lse


def _expected(case: Case, batch: Batch, sources: _Sources) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, rows asked for bool [T])."""
    asked = torch.from_numpy(np.isin(batch.piece, batch.asked)).to(batch.q.device)
    out, lse = _outputs(batch.q)
    out[asked] = sources.out[batch.source[asked]]
    if case.with_lse:
        lse[:, asked] = sources.lse[:, batch.source[asked]]
    return out, lse, asked


@dataclass(slots=True)
class _Verdicts:
    """Counts differing rows of each (implementation, data, case); counts stay on the device until they are read."""

    keys: list[tuple[str, str, Case]] = field(default_factory=list)
    counts: list[torch.Tensor] = field(default_factory=list)
    errors: dict[str, AttentionRefusal] = field(default_factory=dict)
    compared: int = 0

    def compare(self, implementation: AttentionImplementation, kind: str, case: Case, batch: Batch, right) -> None:
        if implementation.name in self.errors:
            return
        try:
            out, lse = _attend(implementation, case, batch)
        except Exception as error:  # noqa: BLE001 - recorded as a refusal, whatever a compiler or driver raises
            text = f"{type(error).__name__}: {error}"
            self.errors[implementation.name] = AttentionRefusal(
                implementation.name, case.name, kind, "", 0, -1, (), text, "a result", 0, 1
            )
            return
        rows = differing(out, right[0]).flatten(1).any(1) | differing(lse, right[1]).any(0)
        self.keys.append((implementation.name, kind, case))
        self.counts.append(rows.sum())
        self.compared += len(rows)

    def failing(self) -> dict[str, list[tuple[str, Case, int]]]:
        """Implementation -> (data, case, differing rows), in the order met."""
        found: dict[str, list[tuple[str, Case, int]]] = {}
        counts = torch.stack(self.counts).tolist() if self.counts else []
        for (name, kind, case), count in zip(self.keys, counts, strict=True):
            if count:
                found.setdefault(name, []).append((kind, case, count))
        return found


def certify_attention(
    shape: AttentionShape,
    implementations: Mapping[str, AttentionImplementation],
    times: Times,
    lengths: Sequence[int] = LENGTHS,
    kinds: Sequence[str] = KINDS,
    device: str = "cuda",
    reference: str = "reference",
) -> AttentionResult:
    """Compares every implementation offered for `shape` with `implementations[reference]`, times the exact ones,
    chooses one of each kind. A kernel of order "fa3" serves whole batches only and is not asked for parts of one.

    Raises CertificationError when the reference does not run, is not finite, or changes its bits with the batch. Of the
    order "fa3" data on which it is not finite are left out and named.
    """
    offered = {name: i for name, i in implementations.items() if i.serves(shape)}
    group, verdicts = shape.heads // shape.kv_heads, _Verdicts()
    tried = [case for case in cases(shape, lengths) if case.every == 1 or shape.order == "canonical"]
    left_out: list[str] = []
    for kind in kinds:
        try:
            sources = _sources(shape, lengths, kind, device, implementations[reference])
        except NotFinite:
            if shape.order == "canonical" or len(left_out) == len(kinds) - 1:
                raise
            left_out.append(kind)
            continue
        for case in tried:
            batch = build(case, shape, lengths, sources.q, sources.k, sources.v)
            right = _expected(case, batch, sources)
            for implementation in offered.values():
                if case.few(implementation.most_rows, group):
                    verdicts.compare(implementation, kind, case, batch, right)
    failing = verdicts.failing()
    if error := verdicts.errors.get(reference):
        raise CertificationError(f"{shape}: the reference kernel does not run here: {error.found}")
    if reference in failing:
        kind, case, count = failing[reference][0]
        raise CertificationError(
            f"{shape}: the reference kernel itself gives {count} rows other bits ({case.name}, {kind} data) than in "
            "whole sequences, so nothing can be certified on this device; please report the device, driver and Triton "
            "version"
        )
    refused = [
        _refusal(offered[name], where, shape, lengths, implementations[reference], device)
        for name, where in failing.items()
    ]
    refused += [refusal for name, refusal in verdicts.errors.items() if name not in failing]
    result = AttentionResult(shape, {}, refused, verdicts.compared, len(verdicts.keys), left_out=left_out)
    exact = {name: i for name, i in offered.items() if name not in failing and name not in verdicts.errors}
    _choose(result, exact, times, reference)
    return result


def _choose(
    result: AttentionResult, exact: Mapping[str, AttentionImplementation], times: Times, reference: str
) -> None:
    """A kind of which nothing is exact gets no choice. The reference is in order, exact, and too slow to be timed: it
    is chosen where nothing else is left."""
    for kind in ATTENTION_KINDS:
        candidates = {name: i for name, i in exact.items() if i.kind == kind}
        faster = {name: i for name, i in candidates.items() if name != reference}
        if faster:
            measured = {workload: dict(t) for workload, t in times(result.shape, kind, faster).items()}
            result.choices[kind], result.seconds[kind] = best(list(measured.values())), measured
        elif candidates:
            result.choices[kind], result.seconds[kind] = reference, {}


def _refusal(
    implementation: AttentionImplementation,
    where: Sequence[tuple[str, Case, int]],
    shape: AttentionShape,
    lengths: Sequence[int],
    reference: AttentionImplementation,
    device: str,
) -> AttentionRefusal:
    """Runs the first failing batch again and names its first differing element: in the first row that differs."""
    kind, case, count = where[0]
    sources = _sources(shape, lengths, kind, device, reference)
    batch = build(case, shape, lengths, sources.q, sources.k, sources.v)
    right_out, right_lse, asked = _expected(case, batch, sources)
    out, lse = _attend(implementation, case, batch)
    in_out, in_lse = differing(out, right_out), differing(lse, right_lse).T
    bad = (in_out.flatten(1).any(1) | in_lse.any(1)).nonzero()
    head = (implementation.name, case.name, kind)
    if not len(bad):  # it differed before and does not now: not even deterministic
        return AttentionRefusal(*head, "", 0, -1, (), "other bits every time", "", count, len(where))
    row = int(bad[0])
    piece = int(batch.piece[row])
    _, first, rows = (int(i) for i in case.pieces[piece])
    position = first + row - int(np.flatnonzero(batch.piece == piece)[0])
    name, values, wrong, right = ("out", out, in_out, right_out)
    if not in_out[row].any():
        name, values, wrong, right = ("lse", lse.T, in_lse, right_lse.T)
    element = tuple(int(i) for i in wrong[row].nonzero()[0])
    if not asked[row]:
        name = "a row that was not asked for"
    at = (row, *element)
    return AttentionRefusal(
        *head, name, first + rows, position, element, bits(values[at]), bits(right[at]), count, len(where)
    )
