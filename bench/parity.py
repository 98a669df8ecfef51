"""Rollout and trainer on a GPU, bit for bit, at the shapes of Qwen3 models with random weights, flat and peaked.

`python -m bench.parity --shape 0.6B`: the ladder of `exactrl check`, then some hundred requests with contexts to 8k,
decoded in batches of 1 to 256 beside prefill chunks, from pages that are few, shuffled or full of NaN, and scored by
the trainer. Compared are tokens, their logprobs, and a digest of the log-probabilities of the whole vocabulary at every
sampled position. Writes bench/results/parity-SHAPE-KINDS[-PART]-h200.json after each part; --combine adds such files up
in parity-h200.json. Kernels must be certified for the shape (see --make-model).
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common import write_result
from exactrl.algo.algorithm import get_algorithm
from exactrl.contract import get_contract, noise_key
from exactrl.engine.engine import Engine
from exactrl.launch.checking import subject_with
from exactrl.launch.device import make_ops
from exactrl.model.config import ModelConfig, find_model, read_config
from exactrl.model.qwen3 import Qwen3
from exactrl.model.weights import load_weights, random_weights
from exactrl.ops.cuda import head
from exactrl.ops.cuda.binding import CudaOps
from exactrl.ops.transfer import key_bits
from exactrl.parity import check as ladder
from exactrl.parity.compare import Tally
from exactrl.parity.subject import to_samples
from exactrl.train.trainer import Trainer
from exactrl.types import Completion, Request, Sample, SamplingParams

# layers, hidden, intermediate, query heads, KV heads
SHAPES = {"tiny": (2, 128, 384, 4, 2), "0.6B": (28, 1024, 3072, 16, 8), "4B": (36, 2560, 9728, 32, 8)}
# (standard deviation of the embedding, which is the head, too; factor on the QK-norms): nearly uniform; sharp attention
# and a few likely tokens
KINDS = {"flat": (0.02, 1.0), "peaked": (0.1, 8.0)}
LENGTHS = (8000, 6000, 4097, 3000, 2048)  # prompts among the shorter ones
NEW_TOKENS = (64, 128, 192)
KV_TOKENS = 98304  # the long requests crowd out some of 256; a third of it many
Place = tuple[int, int]  # noise key, position: which token a digest is of


class Digests:
    """The digest of every sampled row's log-probabilities, on the device: noted inside captured graphs, too."""

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        keys = key_bits([r.noise_key for r in requests])
        self.keys, order = keys.sort()
        self.places = [(requests[i].noise_key, len(requests[i].token_ids)) for i in order.tolist()]
        self.width = max(r.params.max_new_tokens for r in requests)
        first = torch.tensor([n for _, n in self.places] + [0])  # the last row takes what no request asked for
        self.keys, self.first = self.keys.to(device), first.to(device)
        self.table = torch.zeros(len(first) * self.width, dtype=torch.int64, device=device)
        self.changed = torch.zeros((), dtype=torch.int64, device=device)

    def clear(self) -> None:
        self.table.zero_()
        self.changed.zero_()

    def note(self, keys: torch.Tensor, positions: torch.Tensor, digests: torch.Tensor) -> None:
        """`changed` counts tokens that were drawn again, after a preemption, with another digest."""
        at = torch.searchsorted(self.keys, keys).clamp(max=len(self.keys) - 1)
        known = self.keys[at] == keys
        row = torch.where(known, at, len(self.keys))
        place = row * self.width + (positions - self.first[row]).clamp(0, self.width - 1)
        before = self.table[place]
        self.changed += (known & (before != 0) & (before != digests)).sum()
        self.table[place] = digests

    def found(self) -> dict[Place, int]:
        values = self.table.view(-1, self.width).tolist()
        return {
            (key, first + i): digest
            for (key, first), row in zip(self.places, values, strict=False) for i, digest in enumerate(row) if digest
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recording(CudaOps):
    """Ops that note, for every sampled token, the digest of its row's log-probabilities."""

    digests: Digests | None = None

    def sample(self, hidden, weight, temperatures, keys, positions):
        assert self.digests is not None
        tokens, logprobs, digests = self.sample_with_digest(hidden, weight, temperatures, keys, positions)
        self.digests.note(keys, positions, digests)
        return tokens, logprobs


def make_model_folder(folder: Path, shape: str) -> None:
    """A config.json for `exactrl certify`; no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(shape).to_json()))


def config_of(shape: str) -> ModelConfig:
    layers, hidden, intermediate, heads, kv_heads = SHAPES[shape]
    return replace(
        read_config(find_model("tiny")), num_layers=layers, hidden_size=hidden, intermediate_size=intermediate,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=128, vocab_size=151936, max_positions=16384, rope_theta=1e6,
        tie_word_embeddings=True,
    )  # fmt: skip


def model_of(config: ModelConfig, ops: CudaOps, kind: str, trainable: bool) -> Qwen3:
    embed, peak = KINDS[kind]
    model = Qwen3(config, ops, torch.bfloat16, trainable=trainable)
    load_weights(model, random_weights(config, 0, peak=peak, embed=embed, device=ops.device), "random weights")
    return model


def requests_of(config: ModelConfig, count: int, new_tokens: Sequence[int]) -> list[Request]:
    generator = np.random.default_rng(5)
    lengths = [*LENGTHS, *np.exp(generator.uniform(0, np.log(1500), count)).astype(int).tolist()][:count]
    requests = []
    for i, n in enumerate(int(n) for n in generator.permutation(lengths)):
        ids = tuple(generator.integers(0, config.vocab_size, n).tolist())
        params = SamplingParams(new_tokens[i % len(new_tokens)], (1.0, 0.7, 0.0)[i % 3], ())
        requests.append(Request(f"r{i}", ids, params, noise_key(0, "parity", 0, 0, f"r{i}", 0)))
    return requests


@dataclass
class Rollout:
    completions: list[Completion]
    digests: dict[Place, int]
    preemptions: int
    changed: int  # tokens that were drawn again with another digest


def roll_out(model: Qwen3, requests: Sequence[Request], prepare: Callable[[Engine], None], **limits: Any) -> Rollout:
    ops = model.ops
    assert isinstance(ops, Recording)
    assert ops.digests is not None
    ops.digests.clear()
    gc.collect()  # the cache of the rollout before
    engine = Engine(model, **{"max_concurrent": 256, "chunk_tokens": 8192, "kv_tokens": KV_TOKENS, **limits})
    prepare(engine)
    completions = engine.generate(requests)
    return Rollout(completions, ops.digests.found(), engine.stats.preemptions, int(ops.digests.changed))


def nothing(engine: Engine) -> None:
    pass


def nan_filled(engine: Engine) -> None:
    engine.cache.fill(float("nan"))


def rollouts(model: Qwen3, requests: list[Request]) -> Iterator[tuple[str, list[int], Rollout]]:
    """(what is varied, which requests, what came out)."""

    def each(n: int) -> range:
        return range(0, len(requests), n)

    cases: list[tuple[str, range, Callable[[Engine], None], dict[str, Any]]] = [
        ("1 at a time, chunks of 300", each(200), nothing, {"max_concurrent": 1, "chunk_tokens": 300}),
        ("7 at a time, chunks of 64", each(40), nothing, {"max_concurrent": 7, "chunk_tokens": 64}),
        ("64 at a time, chunks of 512", each(3), nothing, {"max_concurrent": 64, "chunk_tokens": 512}),
        ("128 at a time, no prefix cache", each(1), nothing, {"max_concurrent": 128, "prefix_cache": False}),
        ("a third of the cache", each(1), nothing, {"kv_tokens": KV_TOKENS // 3, "chunk_tokens": 2048}),
        ("op by op, one step after the other", each(1), nothing, {"cuda_graphs": False, "overlap": False}),
        ("NaN in all pages, shuffled", each(1), nan_filled, {"block_order": "shuffled", "block_seed": 1}),
    ]
    for what, chosen, prepare, limits in cases:
        yield what, list(chosen), roll_out(model, [requests[i] for i in chosen], prepare, **limits)


def trainer_digests(trainer: Trainer, requests: Sequence[Request], samples: list[Sample]) -> tuple[list, dict]:
    """(logprobs of every sample, digests by place) from the trainer's forward of packed sequences."""
    from exactrl.ops.cuda.triton_logprob import blocks, logprob_digests, merge

    ops, w, found = trainer.model.ops, trainer.model.head.rows(), {}
    assert isinstance(ops, CudaOps)
    state: dict[str, Any] = {"first": 0}

    def see(name: str, x: torch.Tensor) -> torch.Tensor:
        if name == "rows":
            state["rows"] = x + torch.tensor([state["first"], 0])
            state["first"] = int(state["rows"][:, 0].max()) + 1
        elif name == "norm":
            state["hidden"] = x
        elif name == "predicting":
            owners, hidden = state["rows"][x.cpu()], state["hidden"][x]
            temperatures = torch.tensor([samples[i].temperature for i in owners[:, 0].tolist()], device=x.device)
            targets, size = torch.zeros_like(x), head.chunk_rows(len(w), head.CHUNK_BYTES)
            digests = []
            for cut in (slice(a, a + size) for a in range(0, len(x), size)):
                logits = ops.product(hidden[cut], w, torch.float32, 1)
                _, lse, _ = merge(blocks(logits, temperatures[cut]), logits, temperatures[cut], targets[cut])
                digests += logprob_digests(logits, temperatures[cut], lse).tolist()
            for (i, position), digest in zip(owners.tolist(), digests, strict=True):
                found[requests[i].noise_key, position + 1] = digest
        return x

    trainer.see = see
    return trainer.score(samples), found


def compare_digests(tally: Tally, ours: dict[Place, int], theirs: dict[Place, int], subset: bool) -> int:
    """Number of digests compared; differing and missing ones count as mismatches."""
    if not subset:
        tally.require(ours.keys() == theirs.keys(), "other positions were sampled")
    for place, digest in ours.items():
        if theirs.get(place) != digest:
            tally.mismatched += 1
            tally.first = tally.first or f"digest at {place}: {digest} and {theirs.get(place)}"
    return len(ours)


def measure(kind: str, config: ModelConfig, ops: Recording, requests: list[Request]) -> Iterator[dict[str, Any]]:
    begin, model = time.perf_counter(), model_of(config, ops, kind, trainable=False)
    base = roll_out(model, requests, nothing)

    def row(what: str, tally: Tally, digests: int, **more: Any) -> dict[str, Any]:
        nonlocal begin
        seconds, begin = time.perf_counter() - begin, time.perf_counter()
        return {
            "weights": kind, "what": what, "tokens": tally.compared, "digests": digests, "mismatched": tally.mismatched,
            "first": tally.first or None, "problems": tally.problems, "seconds": round(seconds, 1), **more,
        }  # fmt: skip

    for what, chosen, found in rollouts(model, requests):
        tally = Tally()
        tally.trajectories(found.completions, [base.completions[i] for i in chosen], what)
        if "third" in what:
            tally.require(found.preemptions > 0, "nothing was preempted")
        tally.require(not found.changed, f"{found.changed} tokens drawn again with another digest")
        tally.require(len(found.digests) == tally.compared, f"{len(found.digests)} digests of {tally.compared} tokens")
        count = compare_digests(tally, found.digests, base.digests, subset=len(chosen) < len(requests))
        yield row(what, tally, count, preemptions=found.preemptions)
    del model
    trainer = Trainer(
        model_of(config, ops, kind, trainable=True), get_algorithm("grpo"), lr=1e-6, max_tokens_per_microbatch=16384
    )
    samples = to_samples(requests, base.completions)
    scored, digests = trainer_digests(trainer, requests, samples)
    tally = Tally()
    tally.arrays(scored, [c.logprobs for c in base.completions], "trainer")
    yield row("trainer, packed", tally, compare_digests(tally, digests, base.digests, subset=False))


def run_ladder(kind: str, config: ModelConfig, ops: CudaOps) -> list[dict[str, Any]]:
    subject = subject_with(lambda trainable: model_of(config, ops, kind, trainable), "bfloat16", 0, lr=1e-3)
    rows = []

    def on_rung(result: ladder.RungResult) -> None:
        rows.append({"weights": kind, **result.as_dict()})
        print(
            f"{kind} {result.name:24} {result.status} {result.compared:>12,} {result.mismatched} {result.detail[:90]}"
        )
        gc.collect()  # trainers of the rung before, tens of gigabytes each
        torch.cuda.empty_cache()

    ladder.check([subject], None, on_rung)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6B")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--requests", type=int, default=480)
    parser.add_argument("--new-tokens", type=int, nargs="+", default=list(NEW_TOKENS))
    parser.add_argument("--part", choices=("requests", "ladder"), help="only this one")
    parser.add_argument("--make-model", type=Path, help="only write a config.json of the shape into this folder")
    parser.add_argument(
        "--combine", nargs="+", type=Path, metavar="FILE", help="only write their sums: parity-h200.json"
    )
    arguments = parser.parse_args()
    if arguments.combine:
        combine(arguments.combine)
        return
    if arguments.make_model:
        make_model_folder(arguments.make_model, arguments.shape)
        return
    config = config_of(arguments.shape)
    certified = make_ops("cuda", get_contract("exact-v1"), True, "bfloat16", config)
    assert isinstance(certified, CudaOps)
    requests = requests_of(config, arguments.requests, arguments.new_tokens)
    noted = Digests(requests, certified.device)
    ops = Recording(**{f.name: getattr(certified, f.name) for f in fields(CudaOps)}, digests=noted)
    rows: list[dict[str, Any]] = []
    rungs: list[dict[str, Any]] = []
    name = "-".join(["parity", arguments.shape, *arguments.kinds, *([arguments.part] if arguments.part else [])])
    for kind in arguments.kinds:
        for row in measure(kind, config, ops, requests) if arguments.part != "ladder" else ():
            rows.append(row)
            print({k: v for k, v in row.items() if v}, flush=True)
            save(name, rows, rungs)
        gc.collect()
        torch.cuda.empty_cache()
        if arguments.part != "requests":
            rungs += run_ladder(kind, config, certified)
            save(name, rows, rungs)


