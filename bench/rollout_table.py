"""What one decode step consists of: kernels by name, number and time, against the bytes that must be read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.rollout_points import BANDWIDTH, Workload, key_bytes, weight_bytes
from exactrl.engine.engine import Engine
from exactrl.types import EngineStats

TIMED_STEPS, PROFILED_STEPS = 24, 6
SETTLED_TOKENS = 16  # generated for each sequence before a window begins: all prompts are computed by then
LONGEST_NAME = 120
# Parts of kernels' names, first match counts. A name that matches nothing is "other".
KINDS = {
    "copies": ("memcpy", "memset", "copy_"),
    "attention": ("attend", "flash", "attention", "list_items", "_splits", "_plan", "_merge_all", "prepare_varlen"),
    "rotary, cache": ("qkv",),
    "norm": ("rms_norm",),
    "swiglu": ("swiglu", "silu"),
    "logprob, sampling": ("_blocks", "_merge", "gumbel", "logprob", "_best", "sample"),
    "linear": ("gemm", "nvjet", "matmul", "cutlass", "splitk", "cublas", "_repeat_last_row", "aten::mm"),
}


class Window:
    """`on_progress` of Engine.generate: calls `begin` once every sequence decodes and `end` some steps later."""

    def __init__(
        self, engine: Engine, sequences: int, steps: int, begin: Callable[[], None], end: Callable[[], None]
    ) -> None:
        self.engine, self.steps = engine, steps
        self.settled = sequences * SETTLED_TOKENS
        self.begin, self.end = begin, end
        self.first: int | None = None
        self.seen = 0

    def __call__(self, finished: int, total: int) -> None:
        stats = self.engine.stats
        if self.first is None:
            if stats.generated_tokens >= self.settled:
                self.begin()
                self.first = stats.steps
        elif not self.seen and stats.steps >= self.first + self.steps:
            self.seen = stats.steps - self.first
            self.end()


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(p in name for p in parts)), "other")


def kernel_table(engine: Engine, sequences: int, context: int) -> dict[str, Any]:
    """One row: microseconds of a step without a profiler, and its kernels with one. All sequences have `context` tokens
    when decoding begins."""
    cuda = engine.model.ops.device.type == "cuda"
    clock: list[float] = []

    def mark() -> None:
        if cuda:
            torch.cuda.synchronize()
        clock.append(time.perf_counter())

    timed = _run(engine, sequences, context, TIMED_STEPS, mark, mark, repeat=0)
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    profiler = profile(activities=[activity], acc_events=True)

    def stop() -> None:
        if cuda:
            torch.cuda.synchronize()
        profiler.stop()

    steps = _run(engine, sequences, context, PROFILED_STEPS, profiler.start, stop, repeat=1).seen
    kernels = _kernels(profiler, cuda, steps)
    config, keys = engine.model.config, sequences * (context + SETTLED_TOKENS + TIMED_STEPS / 2)
    floors = {"linear": weight_bytes(config), "attention": keys * key_bytes(config)}
    by_kind: dict[str, float] = {}
    for kernel in kernels:
        by_kind[kernel["kind"]] = round(by_kind.get(kernel["kind"], 0.0) + kernel["us"], 2)
    return {
        "what": "table", "sequences": sequences, "context": context, "profiled_steps": steps,
        "step_us": round((clock[1] - clock[0]) / timed.seen * 1e6, 1), "kernels_us": round(sum(by_kind.values()), 1),
        "floor_us": {kind: round(size / BANDWIDTH * 1e6, 1) for kind, size in floors.items()},
        "kinds_us": dict(sorted(by_kind.items(), key=lambda item: -item[1])), "kernels": kernels,
    }  # fmt: skip


def _run(
    engine: Engine, sequences: int, context: int, steps: int, begin: Callable[[], None], end: Callable[[], None],
    repeat: int,
) -> Window:  # fmt: skip
    new = SETTLED_TOKENS + steps + 16
    window = Window(engine, sequences, steps, begin, end)
    engine.stats = EngineStats()
    engine.reset_cache()
    work = Workload.equal(sequences, context, new)
    engine.generate(work.requests(repeat, engine.model.config.vocab_size), window)
    assert window.seen, f"no {steps} steps in which all of {sequences} sequences decode"
    return window


def _kernels(profiler: profile, cuda: bool, steps: int) -> list[dict[str, Any]]:
    """Per step: name, kind, calls, microseconds, longest first. Without a GPU torch's ops stand in for kernels."""
    found = []
    for event in profiler.key_averages():
        if cuda and event.device_type != DeviceType.CUDA:
            continue
        us = (event.self_device_time_total if cuda else event.self_cpu_time_total) / steps
        found.append({
            "name": event.key[:LONGEST_NAME], "kind": kind_of(event.key), "calls": round(event.count / steps, 2),
            "us": round(us, 2),
        })  # fmt: skip
    return sorted(found, key=lambda kernel: -kernel["us"])


def as_text(row: dict[str, Any], most: int = 12) -> str:
    """A table of the longest kernels."""
    floors = row["floor_us"]
    head = (
        f"{row['sequences']} sequences at {row['context']}: step {row['step_us']:,.0f} us, kernels "
        f"{row['kernels_us']:,.0f} us, floor {sum(floors.values()):,.0f} us"
    )
    kinds = [f"  {k:18} {us:>9,.1f} us" + (f"  floor {floors[k]:,.1f}" if k in floors else "")
             for k, us in row["kinds_us"].items()]  # fmt: skip
    kernels = [f"  {k['us']:>9,.1f} us {k['calls']:>7g} x {k['name'][:90]}" for k in row["kernels"][:most]]
    return "\n".join([head, *kinds, *kernels])
