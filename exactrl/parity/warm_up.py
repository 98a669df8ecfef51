"""Compiles GPU kernels in several processes before they are compared: DeepGEMM and Triton compile at first use, one
after another, and a certification meets about a hundred of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from exactrl.contract import LinearShape
from exactrl.ops.cuda.matmul import LIBRARIES, implementations

MOST_ROWS = 1024  # the few kernels that only larger products use compile when they are met

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
    kinds = {(shape.out_dtype, shape.leaves, shape.k // shape.leaves % 256): shape for shape in shapes}
    triton = [(shape, (1,), (name,)) for shape in kinds.values() for name in names if name not in LIBRARIES]
    small = [m for m in ms if m <= MOST_ROWS]
    blocks = [tuple(small[i : i + 32]) for i in range(0, len(small), 32)]
    deepgemm = [(shape, block, ("deepgemm",)) for shape in shapes for block in blocks if "deepgemm" in names]
    return [*triton, *deepgemm]


def _run(shape: LinearShape, ms: tuple[int, ...], names: tuple[str, ...]) -> None:
    found = implementations()
    w = torch.zeros(shape.n, shape.k, dtype=torch.bfloat16, device="cuda")
    for m in ms:
        x = torch.zeros(m, shape.k, dtype=torch.bfloat16, device="cuda")
        for implementation in (found[name] for name in names):
            if implementation.serves(shape, m):
                implementation.product(x, w, getattr(torch, shape.out_dtype), shape.leaves)
    torch.cuda.synchronize()
