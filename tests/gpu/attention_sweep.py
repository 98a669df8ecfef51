"""`python -m tests.gpu.attention_sweep [--least-rows N]`: rows of attention whose bits differ from the reference's.

Whole sequences by the reference, packed, are compared with every implementation: packed, over pages, in chunks, in
mixed batches, and row by row as decoders meet them. Writes bench/results/attention-bits-h200.json.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import torch

from bench.common import write_result
from exactrl.ops.cuda import determinism
from exactrl.ops.cuda.attention import (
    AttentionChoice,
    AttentionImplementation,
    AttentionRows,
    attention_implementations,
    paged_attention,
    shape_of,
)
from exactrl.parity.compare import differing
from tests.gpu.attention_inputs import Sequences, draw, run

EDGES = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 257, 511, 512, 513, 575, 576, 577, 1023, 1024, 1025, 1537]
# heads, kv heads, head dim, page size, peak, lengths
CASES = [
    (8, 2, 128, 64, 1.0, [*EDGES, 4095, 8193, 65536]),
    (8, 2, 128, 16, 4.0, [*EDGES, 16385]),
    (8, 2, 128, 256, 16.0, [*EDGES, 32767]),
    (8, 2, 128, 128, 1.0, [*EDGES, 12345]),
    (4, 2, 128, 32, 2.0, [*EDGES, 4099]),
    (10, 2, 64, 64, 2.0, [*EDGES, 8191]),
    (2, 2, 64, 16, 8.0, [*EDGES, 3001]),
    (4, 2, 256, 64, 2.0, [*EDGES, 4097]),
]
BATCHES = (1, 3, 64, 256)


def batches(data: Sequences, kind: str, group: int, most: int | None, seed: int) -> Iterator[tuple]:
    """(row numbers, batch) of one way to ask for rows. `most` bounds rows x group of a sequence."""
    random, owners = np.random.default_rng(seed), np.arange(len(data.lengths))
    if kind == "chunks":
        for position in range(0, int(data.lengths.max()), 700):
            of = owners[data.lengths > position]
            ends = np.minimum(data.lengths[of], position + 700)
            yield data.last(ends - position, ends, of)
        return
    for size in BATCHES:
        of = random.choice(owners, size, p=data.lengths / data.lengths.sum())
        ends = (random.random(size) * data.lengths[of]).astype(np.int64) + 1
        limit = max(1, (most or 64) // group) if kind == "tails" else 1
        yield data.last(np.minimum(random.integers(1, limit + 1, size), ends), ends, of)


def compared(
    implementation: AttentionImplementation, data: Sequences, kind: str, expected: tuple, seed: int
) -> tuple[int, int]:
    """(rows compared, rows of which any bit of out or lse differs)."""
    group, rows, wrong = data.q.shape[1] // data.k.shape[1], 0, 0
    for number, batch in batches(data, kind, group, implementation.most_rows, seed):
        at = torch.from_numpy(number).to(data.q.device)
        out, lse = run(implementation, data.q[at], data.k_pages, data.v_pages, batch)
        rows, wrong = rows + len(number), wrong + different_rows(out, lse, expected[0][at], expected[1][:, at])
    return rows, wrong


def different_rows(out, lse, expected_out, expected_lse) -> int:
    return int((differing(out, expected_out).any(-1).any(-1) | differing(lse, expected_lse).any(0)).sum())


def mixed(choice: AttentionChoice, data: Sequences, expected: tuple, seed: int) -> tuple[int, int]:
    """One batch of decode rows, tails, chunks and whole sequences, through paged_attention."""
    random, of = np.random.default_rng(seed), np.arange(len(data.lengths))
    counts = np.where(random.random(len(of)) < 0.5, 1, random.integers(1, data.lengths + 1))
    number, batch = data.last(counts, data.lengths, of)
    at = torch.from_numpy(number).to(data.q.device)
    lse = torch.full((data.q.shape[1], len(at)), float("nan"), device=data.q.device)
    out = paged_attention(data.q[at], data.k_pages, data.v_pages, batch, choice, lse)
    return len(number), different_rows(out, lse, expected[0][at], expected[1][:, at])


def sweep_case(case: tuple, seed: int, available: dict[str, AttentionImplementation]) -> Iterator[tuple]:
    """(implementation, way of asking, rows, differing rows)."""
    heads, kv_heads, dim, page_size, peak, lengths = case
    data = draw(lengths, heads, kv_heads, dim, page_size, peak, seed)
    packed = data.packed()
    expected = run(available["reference"], data.q, data.k, data.v, packed)
    assert torch.isfinite(expected[0]).all(), "the reference let NaN in"
    paged = AttentionRows.build(data.lengths, data.lengths, data.tables)
    for name, implementation in available.items():
        if implementation.kind == "in_order":
            for what, k, v, rows in (("packed", data.k, data.v, packed), ("paged", data.k_pages, data.v_pages, paged)):
                if implementation.serves(shape_of(data.q, k)):
                    found = run(implementation, data.q, k, v, rows)
                    yield name, what, len(data.q), different_rows(*found, *expected)
        if implementation.serves(shape_of(data.q, data.k_pages)):
            ways = ("decode", "tails") if implementation.kind == "split" else ("decode", "chunks")
            for way in ways:
                yield name, way, *compared(implementation, data, way, expected, seed)
    served = [i for i in available.values() if i.serves(shape_of(data.q, data.k_pages))]
    in_order = next(i for i in reversed(served) if i.kind == "in_order")
    for split in (i for i in served if i.kind == "split"):
        choice = AttentionChoice(split, in_order, split.most_rows or 0)
        yield f"{split.name} and {in_order.name}", "mixed", *mixed(choice, data, expected, seed)


def in_process(case: tuple, seed: int, only: str) -> list[tuple]:
    determinism.apply()
    found = attention_implementations().items()
    return list(sweep_case(case, seed, {name: i for name, i in found if name.startswith((only, "reference"))}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--least-rows", type=int, default=1_000_000)
    parser.add_argument("--only", default="", help="implementations whose name starts so, and the reference")
    parser.add_argument("--processes", type=int, default=8, help="cases at the same time: compiling takes longest")
    arguments = parser.parse_args()
    rows, wrong, seed, begin = Counter(), Counter(), 0, time.perf_counter()
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        while not seed or sum(rows.values()) < arguments.least_rows:
            tasks = [pool.submit(in_process, case, seed, arguments.only) for case in CASES]
            for case, task in zip(CASES, tasks, strict=True):
                for name, way, count, differ in task.result():
                    rows[name, way] += count
                    wrong[name, way] += differ
                print(f"seed {seed} {case[:5]} rows {sum(rows.values())} differing {sum(wrong.values())}", flush=True)
            seed += 1
    table = [{"implementation": n, "way": w, "rows": rows[n, w], "differing": wrong[n, w]} for n, w in sorted(rows)]
    for entry in table:
        print("{implementation:45} {way:8} {rows:9} {differing:6}".format(**entry))
    cases = [dict(zip(("heads", "kv_heads", "dim", "page_size", "peak", "lengths"), c, strict=True)) for c in CASES]
    summary = {
        "compared_rows": sum(rows.values()), "mismatched_rows": sum(wrong.values()), "cases": cases, "seeds": seed,
        "batches": list(BATCHES), "seconds": round(time.perf_counter() - begin, 1),
    }  # fmt: skip
    print(write_result("attention-bits", table, summary, "h200"), summary["compared_rows"], summary["mismatched_rows"])


if __name__ == "__main__":
    main()
