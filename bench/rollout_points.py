"""What bench.rollout measures: workloads, the engine they run in, bandwidth floors, start, speed and weight sync."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.parity import config_of, model_of
from exactrl.contract import get_contract, noise_key
from exactrl.engine.engine import Engine
from exactrl.launch.device import make_ops
from exactrl.model.config import ModelConfig, read_config
from exactrl.model.folder import load_model
from exactrl.model.weights import named_weights
from exactrl.parity.certificate import linear_shapes
from exactrl.types import EngineStats, Request, SamplingParams

BANDWIDTH = 4.3e12  # bytes per second of an H200's memory, as a copy from device to device reaches it
WARM_UP_TOKENS = 8
SYNC_REPEATS = 7
SLEEPS = 3
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """`name` is the key in the summary. Sequence i has prompts[i] tokens and generates new[i]; at most `limit` of them
    are decoded together (0: all)."""

    name: str
    prompts: tuple[int, ...]
    new: tuple[int, ...]
    limit: int = 0

    @classmethod
    def equal(cls, sequences: int, prompt: int, new: int) -> Workload:
        return cls(str(sequences), (prompt,) * sequences, (new,) * sequences)

    @classmethod
    def mixed(cls, sequences: int, least: int, most: int) -> Workload:
        """nano-vllm's: lengths drawn evenly between `least` and `most`, for prompts and responses."""
        drawn = np.random.default_rng(0).integers(least, most + 1, (2, sequences)).tolist()
        return cls(f"{sequences} mixed", tuple(drawn[0]), tuple(drawn[1]))

    @classmethod
    def rolling(cls, sequences: int, least: int, most: int) -> Workload:
        """Mixed lengths, of which half are decoded together: most steps hold a prompt."""
        return replace(cls.mixed(sequences, least, most), name=f"{sequences} rolling", limit=-(-sequences // 2))

    @property
    def concurrent(self) -> int:
        return self.limit or len(self.prompts)

    @property
    def longest(self) -> int:
        return max(p + n for p, n in zip(self.prompts, self.new, strict=True))

    def prompt_ids(self, repeat: int, vocab: int) -> list[list[int]]:
        """Each repeat has prompts of its own, so that no prefix is found in a cache."""
        generator = np.random.default_rng([repeat, len(self.prompts)])
        return [generator.integers(0, vocab, n).tolist() for n in self.prompts]

    def requests(self, repeat: int, vocab: int, most: int = sys.maxsize) -> list[Request]:
        """No token ends a response; temperature 1; `most`: new tokens of each."""
        return [
            Request(
                str(i), tuple(ids), SamplingParams(min(n, most), 1.0, ()),
                noise_key(0, "bench", repeat, 0, str(i), 0),
            )
            for i, (ids, n) in enumerate(zip(self.prompt_ids(repeat, vocab), self.new, strict=True))
        ]  # fmt: skip


STANDARD = (Workload.equal(256, 256, 1024), Workload.equal(32, 256, 1024), Workload.equal(1, 256, 512))
MANY = Workload.equal(1024, 64, 256)
NANO = Workload.mixed(256, 100, 1024)
ROLLING = Workload.rolling(512, 100, 512)


def weight_bytes(config: ModelConfig) -> int:
    """Of the matrices that one decode step reads."""
    *layer, head = linear_shapes(config).values()
    return 2 * (config.num_layers * sum(s.n * s.k for s in layer) + head.n * head.k)


def key_bytes(config: ModelConfig) -> int:
    """Of one key and its value in all layers."""
    return 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim


def floor_tokens_per_sec(config: ModelConfig, work: Workload) -> float:
    """Tokens per second if each step read weights and cached keys once at full bandwidth and did nothing else."""
    share = work.concurrent / len(work.prompts)
    keys = share * sum(p + n / 2 for p, n in zip(work.prompts, work.new, strict=True))
    return work.concurrent / ((weight_bytes(config) + keys * key_bytes(config)) / BANDWIDTH)


@dataclass(frozen=True, slots=True)
class Setup:
    """Which model on which device in which mode. `folder` None: random weights of `shape`."""

    shape: str
    folder: Path | None
    device: str
    exact: bool
    chunk_tokens: int
    engine_options: dict[str, Any]

    def config(self) -> ModelConfig:
        return read_config(self.folder) if self.folder else config_of(self.shape)

    def engine(self, work: Sequence[Workload]) -> Engine:
        """An engine with room for each of the workloads without preemption, where memory allows. Raises as make_ops."""
        config = self.config()
        ops = make_ops(self.device, get_contract("exact-v1"), self.exact, "bfloat16", config)
        if self.folder:
            model = load_model(self.folder, ops, torch.bfloat16, trainable=False)
        else:
            model = model_of(config, ops, "flat", trainable=False)  # type: ignore[arg-type]
        return Engine(
            model, max_concurrent=max(w.concurrent for w in work), chunk_tokens=self.chunk_tokens,
            max_model_tokens=max(w.longest for w in work), **self.engine_options,
        )  # fmt: skip


def synchronize(engine: Engine) -> None:
    if engine.model.ops.device.type == "cuda":
        torch.cuda.synchronize()


def started(setup: Setup, work: Sequence[Workload], began: float) -> tuple[Engine, Row]:
    """An engine, and the seconds since `began` (time.time() before the process was started) at which it was there and
    at which the first token of a first request came back."""
    imported = time.time()
    engine = setup.engine(work)
    synchronize(engine)
    built = time.time()
    engine.generate(Workload.equal(1, work[0].prompts[0], 1).requests(0, engine.model.config.vocab_size))
    seconds = {"imported": imported - began, "engine": built - began, "first_token": time.time() - began}
    kernels = engine.model.ops.proof.get("kernels", "not certified")
    return engine, {
        "what": "start", "seconds": {k: round(v, 2) for k, v in seconds.items()}, "kernels": kernels,
        "weights": str(setup.folder) if setup.folder else "random, made on the device",
    }  # fmt: skip


def settled(seconds: Sequence[float], graphs: Sequence[int]) -> list[float]:
    """Those of `seconds` in which no graph was captured, or all; `graphs` counts before the first and after each."""
    found = [s for s, before, after in zip(seconds, graphs, graphs[1:], strict=False) if before == after]
    return found or list(seconds)


def throughput(engine: Engine, work: Workload, repeats: int, chunk_tokens: int) -> Row:
    """Whole `generate` calls, prompts included, after one with a few tokens for each sequence. Repeats in which graphs
    were captured, the first ones, do not count where others follow; `graphs` counts them before and after each."""
    vocab, stats = engine.model.config.vocab_size, EngineStats()
    seconds: list[float] = []
    engine.generate(work.requests(repeats, vocab, WARM_UP_TOKENS))
    graphs = [engine.runner.num_captured]
    for repeat in range(repeats):
        requests, engine.stats = work.requests(repeat, vocab), EngineStats()
        gc.collect()
        begin = time.perf_counter()
        completions = engine.generate(requests)
        seconds.append(time.perf_counter() - begin)
        graphs.append(engine.runner.num_captured)
        assert [len(c.token_ids) for c in completions] == list(work.new), "a response ended early"
        stats = engine.stats
    new = sum(work.new)
    return {
        "what": "throughput", "workload": work.name, "sequences": len(work.prompts),
        "prompt_tokens": sum(work.prompts), "new_tokens": new, "seconds": [round(s, 4) for s in seconds],
        "tokens_per_sec": round(new / statistics.median(settled(seconds, graphs)), 1), "steps": stats.steps,
        "graphs": graphs, "preemptions": stats.preemptions, "cached_tokens": stats.cached_tokens,
        "chunk_tokens": chunk_tokens, **chosen_linears(engine),
    }  # fmt: skip


def chosen_linears(engine: Engine) -> Row:
    """With exactness off on a GPU: the kernel of each linear, by outputs x inputs and the largest number of rows."""
    chosen = getattr(getattr(engine.model.ops, "product", None), "chosen", {})
    return {"linears": {f"{s.n} x {s.k}, {rows}": name for (s, rows), name in chosen.items()}} if chosen else {}


def weight_sync(engine: Engine) -> Row:
    """Engine.load_weights from tensors on the engine's device, in the compute dtype, digest included."""
    tensors = [(name, tensor.clone()) for name, tensor in named_weights(engine.model)]
    before, milliseconds = engine.load_weights(tensors, 1), []
    for version in range(2, 2 + SYNC_REPEATS):
        synchronize(engine)
        begin = time.perf_counter()
        digest = engine.load_weights(tensors, version)
        synchronize(engine)
        milliseconds.append(round((time.perf_counter() - begin) * 1e3, 2))
        assert digest == before, "the same weights have another digest"
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
    return {
        "what": "sync", "milliseconds": milliseconds, "median_ms": statistics.median(milliseconds), "bytes": size,
        "digest": before,
    }  # fmt: skip


def sleeping(engine: Engine, work: Workload) -> Row:
    """Engine.sleep, and what the first tokens after it take longer than without: memory is taken and mapped again."""
    vocab = engine.model.config.vocab_size

    def clocked(function: Callable[[], Any]) -> float:
        synchronize(engine)
        begin = time.perf_counter()
        function()
        synchronize(engine)
        return round((time.perf_counter() - begin) * 1e3, 1)

    def first(repeat: int) -> float:
        return clocked(lambda: engine.generate(work.requests(repeat, vocab, WARM_UP_TOKENS)))

    first(0)
    awake = [first(1 + i) for i in range(SLEEPS)]
    asleep, freed, after = [], [], []
    for i in range(SLEEPS):
        before = free_bytes(engine)
        asleep.append(clocked(engine.sleep))
        freed.append(free_bytes(engine) - before)
        after.append(first(1 + SLEEPS + i))
    return {
        "what": "sleep", "sequences": len(work.prompts), "sleep_ms": asleep, "freed_bytes": freed, "awake_ms": awake,
        "after_ms": after, "median_ms": round(statistics.median(after) - statistics.median(awake), 1),
        "graphs": engine.runner.num_captured,
    }  # fmt: skip


def free_bytes(engine: Engine) -> int:
    return torch.cuda.mem_get_info()[0] if engine.model.ops.device.type == "cuda" else 0


class Clock:
    """A function that adds up the seconds spent in it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *arguments: Any) -> Any:
        begin = time.perf_counter()
        try:
            return self.function(*arguments)
        finally:
            self.seconds += time.perf_counter() - begin


def scheduling(engine: Engine, work: Workload) -> Row:
    """What of a step is spent on deciding what it computes and on booking what it sampled, on the host."""
    vocab, scheduler = engine.model.config.vocab_size, engine.scheduler
    engine.generate(work.requests(1, vocab, WARM_UP_TOKENS))
    clocks = {name: Clock(getattr(scheduler, name)) for name in ("schedule", "update")}
    for name, clock in clocks.items():
        setattr(scheduler, name, clock)
    engine.stats = EngineStats()
    begin = time.perf_counter()
    engine.generate(work.requests(0, vocab))
    seconds, steps = time.perf_counter() - begin, engine.stats.steps
    for name in clocks:
        delattr(scheduler, name)
    return {
        "what": "scheduler", "sequences": len(work.prompts), "steps": steps, "step_us": round(seconds / steps * 1e6, 1),
        **{f"{name}_us": round(clock.seconds / steps * 1e6, 1) for name, clock in clocks.items()},
        "share": round(sum(clock.seconds for clock in clocks.values()) / seconds, 4),
    }  # fmt: skip
