"""Compiles GPU kernels in several processes before they are compared: DeepGEMM and Triton compile at first use, one
after another, and a certification meets about a hundred of them. NVRTC needs only tenths of a second."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context

import torch

from exactrl.contract import LinearShape
from exactrl.ops.cuda.matmul import implementations

MOST_OUTPUTS = 1 << 30  # of one product: several processes share the memory; the rest compiles when it is met

Task = tuple[LinearShape, tuple[int, ...], tuple[str, ...]]


def compile_all(shapes: Sequence[LinearShape], ms: Sequence[int], processes: int | None = None) -> None:
    """Runs every implementation once per kernel it needs for `shapes` at `ms` rows, results unseen."""
    count = processes or max(1, min(14, (os.cpu_count() or 1) - 1))
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(_run, *task) for task in tasks(shapes, ms)]:
            done.result()


def tasks(shapes: Sequence[LinearShape], ms: Sequence[int]) -> list[Task]:
    """Triton kernels do not depend on M, N and K: one shape per output type and leaves. DeepGEMM picks by M."""
    names = tuple(implementations())
    kinds = {(s.out_dtype, min(s.leaves, 4), s.k // s.leaves % 256): s for s in shapes}
    triton = [
        (shape, (1,), (name,)) for shape in kinds.values() for name in names if name.startswith(("triton", "reference"))
    ]
    deepgemm: list[Task] = []
    for shape in shapes if "deepgemm" in names else ():
        fitting = [m for m in ms if m * shape.n <= MOST_OUTPUTS]
        deepgemm += [(shape, tuple(fitting[i : i + 32]), ("deepgemm",)) for i in range(0, len(fitting), 32)]
    return [*triton, *deepgemm]


def _run(shape: LinearShape, ms: tuple[int, ...], names: tuple[str, ...]) -> None:
    found = implementations()
    w = torch.zeros(shape.n, shape.k, dtype=torch.bfloat16, device="cuda")
    for m in ms:
        x = torch.zeros(m, shape.k, dtype=torch.bfloat16, device="cuda")
        for implementation in (found[name] for name in names):
            if implementation.serves(shape, m):
                with suppress(Exception):  # certify runs it again and refuses it by name
                    implementation.product(x, w, getattr(torch, shape.out_dtype), shape.leaves)
    torch.cuda.synchronize()
