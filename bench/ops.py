"""`python -m bench.ops`: the fused ops on a GPU against max(launch, memory floor), and against torch.compile.

Shapes of Qwen3-4B and 0.6B at 1, 32, 256 and 8192 tokens; what reads logits at 1, 32, 256 and as many rows as the loss
takes at once; backwards at 8192. All in CUDA graphs, median of replays.

Floor: the larger of an empty Triton kernel in a graph and of the bytes that the op must move, each once, at 4.3 TB/s.
Copy: a Triton kernel that only copies as many bytes; what it needs above the floor no op can save.
Inputs of less than 25 MB are one set: in life, too, the op that made them has left them in the L2. Larger ones rotate
over sets that together exceed the L2 by far.

torch.compile gets the same definition as one torch expression with all roundings written out (bench/ops_torch.py), for
the 4B shapes, as it comes and with `emulate_precision_casts`. `differ`: elements whose bits are not ours.

The file is written after each op, and keeps the rows of ops that were not measured. `--warm-up` compiles only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from bench.common import RESULTS, write_result
from bench.ops_points import OPS, Inputs, Point, sizes
from exactrl.ops.cuda import determinism
from exactrl.ops.cuda.machine import kernels_digest
from exactrl.parity.compare import differing
from exactrl.parity.gpu_timing import capture, median, times

BANDWIDTH = 4.3e12
TARGET, AGAIN = 1.3, 1.25
WARM_CALLS, COLD_CALLS = 24, 6
Row = dict[str, Any]
Call = Callable[..., Sequence[torch.Tensor]]


@triton.jit
def _nothing(x):
    pass


@triton.jit
def _copy(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


def copied(point: Point) -> Call:
    """Reads and writes as many bytes as the op must move, half of them each."""
    n = -(-point.moved_bytes // 16) * 2
    buffers = [torch.empty(2, n, dtype=torch.int32, device="cuda") for _ in point.inputs]
    turn = itertools.cycle(buffers)

    def call(*_: Any) -> Sequence[torch.Tensor]:
        x, y = next(turn)
        _copy[(triton.cdiv(n, 1024),)](x, y, n, 1024)
        return ()

    return call


def launch_seconds() -> float:
    """Of an empty kernel in a graph of 48."""
    x = torch.zeros(1, device="cuda")
    graph = capture(lambda y: _nothing[(1,)](y), [x] * 48, torch.cuda.graph_pool_handle())
    return median(times({"nothing": graph}, 48, 21)["nothing"])


def seconds(calls: dict[str, Call], point: Point, repeats: int) -> dict[str, float]:
    """Median seconds per call of each. Outputs of as many calls as there are sets of inputs lie side by side."""
    rounds = -(-(WARM_CALLS if point.warm else COLD_CALLS) // len(point.inputs))
    inputs, pool = point.inputs * rounds, torch.cuda.graph_pool_handle()
    graphs = {}
    for name, call in calls.items():
        held: deque[Sequence[torch.Tensor]] = deque(maxlen=len(point.inputs))

        def called(each: Inputs, call: Call = call, held: deque = held) -> None:
            held.append(call(*each))

        graphs[name] = capture(called, inputs, pool)
        held.clear()
    found = {name: median(t) for name, t in times(graphs, len(inputs), repeats).items()}
    graphs.clear()
    return found


def outputs(point: Point, call: Call) -> list[torch.Tensor]:
    inputs = point.inputs[0]
    return [t.clone() for t in (*call(*inputs), *point.written(*inputs))]


def difference(point: Point, theirs: Call) -> int:
    """Elements of the outputs whose bits differ."""
    ours = outputs(point, point.ours)
    return sum(int(differing(a, b).sum()) for a, b in zip(ours, outputs(point, theirs), strict=True))


def compiled(point: Point) -> dict[str, Call]:
    """As it comes, and asked to keep casts to bfloat16 that it would skip between fused operations."""
    return {
        "torch_compile": torch.compile(point.theirs, dynamic=False, fullgraph=True),
        "torch_compile_casts": torch.compile(
            point.theirs, dynamic=False, fullgraph=True, options={"emulate_precision_casts": True}
        ),
    }


def measured(op: str, model: str, tokens: int, launch: float) -> Row:
    point = OPS[op](model, tokens)
    floor = max(launch, point.moved_bytes / BANDWIDTH)
    calls: dict[str, Call] = {"ours": point.ours, "copy": copied(point)}
    t = seconds(calls, point, 15)
    if t["ours"] / floor > AGAIN:
        t = seconds(calls, point, 41)
    return {
        "op": op, "model": model, "tokens": tokens, "inputs": "warm" if point.warm else "cold",
        "bytes": point.moved_bytes, "floor_us": round(floor * 1e6, 2),
        "microseconds": {name: round(s * 1e6, 2) for name, s in t.items()}, "time_ratio": round(t["ours"] / floor, 3),
        "over_copy": round(t["ours"] / t["copy"], 3), "kernels": kernels_digest(),
    }  # fmt: skip


def add_torch(row: Row) -> None:
    """What torch.compile makes of the same definition: times and differing elements, into `row`."""
    point = OPS[row["op"]](row["model"], row["tokens"])
    theirs = compiled(point)
    differ = {name: difference(point, call) for name, call in theirs.items()}
    t = seconds({"ours": point.ours, **theirs}, point, 15)
    row |= {"differ": differ, "elements": sum(t.numel() for t in outputs(point, point.ours))}
    row["microseconds"] |= {name: round(s * 1e6, 2) for name, s in t.items() if name in theirs}
    row["torch_over_ours"] = {name: round(t[name] / t["ours"], 3) for name in theirs}


def summary_of(rows: list[Row], launch: float) -> Row:
    above = [f"{row['op']} {row['model']} {row['tokens']}" for row in rows if row["time_ratio"] > TARGET]
    return {
        "points": len(rows), "points_over_target": len(above), "over_target": above, "target": TARGET,
        "worst_time_ratio": max((row["time_ratio"] for row in rows), default=None),
        "launch_seconds": float(f"{launch:.4g}"), "bytes_per_second": BANDWIDTH,
    }  # fmt: skip


def kept_rows(ops: list[str], machine: str) -> list[Row]:
    """Rows of the other ops in the result file, if the kernels are still those."""
    path = RESULTS / f"ops-{machine}.json"
    if not path.exists():
        return []
    rows = json.loads(path.read_text())["rows"]
    return [row for row in rows if row["op"] not in ops and row["kernels"] == kernels_digest()]


def table(rows: list[Row]) -> str:
    """Op and model, then for each size: microseconds, ratios to floor and copy; torch.compile's time over ours."""
    lines = [f"{'op':18} {'model':5} tokens:  us  x floor  x copy  (torch.compile: x ours, differing/with casts kept)"]
    for op, model in dict.fromkeys((row["op"], row["model"]) for row in rows):
        cells = []
        for row in (row for row in rows if (row["op"], row["model"]) == (op, model)):
            t = row["microseconds"]
            cell = f"{row['tokens']}: {t['ours']:.1f} {row['time_ratio']:.2f} {row['over_copy']:.2f}"
            if "differ" in row:
                shares = "/".join(f"{n / row['elements']:.0e}" if n else "0" for n in row["differ"].values())
                cell += f" ({row['torch_over_ours']['torch_compile']:.2f}, {shares})"
            cells.append(cell)
        lines.append(f"{op:18} {model:5} " + " | ".join(cells))
    return "\n".join(lines)


