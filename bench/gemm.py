"""`python -m bench.gemm`: canonical linears on a GPU against cuBLAS as it comes.

Certifies the shapes of four Qwen3 models, then measures what the certificate chose against cuBLAS with torch's default
flags (split-K allowed), at every M to 16, every seventh to 256 and at powers of two to 16384. Weights are cold,
activations warm, both sides replay CUDA graphs in turn; a ratio is the median of pairwise ratios. Points under 0.95 are
measured again for longer, in five places of the memory (where weights lie moves a ratio by up to a tenth), and the
median of these counts. Leaves: the same at powers of two, as time over one leaf.
`--merge FILE …` takes what this run did not measure from earlier results, the last that has it; rows name their run.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from bench.common import ratio, write_result
from exactrl.contract import LinearShape
from exactrl.ops.cuda import determinism
from exactrl.ops.cuda.linear import linear_plain
from exactrl.ops.cuda.machine import machine
from exactrl.ops.cuda.matmul import Implementation, Product, implementations
from exactrl.parity.adversarial import linear_inputs
from exactrl.parity.certificate import certificate_json
from exactrl.parity.certify import LinearResult, Rows, certify_linear
from exactrl.parity.compare import differing
from exactrl.parity.gpu_timing import linear_samples, linear_times, median
from exactrl.parity.warm_up import compile_all

# name: hidden, query heads x 128, kv heads x 128, intermediate; vocabulary 151936
MODELS = {
    "0.6B": (1024, 16, 8, 3072),
    "4B": (2560, 32, 8, 9728),
    "8B": (4096, 32, 8, 12288),
    "32B": (5120, 64, 8, 25600),
}
VOCABULARY, HEAD_DIM = 151936, 128
OPS = ("qkv", "gate_up", "head", "o", "down")
RUN = ("date", "git_revision", "command")
REMEASURE, PLACES = 0.95, 5


def shapes_of(model: str, leaves: int = 1) -> dict[str, LinearShape]:
    hidden, heads, kv_heads, intermediate = MODELS[model]
    row_parallel = {
        "o": LinearShape(hidden, heads * HEAD_DIM, leaves=leaves),
        "down": LinearShape(hidden, intermediate, leaves=leaves),
    }
    if leaves > 1:
        return row_parallel
    return {
        "qkv": LinearShape((heads + 2 * kv_heads) * HEAD_DIM, hidden),
        "gate_up": LinearShape(2 * intermediate, hidden),
        "head": LinearShape(VOCABULARY, hidden, "float32"),
        **row_parallel,
    }


def chosen(result: LinearResult, m: int) -> str:
    return next(c.implementation for c in result.choices if c.m_min <= m <= c.m_max)


def against(
    shape: LinearShape, m: int, ours: Product, theirs: Product, repeats: int
) -> tuple[list[float], list[float]]:
    """Seconds per call of both, in turn."""
    measured = linear_samples(shape, {"ours": ours, "theirs": theirs}, m, 2e-3, repeats)
    return measured["ours"], measured["theirs"]


def speed(shape: LinearShape, m: int, ours: Product) -> tuple[float, float, float | None]:
    """Speed ratio to cuBLAS and our seconds per call; the third is the first ratio of a point measured again."""
    times, theirs = against(shape, m, ours, linear_plain, 9)
    first = ratio(theirs, times)
    if first >= REMEASURE:
        return first, median(times), None
    again, spacers = [], []
    for i in range(PLACES):
        torch.cuda.empty_cache()  # or the weights lie where they lay
        spacers.append(torch.empty((2 * i + 1) * 10_000_000, dtype=torch.uint8, device="cuda"))
        again.append(against(shape, m, ours, linear_plain, 25))
    ratios, ours_s = [ratio(theirs, times) for times, theirs in again], [median(times) for times, _ in again]
    return median(ratios), median(ours_s), first


def speed_row(
    model: str, op: str, result: LinearResult, available: Mapping[str, Implementation], most: int
) -> dict[str, Any]:
    """One shape: lists with an entry for each measured M."""
    ms = measured_rows(most)
    names = [chosen(result, m) for m in ms]
    found = [speed(result.shape, m, available[name].product) for m, name in zip(ms, names, strict=True)]
    return {
        "model": model, "op": op, **asdict(result.shape), "m": ms, "implementation": runs(ms, names),
        "speed_ratio": [round(ratio, 4) for ratio, _, _ in found],
        "microseconds": [round(seconds * 1e6, 2) for _, seconds, _ in found],
        "measured_again": {str(m): round(first, 4) for m, (_, _, first) in zip(ms, found, strict=True) if first},
    }  # fmt: skip


def runs(ms: list[int], names: list[str]) -> dict[str, str]:
    """First M of each run of equal names -> the name."""
    return {str(m): name for m, name, before in zip(ms, names, ["", *names], strict=False) if name != before}


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def measured_rows(most: int, step: int = 7) -> list[int]:
    """Where speed is measured: bits are compared at every number of rows to 256."""
    powers = [2**i for i in range(9, most.bit_length()) if 2**i <= most]
    return [m for m in (*range(1, 17), *range(18, 256, step), 256, *powers) if m <= most]


def one_leaf(model: str, op: str, rows: Rows, available: Mapping[str, Implementation], begin: float):
    """Certifies and measures one shape: its result and its row."""
    result = certify_linear(shapes_of(model)[op], available, rows, linear_times)
    row = speed_row(model, op, result, available, rows.most)
    worst = min(zip(row["speed_ratio"], row["m"], strict=True))
    print(
        f"{model:5} {op:8} {result.shape.k:>6} -> {result.shape.n:<7} speed {geometric_mean(row['speed_ratio']):5.2f}  "
        f"worst {worst[0]:.3f} at {worst[1]} ({chosen(result, worst[1])})  compared {result.compared_elements:.1e}  "
        f"refused {[r.implementation for r in result.refused]}  {time.perf_counter() - begin:4.0f} s",
        flush=True,
    )
    torch.cuda.empty_cache()
    return result, row


def with_leaves(model: str, rows: Rows, available: Mapping[str, Implementation], one: Mapping, begin: float):
    """The row-parallel linears of one model with 2, 4 and 8 leaves, as time over their one-leaf choice."""
    results, points = [], []
    ms = [2**i for i in range(rows.most.bit_length()) if 2**i <= rows.most]
    for leaves in (2, 4, 8):
        for op, shape in shapes_of(model, leaves).items():
            result = certify_linear(shape, available, rows, linear_times)
            names = [chosen(result, m) for m in ms]
            values = []
            for m, name in zip(ms, names, strict=True):
                plain = available[chosen(one[model, op], m)].product
                one_leaf = lambda x, w, dtype, _, plain=plain: plain(x, w, dtype, 1)  # noqa: E731
                values.append(ratio(*against(shape, m, available[name].product, one_leaf, 9)))
            results.append(result)
            points.append({
                "model": model, "op": op, **asdict(shape), "m": ms, "implementation": runs(ms, names),
                "time_over_one_leaf": [round(v, 4) for v in values],
            })  # fmt: skip
            shown = " ".join(f"{m}:{v:.2f}" for m, v in zip(ms, values, strict=True))
            print(f"{model:5} {op:5} {leaves} leaves  {shown}  {time.perf_counter() - begin:4.0f} s", flush=True)
            torch.cuda.empty_cache()
    return results, points


def summary_of(points: list[dict], leaf_points: list[dict]) -> dict[str, Any]:
    each = [(m, v) for row in points for m, v in zip(row["m"], row["speed_ratio"], strict=True)]
    leaves = {}
    for n in sorted({row["leaves"] for row in leaf_points}):
        pairs = [
            pair for row in leaf_points if row["leaves"] == n
            for pair in zip(row["m"], row["time_over_one_leaf"], strict=True)
        ]  # fmt: skip
        parts = {"to_256_rows": [v for m, v in pairs if m <= 256], "above": [v for m, v in pairs if m > 256]}
        leaves[str(n)] = {name: geometric_mean(v) for name, v in parts.items() if v} | {
            "worst": max(v for _, v in pairs)
        }
    return {
        "mean_speed_ratio": geometric_mean([v for _, v in each]), "worst_speed_ratio": min(v for _, v in each),
        "points": len(each), "measured_again": sum(len(row["measured_again"]) for row in points),
        "mean_speed_ratio_powers_of_two": geometric_mean([v for m, v in each if m & (m - 1) == 0]),
        "leaves_time_over_one_leaf": leaves,
    }  # fmt: skip


def chosen_mismatches(results: Iterable[LinearResult]) -> int:
    """Differing elements of what the certificates chose, on inputs of another seed, at every measured M."""
    available, count = implementations(), torch.zeros((), dtype=torch.int64, device="cuda")
    for result in results:
        shape, dtype = result.shape, getattr(torch, result.shape.out_dtype)
        x, w = linear_inputs(shape, result.choices[-1].m_max, "random", "cuda", seed=1)
        expected = available["reference"].product(x, w, dtype, shape.leaves)
        for m in measured_rows(x.shape[0], 1):
            count += differing(available[chosen(result, m)].product(x[:m], w, dtype, shape.leaves), expected[:m]).sum()
        del x, w, expected
        torch.cuda.empty_cache()
    return int(count)


def main() -> None:
    arguments = parsed()
    begin = time.perf_counter()
    determinism.apply()
    rows, available = Rows(most=arguments.max_rows), implementations()
    leaves = () if arguments.no_leaves else (2, 4, 8)
    pairs = [(model, op) for op in arguments.ops for model in arguments.models]
    every = [shapes_of(model)[op] for model, op in pairs]
    every += [s for model in arguments.models for n in leaves for s in shapes_of(model, n).values()]
    compile_all(list(dict.fromkeys(every)), rows.checked())
    print(f"compiled after {time.perf_counter() - begin:.0f} s", flush=True)
    one: dict[Any, LinearResult] = {}
    results: list[LinearResult] = []
    points: list[dict[str, Any]] = []
    mismatched = 0
    todo = [("one leaf", model, op) for model, op in pairs] + [("leaves", m, "") for m in arguments.models if leaves]
    for i, (kind, model, op) in enumerate(todo):  # what is measured is kept, should the rest be cut short
        if time.perf_counter() - begin > arguments.seconds:
            print(f"not measured, --seconds {arguments.seconds} are over: {todo[i:]}", flush=True)
            break
        if kind == "leaves":
            more, found = with_leaves(model, replace(rows, step=arguments.leaf_step), available, one, begin)
        else:
            one[model, op], row = one_leaf(model, op, rows, available, begin)
            more, found = [one[model, op]], [row]
        results += more
        points += found
        mismatched += chosen_mismatches(more)
        write(points, results, mismatched, arguments)
    print(f"{time.perf_counter() - begin:.0f} s")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=OPS, help="measured in this order")
    parser.add_argument("--max-rows", type=int, default=16384)
    parser.add_argument("--leaf-step", type=int, default=8, help="rows in a range with one choice, to 256 rows")
    parser.add_argument("--no-leaves", action="store_true", help="only one leaf")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after so many no further shape is begun")
    parser.add_argument(
        "--merge",
        nargs="+",
        type=earlier_result,
        default=[],
        help="earlier results, for what this run does not measure",
    )
    parser.add_argument("--machine", default="h200", help="suffix of the result file")
    arguments = parser.parse_args()
    if not arguments.no_leaves and not set(arguments.ops) >= {"o", "down"}:
        parser.error("leaves are measured against one leaf of o and down: name both in --ops, or add --no-leaves")
    return arguments


def earlier_result(path: str) -> dict[str, Any]:
    return json.loads(Path(path).read_text())


def merged(points: list[dict], earlier: list[dict[str, Any]]) -> tuple[list[dict], list[dict]]:
    """(rows, runs): `points`, whose run comes last, after the rows of earlier results that are not replaced."""
    key = lambda row: (row["model"], row["op"], row["leaves"])  # noqa: E731
    found: dict[Any, dict] = {}
    before: list[dict[str, Any]] = []
    for old in earlier:
        found |= {key(row): {**row, "run": len(before) + row.get("run", 0)} for row in old["rows"]}
        before += old.get("runs", []) or [{key: old[key] for key in (*RUN, "versions") if key in old}]
    if not before:
        return points, []
    found |= {key(row): {**row, "run": len(before)} for row in points}
    used = sorted({row["run"] for row in found.values()} | {len(before)})
    return [{**row, "run": used.index(row["run"])} for row in found.values()], [before[i] for i in used[:-1]]


def write(
    points: list[dict],
    results: list[LinearResult],
    mismatched: int,
    arguments: argparse.Namespace,
) -> None:
    """Result file and certificate; prints the summary. Elements are those compared in this run."""
    rows, runs = merged(points, arguments.merge)
    summary = summary_of(
        [row for row in rows if "speed_ratio" in row], [row for row in rows if "time_over_one_leaf" in row]
    ) | {
        "mismatched_elements": mismatched,
        "compared_elements": sum(r.compared_elements for r in results),
    }
    path = write_result("gemm", rows, summary, arguments.machine)
    if runs:
        content = json.loads(path.read_text())
        content["runs"] = [*runs, {key: content[key] for key in (*RUN, "versions")}]
        path.write_text(json.dumps(content, indent=1) + "\n")
    certificate = path.with_name(f"certificate-{arguments.machine}.json")
    certificate.write_text(certificate_json(machine(), [r.to_json() for r in results]))
    print(json.dumps(summary), f"\nwritten to {path} and {certificate}", flush=True)


if __name__ == "__main__":
    main()
