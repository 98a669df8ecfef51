"""`python -m tests.gpu.attention_stress SECONDS`: decode kernels, many launches on the same batches, also in graphs.

Prints how many rows differ from the reference's in any of them; exit code 1 where one does. What it is for are races:
the sweep launches each batch once, and a missing fence showed in 1 row of 10,000.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable

import torch

from bench.attention_points import Heads, Point, Pool, paged
from exactrl.ops.cuda import determinism
from exactrl.ops.cuda.attention import AttentionImplementation, attention_implementations
from exactrl.parity.compare import differing

BATCHES = (
    (32, 1024), (64, 2048), (256, 1024), (8, 4096), (256, 8192), (8, 1100), (16, 131072), (32, 8192), (1, 32768),
    (1, 1024), (8, 1024), (1, 8192), (128, 600), (33, 4999), (7, 16500), (100, 513), (1, 131072), (5, 70001),
)  # fmt: skip
"""Sequences, keys of each."""
LARGE = 1 << 20  # keys of a batch that is launched less often


def stressed() -> tuple[AttentionImplementation, list[AttentionImplementation]]:
    """(the reference, kernels)."""
    offered = attention_implementations()
    return offered["reference"], [i for name, i in offered.items() if name.startswith("cuda-") and i.kind == "split"]


def launches(point: Point, cache: tuple, attend: Callable[..., None], right: tuple, times: int) -> torch.Tensor:
    """Differing rows of `times` launches, int64 on the device."""
    wrong = torch.zeros((), dtype=torch.int64, device=point.out.device)
    for _ in range(times):
        point.out.fill_(torch.nan)
        point.lse.fill_(torch.nan)
        attend(point.q, *cache, point.rows, point.out, point.lse, point.sequences)
        different = differing(point.out, right[0]).flatten(1).any(1) | differing(point.lse, right[1]).any(0)
        wrong += different.sum()
    return wrong


def replays(point: Point, cache: tuple, attend: Callable[..., None], right: tuple, times: int) -> torch.Tensor:
    """Differing rows of `times` replays of a graph of four launches."""
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        found = launches(point, cache, attend, right, 4)
        graph.capture_end()
    wrong = torch.zeros_like(found)
    for _ in range(times):
        graph.replay()
        wrong += found
    torch.cuda.synchronize()  # before the graph's memory goes
    return wrong


def one_batch(pool: Pool, batch: int, context: int, page_size: int, turn: int) -> tuple[int, Counter[str]]:
    """(rows compared of each kernel, differing rows by kernel)."""
    rows, times = (2 if context % 64 else 1), (6 if batch * context > LARGE else 30)
    point, (reference, kernels) = paged(pool, [rows] * batch, [context] * batch, page_size), stressed()
    cache = point.caches[turn % len(point.caches)]
    reference.attend(point.q, *cache, point.rows, point.out, point.lse, point.sequences)
    right, wrong = (point.out.clone(), point.lse.clone()), Counter[str]()
    for kernel in kernels:
        arguments = point, cache, kernel.attend, right
        wrong[kernel.name] = int(launches(*arguments, times) + replays(*arguments, times // 2))
        if wrong[kernel.name]:
            print(f"{kernel.name} {batch} x {context}, pages of {page_size}: {wrong[kernel.name]} rows", flush=True)
    return 3 * times * rows * batch, wrong


def main(limit_s: float) -> None:
    determinism.apply()
    begin, pool, turn, rows, wrong = time.perf_counter(), Pool(Heads(), 1 << 21), 0, 0, Counter[str]()
    while time.perf_counter() - begin < limit_s:
        compared, found = one_batch(pool, *BATCHES[turn % len(BATCHES)], (64, 16)[turn // len(BATCHES) % 2], turn)
        wrong.update(found)  # unlike a sum, keeps those with 0
        turn, rows = turn + 1, rows + compared
    print(f"{turn} batches, {rows} rows of each kernel; differing: {dict(wrong)}")
    if wrong.total() or not wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main(float(sys.argv[1]))