def points(ops: list[str], models: list[str]) -> list[tuple[str, str, int]]:
    return [(op, model, tokens) for op in ops for model, tokens in sizes(op) if model in models]


def warm_up(ops: list[str]) -> None:
    for op, model, tokens in points(ops, ["4B"]):
        begin = time.perf_counter()
        point = OPS[op](model, tokens)
        point.ours(*point.inputs[0])
        for call in compiled(point).values():
            call(*point.inputs[0])
        torch.cuda.synchronize()
        print(f"{op} {tokens}: {time.perf_counter() - begin:.1f} s", flush=True)


def measure(ops: list[str], models: list[str], with_torch: bool, machine: str, limit_s: float) -> list[str]:
    """All points first, then torch.compile's part, which has to compile. Returns what failed or was left out for lack
    of time; it does not stop the rest."""
    begin, rows, missing, launch = time.perf_counter(), kept_rows(ops, machine), list[str](), launch_seconds()

    def attempt(name: str, step: Callable[[], None]) -> None:
        if time.perf_counter() - begin > limit_s:
            missing.append(f"{name}: no time")
            return
        try:
            step()
        except Exception as error:  # noqa: BLE001 - whatever a compiler, driver or library raises; the exit code tells
            missing.append(f"{name}: {type(error).__name__}: {error}"[:300])
            traceback.print_exc()
        write_result("ops", rows, summary_of(rows, launch) | {"missing": missing}, machine)
        torch.cuda.empty_cache()

    for op, model, tokens in points(ops, models):
        attempt(f"{op} {model} {tokens}", lambda: rows.append(measured(op, model, tokens, launch)))  # noqa: B023
    compared = [row for row in rows if with_torch and row["op"] in ops and row["model"] == "4B"]
    for row in sorted(compared, key=lambda row: -row["tokens"]):
        attempt(f"torch.compile, {row['op']} {row['tokens']}", partial(add_torch, row))
    write_result("ops", rows, summary_of(rows, launch) | {"missing": missing}, machine)
    print(table(rows), json.dumps(summary_of(rows, launch)), f"{time.perf_counter() - begin:.0f} s", sep="\n")
    return missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=list(OPS))
    parser.add_argument("--models", nargs="+", default=["4B", "0.6B"], choices=["4B", "0.6B"])
    parser.add_argument("--no-torch", action="store_true", help="without torch.compile")
    parser.add_argument("--warm-up", action="store_true", help="compile for the 4B shapes, measure nothing")
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="start no point after so long")
    parser.add_argument("--machine", default="h200", help="suffix of the result file")
    arguments = parser.parse_args()
    determinism.apply()
    torch.manual_seed(1)
    torch._dynamo.config.recompile_limit = 64
    if arguments.warm_up:
        warm_up(arguments.ops)
    elif missing := measure(
        arguments.ops, arguments.models, not arguments.no_torch, arguments.machine, arguments.limit
    ):
        raise SystemExit("not measured:\n" + "\n".join(missing))


if __name__ == "__main__":
    main()
