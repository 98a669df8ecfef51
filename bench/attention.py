"""`python -m bench.attention`: canonical attention on a GPU against Flash Attention 3 and PyTorch's flash backward.

Heads of Qwen3-4B (32 / 8 of 128) unless said otherwise. Parts:

decode     batch 1-256 x context 1k-128k while K and V take at most 40 GB, pages of 16 and 256, ragged batches, too:
           ours over max(launch, min(FA3 with automatic splits, 1.1 x floor)). Floor: bytes of K and V over copy
           bandwidth.
           Launch: one kernel that does nothing, in a graph. All in CUDA graphs, K and V cold; what the layers of a step
           share (our list of splits, FA3's metadata) is made before.
prefill    whole causal sequences of 2k, 8k, 32k, at least 32k tokens: packed (training) and paged, TFLOP/s against FA3
backward   the same, packed: ours against PyTorch's flash backward, deterministic and not, and FA3's
dims       head dimensions 64 and 256: one decode and one prefill each
chunks     prefill chunks and mixed batches: the contracts exact-v1 and exact-v1-fa3
certify    (not part of all) certifies the shapes first, writes certificate-attention-MACHINE.json, and what it chose is
           measured; without it the fastest is, or what --use names, and bits are compared at the measured points only
table      no measurement: the tables of docs/attention.md from the result file

Rows of parts not measured are kept from the result file while the kernels are the same. Points over the target are
measured again for longer, and the second figure counts. Bits of the forward are compared with the reference at every
point.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib import metadata
from typing import Any

import numpy as np
import torch

from bench.attention_backward import backward_row
from bench.attention_certificate import certify
from bench.attention_points import (
    Call,
    Heads,
    Point,
    Pool,
    copy_bandwidth,
    fa3_decode,
    fa3_prefill,
    launch_seconds,
    packed,
    paged,
    seconds,
)
from bench.attention_tables import tables
from bench.common import RESULTS, write_result
from exactrl.contract import ATTENTION_KINDS, AttentionShape, Certificate
from exactrl.ops.cuda import determinism
from exactrl.ops.cuda.attention import (
    AttentionChoice,
    AttentionImplementation,
    attention_implementations,
    paged_attention,
)
from exactrl.ops.cuda.certified_attention import certified_attention
from exactrl.ops.cuda.fa3_attention import fa3_choice
from exactrl.ops.cuda.machine import kernels_digest
from exactrl.parity.attention_timing import attention_times
from exactrl.parity.certify import best
from exactrl.parity.compare import differing
from exactrl.parity.warm_up import compile_attention

BATCHES = (1, 8, 32, 64, 128, 256)
CONTEXTS = tuple(1024 * n for n in (1, 4, 16, 32, 64, 128))
LENGTHS = (2048, 8192, 32768)
PAGES = (64,)  # the engine's
KV_BYTES = 40_000_000_000
TOKENS = 32768  # of a prefill, at least
TARGET, AGAIN = 1.15, 1.1
Row = dict[str, Any]
Rows = Iterator[tuple[str, Callable[[], Row]]]
"""Name of a point, and what measures it."""


class Chooser:
    """The implementations that are measured: for each shape and kind the fastest, or the one named on the command line.

    Bits are compared at every measured point; certification itself is `exactrl certify`.
    """

    def __init__(self, names: list[str]) -> None:
        self.available = attention_implementations()
        self.reference = self.available["reference"]
        self.names, self.found = names, dict[tuple[AttentionShape, str], AttentionImplementation]()

    def __call__(self, heads: Heads, page_size: int, kind: str) -> AttentionImplementation:
        shape = AttentionShape(heads.heads, heads.kv_heads, heads.dim, page_size)
        if (shape, kind) not in self.found:
            offered = {n: i for n, i in self.available.items() if i.kind == kind and i.serves(shape)}
            named = {n: i for n, i in offered.items() if n in self.names}
            candidates = named or {n: i for n, i in offered.items() if n != "reference"}
            name = next(iter(candidates)) if len(candidates) == 1 else self._fastest(shape, kind, candidates)
            self.found[shape, kind] = candidates[name]
        return self.found[shape, kind]

    def _fastest(self, shape: AttentionShape, kind: str, candidates: Mapping[str, AttentionImplementation]) -> str:
        measured = attention_times(shape, kind, candidates)
        for work, each in measured.items():
            shown = "  ".join(f"{n} {t * 1e6:.0f}" for n, t in sorted(each.items(), key=lambda pair: pair[1]))
            print(f"{shape} {kind}, {work}: {shown} us", flush=True)
        return best(list(measured.values()))


def decode_points() -> Iterator[tuple[str, list[int]]]:
    """(name, lengths): rectangular batches, then ragged ones as a rollout meets them."""
    for batch in BATCHES:
        for context in CONTEXTS:
            if batch * context * Heads().key_bytes <= KV_BYTES:
                yield f"{batch} x {context}", [context] * batch
    for batch in (32, 256):
        lengths = np.exp(np.random.default_rng(batch).uniform(math.log(256), math.log(32768), batch)).astype(int)
        yield f"{batch} x 256 to 32768", sorted(map(int, lengths))[::-1]


def decode(chooser: Chooser, limits: Mapping[str, float]) -> Rows:
    pool = Pool(Heads(), KV_BYTES // Heads().key_bytes // 256 * 256)
    for page_size in PAGES:
        for name, lengths in decode_points():
            yield f"{name}, pages of {page_size}", partial(decode_row, pool, lengths, page_size, name, chooser, limits)


def fa3_auto(point: Point) -> dict[str, Call]:
    """FA3 with automatic splits, its metadata made in each call or before."""
    found = {"fa3_auto": fa3_decode(point, 0, False)}
    with suppress(Exception):  # not every version takes metadata with every batch; the other figure then stands
        with_metadata = fa3_decode(point, 0, True)
        with_metadata(point.caches[0])
        found["fa3_auto_metadata"] = with_metadata
    return found


def decode_row(
    pool: Pool, lengths: list[int], page_size: int, name: str, chooser: Chooser, limits: Mapping[str, float]
) -> Row:
    ours, point = chooser(pool.shape, page_size, "split"), paged(pool, [1] * len(lengths), lengths, page_size)
    calls = {"ours": point.ours(ours), **fa3_auto(point)}
    floor = sum(lengths) * pool.shape.key_bytes / limits["copy_bytes_per_second"]

    def auto(t: Mapping[str, float]) -> float:
        return min(t[name] for name in t if name.startswith("fa3_auto"))

    def ratio(t: Mapping[str, float]) -> float:
        return t["ours"] / max(limits["launch_seconds"], min(auto(t), 1.1 * floor))

    t = seconds({**calls, "fa3_contract": point.ours(fa3_choice().in_order)}, point, 9)
    over_contract, first = t["ours"] / t["fa3_contract"], ratio(t)
    if first > AGAIN:
        t |= seconds(calls, point, 25)
    return {
        "batch": name, "page_size": page_size, "sequences": len(lengths), "keys": max(lengths),
        "implementation": ours.name, "microseconds": {n: round(x * 1e6, 2) for n, x in t.items()},
        "floor_us": round(floor * 1e6, 2), "time_ratio": round(ratio(t), 4),
        **({"measured_again": round(first, 4)} if first > AGAIN else {}),
        "over_fa3_auto": round(t["ours"] / auto(t), 4), "over_fa3_contract": round(over_contract, 4),
        "compared_rows": len(point.q), "mismatched_rows": point.mismatched_rows(ours, chooser.reference),
    }  # fmt: skip


def prefill(chooser: Chooser, limits: Mapping[str, float]) -> Rows:
    pool = Pool(Heads(), TOKENS)
    for page_size in (0, *PAGES):
        for length in LENGTHS:
            yield f"{length}, page size {page_size}", partial(prefill_row, pool, page_size, length, chooser)


def prefill_row(pool: Pool, page_size: int, length: int, chooser: Chooser) -> Row:
    lengths, shape = [length] * max(1, TOKENS // length), pool.shape
    point = paged(pool, lengths, lengths, page_size) if page_size else packed(pool, lengths)
    ours = chooser(shape, page_size, "in_order")
    calls = {"ours": point.ours(ours), "fa3": fa3_prefill(point), "fa3_contract": point.ours(fa3_choice().in_order)}
    if shape.dim not in (64, 128):
        del calls["fa3_contract"]
    t = seconds(calls, point, 9)
    flops = 2.0 * sum(n * n for n in lengths) * shape.heads * shape.dim
    return {
        "layout": f"pages of {page_size}" if page_size else "packed", "page_size": page_size, "length": length,
        "sequences": len(lengths), "dim": shape.dim, "implementation": ours.name,
        "tflops": {n: round(flops / x / 1e12, 1) for n, x in t.items()}, "speed_ratio": round(t["fa3"] / t["ours"], 4),
        "compared_rows": len(point.q), "mismatched_rows": point.mismatched_rows(ours, chooser.reference),
    }  # fmt: skip


def dims(chooser: Chooser, limits: Mapping[str, float]) -> Rows:
    for dim in (64, 256):
        pool = Pool(Heads(dim=dim), 64 * 4096)
        yield f"decode, dim {dim}", partial(dim_row, pool, chooser, limits)
        yield f"prefill, dim {dim}", lambda pool=pool: {"what": "prefill", **prefill_row(pool, 0, 8192, chooser)}


def dim_row(pool: Pool, chooser: Chooser, limits: Mapping[str, float]) -> Row:
    lengths, ours = [4096] * 32, chooser(pool.shape, 16, "split")
    point = paged(pool, [1] * 32, lengths, 16)
    t = seconds({"ours": point.ours(ours), **fa3_auto(point)}, point, 15)
    floor = sum(lengths) * pool.shape.key_bytes / limits["copy_bytes_per_second"]
    auto = min(t[name] for name in t if name.startswith("fa3_auto"))
    return {
        "what": "decode 32 x 4096, pages of 16", "dim": pool.shape.dim, "implementation": ours.name,
        "microseconds": {n: round(x * 1e6, 2) for n, x in t.items()}, "floor_us": round(floor * 1e6, 2),
        "time_ratio": round(t["ours"] / max(limits["launch_seconds"], min(auto, 1.1 * floor)), 4),
        "compared_rows": 32, "mismatched_rows": point.mismatched_rows(ours, chooser.reference),
    }  # fmt: skip


BATCHES_OF_CHUNKS: dict[str, tuple[list[int], list[int]]] = {
    "chunk of 2048 at 8192": ([2048], [8192]),
    "chunk of 2048 at 32768": ([2048], [32768]),
    "8 chunks of 256 at 4096": ([256] * 8, [4096] * 8),
    "32 decode rows at 8192, a chunk of 2048 at 2048": ([1] * 32 + [2048], [8192] * 32 + [2048]),
    "64 decode rows at 4096, a chunk of 512 at 4096": ([1] * 64 + [512], [4096] * 65),
    "32 sequences of 4 rows at 8192": ([4] * 32, [8192] * 32),
}
"""Rows and keys of each sequence."""


def chunks(chooser: Chooser, limits: Mapping[str, float]) -> Rows:
    """Batches that hold more than one row of some sequence and are no whole sequences either."""
    pool = Pool(Heads(), 64 * 8192 * 2)
    for page_size in PAGES:
        for name in BATCHES_OF_CHUNKS:
            yield f"{name}, pages of {page_size}", partial(chunk_row, pool, name, page_size, chooser)


def chunk_row(pool: Pool, name: str, page_size: int, chooser: Chooser) -> Row:
    names = {kind: chooser(pool.shape, page_size, kind) for kind in ATTENTION_KINDS}
    choice = _choice(names, AttentionShape(pool.shape.heads, pool.shape.kv_heads, pool.shape.dim, page_size))
    point = paged(pool, *BATCHES_OF_CHUNKS[name], page_size)
    calls: dict[str, Call] = {
        which: lambda cache, c=c: paged_attention(point.q, *cache, point.rows, c, point.lse)
        for which, c in {"ours": choice, "fa3_contract": fa3_choice()}.items()
    }
    t = seconds(calls, point, 9)
    right, (k, v) = torch.empty_like(point.q), point.caches[0]
    chooser.reference.attend(point.q, k, v, point.rows, right, None, point.sequences)
    wrong = differing(paged_attention(point.q, k, v, point.rows, choice), right).flatten(1).any(1)
    return {
        "batch": name, "page_size": page_size, "implementation": [i.name for i in names.values()],
        "microseconds": {n: round(x * 1e6, 2) for n, x in t.items()},
        "over_fa3_contract": round(t["ours"] / t["fa3_contract"], 4),
        "compared_rows": len(point.q), "mismatched_rows": int(wrong.sum()),
    }  # fmt: skip


def _choice(names: Mapping[str, AttentionImplementation], shape: AttentionShape) -> AttentionChoice:
    certificate = Certificate({}, {}, {shape: {kind: i.name for kind, i in names.items()}})
    return certified_attention(certificate, {i.name: i for i in names.values()})(shape)


def backward(chooser: Chooser, limits: Mapping[str, float]) -> Rows:
    pool = Pool(Heads(), TOKENS)
    for length in LENGTHS:
        yield str(length), partial(_backward_row, pool, length, chooser)


def _backward_row(pool: Pool, length: int, chooser: Chooser) -> Row:
    point = packed(pool, [length] * max(1, TOKENS // length))
    return {"length": length, **backward_row(point, chooser(pool.shape, 0, "in_order"))}


PARTS = {"decode": decode, "prefill": prefill, "backward": backward, "dims": dims, "chunks": chunks}


def summary_of(rows: list[Row], limits: Mapping[str, float]) -> Row:
    """A key is absent when its part has no rows."""
    of = {part: [row for row in rows if row["part"] == part] for part in PARTS}
    summary: Row = {}
    if points := of["decode"]:
        ratios = [row["time_ratio"] for row in points]
        summary |= {
            "decode_worst_time_ratio": max(ratios), "decode_mean_time_ratio": geometric_mean(ratios),
            "decode_worst_over_fa3_auto": max(row["over_fa3_auto"] for row in points),
            "decode_points": len(points), "decode_points_over_target": sum(r > TARGET for r in ratios),
        }  # fmt: skip
    if points := [row for row in of["prefill"] if not row["page_size"]]:
        summary["prefill_speed_ratio_fa3"] = min(row["speed_ratio"] for row in points)
    if points := [row for row in of["prefill"] if row["page_size"]]:
        summary["paged_prefill_speed_ratio_fa3"] = min(row["speed_ratio"] for row in points)
    if points := of["backward"]:
        summary["backward_speed_ratio_fa2"] = min(row["speed_ratio"] for row in points)
    compared = [row for row in rows if "compared_rows" in row]
    summary["mismatched_rows"] = sum(row["mismatched_rows"] for row in compared)
    summary["compared_rows"] = sum(row["compared_rows"] for row in compared)
    return summary | {name: float(f"{value:.6g}") for name, value in limits.items()}


def geometric_mean(values: list[float]) -> float:
    return round(math.exp(sum(map(math.log, values)) / len(values)), 4)


def kept_rows(parts: list[str], machine: str) -> list[Row]:
    """Rows of the other parts in the result file, if the kernels are still those."""
    path = RESULTS / f"attention-{machine}.json"
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    return [row for row in content["rows"] if row["part"] not in parts and row["kernels"] == kernels_digest()]


def libraries() -> dict[str, str]:
    found = {}
    for name in ("triton", "tokenspeed-fa3", "cuda-bindings"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def shown(row: Row) -> str:
    left_out = ("kernels", "sequences", "keys", "compared_rows")
    return "  ".join(f"{name} {value}" for name, value in row.items() if name not in left_out)


def measure(parts: list[str], rows: list[Row], names: list[str], machine: str, limit_s: float) -> list[str]:
    """Adds to `rows` and writes the result after each part; a point that fails, or is left out for lack of time, is
    named and does not stop the others."""
    begin, chooser, missing = time.perf_counter(), Chooser(names), []
    shapes = [AttentionShape(32, 8, 128, size) for size in (0, *PAGES)]
    if "dims" in parts:
        shapes += [AttentionShape(32, 8, dim, size) for dim in (64, 256) for size in (0, 16)]
    compile_attention(shapes, [*names, "reference"] if names else None)
    if "certify" in parts:
        chooser.found |= certify(shapes, chooser.available, RESULTS / f"certificate-attention-{machine}.json")
    limits = {"copy_bytes_per_second": copy_bandwidth(), "launch_seconds": launch_seconds()}
    print(f"ready after {time.perf_counter() - begin:.0f} s: {limits}", flush=True)
    for part in (part for part in PARTS if part in parts):
        for name, make in PARTS[part](chooser, limits):
            if time.perf_counter() - begin > limit_s:
                missing.append(f"{part}, {name}: no time")
                continue
            try:
                rows.append({"part": part, **make(), "kernels": kernels_digest()})
            except Exception as error:  # noqa: BLE001 - whatever a compiler, driver or library raises; the exit code tells
                missing.append(f"{part}, {name}: {type(error).__name__}: {error}"[:300])
                traceback.print_exc()
            else:
                print(shown(rows[-1]), f" {time.perf_counter() - begin:.0f} s", flush=True)
        torch.cuda.empty_cache()
        summary = summary_of(rows, limits) | {"libraries": libraries(), "missing": missing}
        write_result("attention", rows, summary, machine)
    print(
        json.dumps(summary_of(rows, limits)), f"\nwritten to {RESULTS}; {time.perf_counter() - begin:.0f} s", flush=True
    )
    return missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", default=["all"], choices=["all", "certify", "table", *PARTS])
    parser.add_argument("--use", nargs="+", default=[], metavar="NAME", help="implementations to measure")
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="start no point after so long")
    parser.add_argument("--machine", default="h200", help="suffix of the result file")
    arguments = parser.parse_args()
    if "table" in arguments.part:
        print(tables(json.loads((RESULTS / f"attention-{arguments.machine}.json").read_text())["rows"]))
        return
    determinism.apply()
    parts = [*PARTS, *arguments.part] if "all" in arguments.part else arguments.part
    kept = kept_rows(parts, arguments.machine)
    if missing := measure(parts, kept, arguments.use, arguments.machine, arguments.limit):
        raise SystemExit("not measured:\n" + "\n".join(missing))


if __name__ == "__main__":
    main()