def combine(files: Sequence[Path]) -> None:
    """One row for each file: what it compared, and the revision and date of its run."""
    contents = [(f.name, json.loads(f.read_text())) for f in files]
    rows = [
        {"file": name, "date": c["date"], "git_revision": c["git_revision"], **c["summary"]} for name, c in contents
    ]
    rungs = [r["rungs"] for r in rows]
    summary = {
        "compared_tokens": sum(r["compared_tokens"] for r in rows),
        "compared_digests": sum(r["compared_digests"] for r in rows),
        "mismatched_tokens": sum(r["mismatched"] for r in rows), "problems": sum(r["problems"] for r in rows),
        "rungs": {s: sum(r[s] for r in rungs) for s in ("pass", "fail", "skip")},
        "rung_values": sum(r["rung_values"] for r in rows),
    }  # fmt: skip
    path = write_result("parity", rows, summary, "h200")
    there = {
        key: contents[0][1][key] for key in ("machine", "versions")
    }  # where the first ran, not where they are added
    path.write_text(json.dumps({**json.loads(path.read_text()), **there}, indent=1) + "\n")
    print(path, summary)


def save(name: str, rows: list[dict[str, Any]], rungs: list[dict[str, Any]]) -> None:
    summary = {
        "compared_tokens": sum(r["tokens"] for r in rows), "compared_digests": sum(r["digests"] for r in rows),
        "mismatched": sum(r["mismatched"] for r in rows), "problems": sum(len(r["problems"]) for r in rows),
        "rungs": {s: sum(r["status"] == s for r in rungs) for s in ("pass", "fail", "skip")},
        "rung_values": sum(r["compared"] for r in rungs),
    }  # fmt: skip
    path = write_result(name, rows + rungs, summary, "h200")
    print(path, summary, flush=True)


if __name__ == "__main__":
    main()
