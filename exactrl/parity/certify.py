"""Makes certificates: which implementations of an op keep the reference's bits on this machine, and which is fastest.

Every number of rows up to the decode maximum is checked, above it a sample, on random and on adversarial data; bit
patterns are compared. At the decode maximum and below an implementation may be certified for a range of rows in which
it was exact at every single one. Above, where only a sample is checked, it must have been exact at every one sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from exactrl.contract import Choice, LinearShape
from exactrl.errors import CertificationError
from exactrl.ops.cuda.matmul import Implementation, Product
from exactrl.parity.adversarial import KINDS, MAKERS, linear_inputs
from exactrl.parity.compare import differing

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SPARE = len(MAKERS) - 1  # further rows, so that even one row alone is of each kind once
Times = Callable[[LinearShape, Mapping[str, Product], int], Mapping[str, float]]
"""Seconds per call of each product at one number of rows."""
NOWHERE = (-1, -1)
Case = tuple[int, str, int]
"""Rows, kind of data, and the row of that data which comes first."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Which numbers of rows are checked. `ends` are the ends of the ranges that get a choice of their own, `step` rows
    each up to `every`."""

    every: int = 256
    most: int = 16384
    step: int = 8

    def sampled(self) -> list[int]:
        """Above `every`: powers of two and their neighbours, and numbers without a factor that kernels like."""
        return sorted(
            {m for m in self._above() if self.every < m <= self.most} | {self.most} - set(range(self.every + 1))
        )

    def _above(self) -> Iterable[int]:
        power = 1
        while power <= self.most:
            yield from (
                power - 1,
                power,
                power + 1,
                power * 9 // 8 + 1,
                power * 5 // 4 + 1,
                power * 3 // 2,
                power * 7 // 4 - 1,
            )
            power *= 2

    def checked(self) -> list[int]:
        return [*range(1, self.every + 1), *self.sampled()]

    def ends(self) -> list[int]:
        small = [m for m in (1, 2, 4, 8, *range(self.step, self.every, self.step)) if m < self.every]
        large = []
        m = self.every * 2
        while m < self.most:
            large.append(m)
            m *= 2
        return sorted({*small, self.every, *large, self.most})


@dataclass(frozen=True, slots=True)
class Refusal:
    """The first difference of one implementation: at this many rows, in this element; values are bit patterns."""

    implementation: str
    m: int
    data: str
    element: tuple[int, int]
    found: str
    expected: str
    mismatched: int
    failing_rows: int  # how many of the checked numbers of rows differ

    def __str__(self) -> str:
        if not self.mismatched:
            return f"{self.implementation} does not run: {self.found}"
        return (
            f"{self.implementation} differs from the reference at {self.m} rows ({self.data} data): "
            f"{self.mismatched} elements, first {list(self.element)}: {self.found} instead of {self.expected}; "
            f"{self.failing_rows} of the checked numbers of rows differ"
        )


@dataclass(slots=True)
class LinearResult:
    shape: LinearShape
    choices: list[Choice]
    refused: list[Refusal]
    compared_elements: int
    checked_rows: int
    seconds: dict[int, dict[str, float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Of the times only those of the choices; the rest is shown, not kept."""
        choices = [asdict(c) | {"seconds": self.seconds[c.m_max][c.implementation]} for c in self.choices]
        rest = {"compared_elements": self.compared_elements, "checked_rows": self.checked_rows}
        refused = [asdict(refusal) for refusal in self.refused]
        return {"shape": asdict(self.shape), "choices": choices, "refused": refused, **rest}


class _Verdicts:
    """Counts differing elements of each (implementation, data, rows); counts stay on the device until they are read."""

    def __init__(self) -> None:
        self.keys: list[tuple[str, Case]] = []
        self.counts: list[torch.Tensor] = []
        self.compared = 0

    def add(self, name: str, case: Case, y: torch.Tensor, expected: torch.Tensor) -> None:
        assert y.shape == expected.shape, (name, case, y.shape, expected.shape)
        assert y.dtype == expected.dtype, (name, case, y.dtype, expected.dtype)
        self.keys.append((name, case))
        self.counts.append(differing(y, expected).sum())
        self.compared += y.numel()

    def failing(self) -> dict[str, dict[Case, int]]:
        """Implementation -> case -> differing elements, where there are any."""
        found: dict[str, dict[Case, int]] = {}
        counts = torch.stack(self.counts).tolist() if self.counts else []
        for (name, case), count in zip(self.keys, counts, strict=True):
            if count:
                found.setdefault(name, {})[case] = count
        return found


