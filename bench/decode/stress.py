"""`python -m bench.decode.stress SECONDS`: rows whose bits differ from the reference's, over every one of many
launches, alone and in replayed graphs. Exit code 1 where any differs."""

from __future__ import annotations

import sys
import time
from collections import Counter

import torch

from bench.attention_points import Heads, Point, Pool, paged
from bench.decode.common import Attend, different_rows, kernels
from exactrl.ops.cuda import determinism

BATCHES = (
    (32, 1024), (64, 2048), (256, 1024), (8, 4096), (256, 8192), (8, 1100), (16, 131072), (32, 8192), (1, 32768),
    (1, 1024), (8, 1024), (1, 8192), (128, 600), (33, 4999), (7, 16500), (100, 513), (1, 131072), (5, 70001),
)  # fmt: skip
LARGE = 1 << 20  # keys of a batch that is launched less often


def launches(point: Point, cache: tuple, attend: Attend, right: tuple, times: int) -> torch.Tensor:
    """Differing rows of `times` launches."""
    wrong = torch.zeros((), dtype=torch.int64, device=point.out.device)
    for _ in range(times):
        point.out.fill_(torch.nan)
        point.lse.fill_(torch.nan)
        attend(point.q, *cache, point.rows, point.out, point.lse, point.sequences)
        wrong += different_rows(point.out, point.lse, *right).sum()
    return wrong


def replays(point: Point, cache: tuple, attend: Attend, right: tuple, times: int) -> torch.Tensor:
    """Differing rows of `times` replays of a graph of four launches."""
    torch.cuda.synchronize()
    graph, stream, wrong = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.zeros((), device=point.out.device)
    with torch.cuda.stream(stream):
        graph.capture_begin()
        found = launches(point, cache, attend, right, 4)
        graph.capture_end()
    for _ in range(times):
        graph.replay()
        wrong += found
    return wrong


def one_batch(pool: Pool, batch: int, context: int, page_size: int, turn: int) -> tuple[int, Counter[str]]:
    """(rows compared of each kernel, differing rows by kernel)."""
    rows, times = (2 if context % 64 else 1), (6 if batch * context > LARGE else 30)
    point, (reference, others) = paged(pool, [rows] * batch, [context] * batch, page_size), kernels()
    cache = point.caches[turn % len(point.caches)]
    reference(point.q, *cache, point.rows, point.out, point.lse, point.sequences)
    right, wrong = (point.out.clone(), point.lse.clone()), Counter[str]()
    for name, attend in others.items():
        found = launches(point, cache, attend, right, times) + replays(point, cache, attend, right, times // 2)
        wrong[name] = int(found)
        if wrong[name]:
            print(f"{name} {batch} x {context}, pages of {page_size}: {wrong[name]} rows differ", flush=True)
    return 3 * times * rows * batch, wrong


def main(limit_s: float) -> None:
    determinism.apply()
    begin, pool, turn, rows, wrong = time.perf_counter(), Pool(Heads(), 1 << 21), 0, 0, Counter[str]()
    while time.perf_counter() - begin < limit_s:
        compared, found = one_batch(pool, *BATCHES[turn % len(BATCHES)], (64, 16)[turn // len(BATCHES) % 2], turn)
        turn, rows, wrong = turn + 1, rows + compared, wrong + found
    print(f"{turn} batches, {rows} rows of each kernel; differing: {dict(wrong)}")
    if wrong.total():
        raise SystemExit(1)


if __name__ == "__main__":
    main(float(sys.argv[1]))
