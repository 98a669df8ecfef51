"""Times of attention kernels as an engine and a trainer meet them: in CUDA graphs, decode with KV cold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from exactrl.contract import AttentionShape
from exactrl.ops.cuda.attention import AttentionImplementation, AttentionRows
from exactrl.parity.gpu_timing import COLD_BYTES, capture, median, times


@dataclass(frozen=True, slots=True)
class Workload:
    """`sequences` of `keys` keys each, the last `rows` of them in this batch."""

    sequences: int
    keys: int
    rows: int = 1

    def __str__(self) -> str:
        return f"{self.sequences} x {self.keys} keys, {self.rows} rows"


WORKLOADS: Mapping[str, Sequence[Workload]] = {
    "split": (Workload(1, 1024), Workload(1, 32768), Workload(8, 4096), Workload(64, 4096), Workload(256, 2048)),
    "in_order": (Workload(16, 2048, 2048), Workload(4, 8192, 8192)),
}
CHUNKS = (Workload(1, 8192, 2048), Workload(8, 2048, 256))
"""Also timed in order, where there are pages."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """`caches`: pairs (k, v), one to each call, so that together they exceed the L2."""

    q: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    rows: AttentionRows
    out: torch.Tensor
    lse: torch.Tensor
    sequences: np.ndarray


def inputs(shape: AttentionShape, work: Workload, most_copies: int = 8) -> Inputs:
    """Random values, pages in shuffled order."""
    g = torch.Generator("cuda").manual_seed(work.keys)
    count, t = work.sequences, work.sequences * work.rows
    q = torch.randn(t, shape.heads, shape.dim, generator=g, device="cuda", dtype=torch.bfloat16)
    if shape.page_size:
        pages = -(-work.keys // shape.page_size)
        size: tuple[int, ...] = (count * pages, shape.page_size, shape.kv_heads, shape.dim)
        tables = torch.randperm(count * pages, generator=g, device="cuda").view(count, pages).int()
    else:
        assert work.rows == work.keys, "packed sequences are whole"
        size, tables = (t, shape.kv_heads, shape.dim), None
    held = count * work.keys * shape.kv_heads * shape.dim * 4
    copies = max(1, min(most_copies, -(-COLD_BYTES // held))) if work.rows < work.keys else 1
    caches = [
        (torch.empty(size, device="cuda", dtype=torch.bfloat16).normal_(generator=g),
         torch.empty(size, device="cuda", dtype=torch.bfloat16).normal_(generator=g))
        for _ in range(copies)
    ]  # fmt: skip
    rows = AttentionRows.build(np.full(count, work.rows), np.full(count, work.keys), tables)
    lse = torch.empty(shape.heads, t, dtype=torch.float32, device="cuda")
    return Inputs(q, caches, rows, torch.empty_like(q), lse, np.arange(count))


def graph(given: Inputs, implementation: AttentionImplementation) -> torch.cuda.CUDAGraph:
    """A graph that attends once with each of the caches."""

    def call(cache: tuple[torch.Tensor, torch.Tensor]) -> None:
        implementation.attend(given.q, cache[0], cache[1], given.rows, given.out, given.lse, given.sequences)

    return capture(call, given.caches, torch.cuda.graph_pool_handle())


def attention_times(
    shape: AttentionShape, kind: str, implementations: Mapping[str, AttentionImplementation], repeats: int = 5
) -> dict[str, dict[str, float]]:
    """Workload -> median seconds per call of each implementation."""
    found = {}
    for work in (*WORKLOADS[kind], *(CHUNKS if kind == "in_order" and shape.page_size else ())):
        given = inputs(shape, work)
        graphs = {name: graph(given, i) for name, i in implementations.items()}
        measured = times(graphs, len(given.caches), repeats)
        found[str(work)] = {name: median(t) for name, t in measured.items()}
        del given, graphs
        torch.cuda.empty_cache()
    return found
