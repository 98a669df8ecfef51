"""Compiles GPU kernels in several processes before they are compared: DeepGEMM and Triton compile at first use, one
after another, and a certification meets about a hundred of them; NVRTC needs tenths of a second for each of ours."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context

import numpy as np
import torch

from exactrl.contract import AttentionShape, LinearShape
from exactrl.ops.cuda.attention import AttentionRows, attention_implementations
from exactrl.ops.cuda.matmul import implementations

MOST_OUTPUTS = 1 << 30  # of one product: several processes share the memory; the rest compiles when it is met

Task = tuple[LinearShape, tuple[int, ...], tuple[str, ...]]


def compile_all(shapes: Sequence[LinearShape], ms: Sequence[int], processes: int | None = None) -> None:
    """Runs every implementation once per kernel it needs for `shapes` at `ms` rows, results unseen."""
    count = processes or max(1, min(14, (os.cpu_count() or 1) - 1))
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(_run, *task) for task in tasks(shapes, ms)]:
            done.result()


def compile_attention(
    shapes: Sequence[AttentionShape], names: Sequence[str] | None = None, processes: int | None = None
) -> None:
    """Runs every canonical implementation, or those of `names`, once for each shape."""
    canonical = [shape for shape in shapes if shape.order == "canonical"]
    found = {name: i for name, i in attention_implementations().items() if names is None or name in names}
    each = [(shape, name) for shape in canonical for name, i in found.items() if i.serves(shape)]
    count = processes or max(1, min(14, (os.cpu_count() or 1) - 1))
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(_attend, *task) for task in each]:
            done.result()


def _attend(shape: AttentionShape, name: str) -> None:
    """One row of one sequence, with and without log-sum-exp."""
    q = torch.zeros(1, shape.heads, shape.dim, dtype=torch.bfloat16, device="cuda")
    kv = q.new_zeros(*((1, shape.page_size) if shape.page_size else (1,)), shape.kv_heads, shape.dim)
    tables = np.zeros((1, 1), np.int32) if shape.page_size else None
    rows, attend = AttentionRows.build(np.ones(1), np.ones(1), tables), attention_implementations()[name].attend
    for lse in (torch.empty(shape.heads, 1, device="cuda"), None):
        with suppress(Exception):  # certify runs it again and refuses it by name
            attend(q, kv, kv, rows, torch.empty_like(q), lse, np.zeros(1, np.int64))
    torch.cuda.synchronize()


def tasks(shapes: Sequence[LinearShape], ms: Sequence[int]) -> list[Task]:
    """Triton kernels do not depend on M, N and K: one shape per output type and leaves. DeepGEMM picks by M, and so do
    ours in CUDA C++, in steps of at least 24 rows."""
    offered = implementations()
    names = tuple(offered)
    kinds = {(s.out_dtype, min(s.leaves, 4), s.k // s.leaves % 256): s for s in shapes}
    triton = [
        (shape, (1,), (name,)) for shape in kinds.values() for name in names if name.startswith(("triton", "reference"))
    ]
    deepgemm: list[Task] = []
    for shape in shapes if "deepgemm" in names else ():
        fitting = [m for m in ms if m * shape.n <= MOST_OUTPUTS]
        deepgemm += [(shape, tuple(fitting[i : i + 32]), ("deepgemm",)) for i in range(0, len(fitting), 32)]
    cuda = {
        (name, shape.out_dtype, shape.n): (shape, (1, *(m for m in ms if m <= 256 and m % 24 == 0), 256), (name,))
        for name in names
        for shape in shapes
        if name.startswith("cuda:") and offered[name].serves(shape, 1)
    }
    return [*triton, *deepgemm, *cuda.values()]


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