def certify_linear(
    shape: LinearShape,
    implementations: Mapping[str, Implementation],
    rows: Rows,
    times: Times,
    device: str = "cuda",
    reference: str = "reference",
) -> LinearResult:
    """Compares every implementation with `implementations[reference]`, times the exact ones, chooses.

    The reference's own bits must not depend on the number of rows either: it is compared with its result for all rows.
    """
    verdicts, dtype = _Verdicts(), DTYPES[shape.out_dtype]
    broken = _broken(shape, implementations, dtype, device)
    if reference in broken:
        raise CertificationError(f"{shape}: the reference kernel does not run here: {broken[reference]}")
    implementations = {name: i for name, i in implementations.items() if name not in broken}
    for kind in KINDS:
        for ms in (range(1, rows.every + 1), rows.sampled()):
            _compare(
                verdicts, shape, implementations, list(ms), kind, dtype, device, implementations[reference].product
            )
    failing = verdicts.failing()
    if reference in failing:
        m, kind, _ = min(failing[reference])
        raise CertificationError(
            f"{shape}: the reference kernel itself gives other bits at {m} rows than at more ({kind} data), so nothing "
            "can be certified on this device; please report the device, driver and Triton version"
        )
    refused = [
        _refusal(name, shape, where, implementations, rows, dtype, device, reference) for name, where in failing.items()
    ]
    refused += [Refusal(name, 1, "random", NOWHERE, error, "a result", 0, 0) for name, error in broken.items()]
    bad_rows = {name: {m for m, _, _ in where} for name, where in failing.items()}
    result = LinearResult(shape, [], refused, verdicts.compared, len(rows.checked()))
    _choose(result, implementations, bad_rows, rows, times)
    return result


def _choose(
    result: LinearResult,
    implementations: Mapping[str, Implementation],
    bad_rows: Mapping[str, set[int]],
    rows: Rows,
    times: Times,
) -> None:
    """Adds a choice for each range to `result`; the reference is exact everywhere, so that there are no gaps."""
    start = 1
    for end in rows.ends():
        products = {
            name: i.product for name, i in implementations.items()
            if i.serves(result.shape, end) and _clean(bad_rows.get(name, set()), start, end, rows.every)
        }  # fmt: skip
        assert products, f"nothing serves {result.shape} at {end} rows"
        measured = [dict(times(result.shape, products, m)) for m in dict.fromkeys((start, end))]
        result.choices.append(Choice(start, end, best(measured)))
        result.seconds[end] = measured[-1]
        start = end + 1


def _broken(
    shape: LinearShape, implementations: Mapping[str, Implementation], dtype: torch.dtype, device: str
) -> dict[str, str]:
    """Implementations that cannot run one row here, and what they raise: too little shared memory, a missing driver."""
    x, w = linear_inputs(shape, 1, "random", device)
    found = {}
    for name, implementation in implementations.items():
        if implementation.serves(shape, 1):
            try:
                implementation.product(x, w, dtype, shape.leaves)
            except Exception as error:  # noqa: BLE001 - recorded as a refusal, whatever a compiler or driver raises
                found[name] = f"{type(error).__name__}: {error}"
    return found


def best(measured: Sequence[Mapping[str, float]]) -> str:
    """The implementation whose worst time over the fastest, at the two ends of a range, is smallest."""
    fastest = [min(times.values()) for times in measured]
    return min(measured[0], key=lambda name: max(t[name] / best for t, best in zip(measured, fastest, strict=True)))


def _clean(bad: set[int], start: int, end: int, every: int) -> bool:
    if end <= every:
        return not any(start <= m <= end for m in bad)
    return not any(m > every for m in bad)


def _compare(
    verdicts: _Verdicts,
    shape: LinearShape,
    implementations: Mapping[str, Implementation],
    ms: Sequence[int],
    kind: str,
    dtype: torch.dtype,
    device: str,
    reference: Product,
) -> None:
    if not ms:
        return
    x, w = linear_inputs(shape, ms[-1] + SPARE, kind, device)
    expected = reference(x, w, dtype, shape.leaves)
    for m in ms:
        for first in range(SPARE + 1 if m <= SPARE else 1):
            rows = slice(first, first + m)
            for name, implementation in implementations.items():
                if implementation.serves(shape, m):
                    spoil(expected[rows])
                    y = implementation.product(x[rows], w, dtype, shape.leaves)
                    verdicts.add(name, (m, kind, first), y, expected[rows])


def spoil(like: torch.Tensor) -> None:
    """Leaves NaN in the memory that the next tensor of this size gets: the allocator hands out the block freed last,
    which may hold the right result of another implementation, and an element that is never written would pass."""
    torch.full_like(like, math.nan)


def _refusal(
    name: str,
    shape: LinearShape,
    where: Mapping[Case, int],
    implementations: Mapping[str, Implementation],
    rows: Rows,
    dtype: torch.dtype,
    device: str,
    reference: str,
) -> Refusal:
    """Runs the first failing case again and names its first differing element."""
    m, kind, first = case = min(where)
    block = rows.every if m <= rows.every else rows.sampled()[-1]
    x, w = linear_inputs(shape, block + SPARE, kind, device)
    expected = implementations[reference].product(x, w, dtype, shape.leaves)[first : first + m]
    found = implementations[name].product(x[first : first + m], w, dtype, shape.leaves)
    at = differing(found, expected).nonzero()
    failing_rows = len({rows for rows, _, _ in where})
    if not len(at):  # it differed before and does not now: not even deterministic
        return Refusal(name, m, kind, NOWHERE, "other bits every time", "", where[case], failing_rows)
    row, column = (int(i) for i in at[0])
    return Refusal(
        name, m, kind, (row, column), bits(found[row, column]), bits(expected[row, column]), where[case],
        failing_rows,
    )  # fmt: skip


def bits(value: torch.Tensor) -> str:
    """0x3f80 (1)"""
    width = value.element_size()
    pattern = int(value.reshape(1).view({2: torch.int16, 4: torch.int32}[width]).item()) & ((1 << 8 * width) - 1)
    return f"{pattern:#0{2 + 2 * width}x} ({float(value):.9g})"
