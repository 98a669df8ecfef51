"""Rungs of the trainer, and of trainer and engine together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from exactrl.model.weights import named_masters
from exactrl.parity.compare import Tally
from exactrl.parity.op_trace import compare, trace_engine, trace_gradient_forward, trace_scoring
from exactrl.parity.oracle import Oracle
from exactrl.parity.subject import Subject, to_samples
from exactrl.types import Sample

if TYPE_CHECKING:  # concrete classes arrive through the subject
    from exactrl.engine.engine import Engine
    from exactrl.train.trainer import Trainer


def microbatch_split(subject: Subject, tally: Tally) -> None:
    """Scored together, in small micro-batches, and one by one in reverse order."""
    whole = subject.make_trainer().score(subject.samples)
    for budget in (64, 200, 1):
        tally.arrays(subject.make_trainer(budget).score(subject.samples), whole, f"micro-batches of {budget} tokens")
    reverse = subject.make_trainer(100).score(subject.samples[::-1])[::-1]
    tally.arrays(reverse, whole, "reverse order")


def engine_vs_trainer_ops(subject: Subject, tally: Tally) -> None:
    """Every op of the real engine (chunked, decoding, several sequences at once) and of the real trainer, while scoring
    and in a training step's own forward. The first difference names op, layer, sample, position and element.

    Without prefix cache, so that the engine computes every row itself.
    """
    requests = subject.traced
    engine = subject.make_engine(max_concurrent=3, chunk_tokens=24, prefix_cache=False)
    ours, completions = trace_engine(engine, requests)
    samples = to_samples(requests, completions)
    for what, trace in (("scoring", trace_scoring), ("gradient forward", trace_gradient_forward)):
        found = compare(ours, trace(subject.make_trainer(120), requests, samples))
        tally.compared += found.compared
        if found.first and not tally.mismatched:
            tally.first = f"{found.first.describe(requests[found.first.sample].id)} (engine, {what})"
        tally.mismatched += found.mismatched
        for side, rows in (("engine", found.only_ours), (what, found.only_theirs)):
            for op, sample, position in rows[:1]:
                name = requests[sample].id if sample < len(requests) else f"number {sample}"
                tally.require(not rows, f"{op}, sample {name}, position {position}: computed by the {side} only")
    tally.notes.append(f"{len(ours.ops)} ops")


def engine_vs_trainer(subject: Subject, tally: Tally) -> None:
    """Logprobs recorded while decoding, and the trainer's of the same tokens."""
    recorded = [s.logprobs for s in subject.samples]
    tally.arrays(subject.make_trainer().score(subject.samples), recorded, "score")


def gradient_vs_scoring(subject: Subject, tally: Tally) -> None:
    """The gradient forward itself, captured in a training step, against the scoring forward."""
    for budget in (8192, 150):
        trainer = subject.make_trainer(budget)
        scored = {id(s): x for s, x in zip(subject.samples, trainer.score(subject.samples), strict=True)}
        seen: list[int] = []

        def observe(kind: str, version: int, samples: Sequence[Sample], values: Sequence[np.ndarray]) -> None:
            if kind == "train":
                tally.arrays(values, [scored[id(s)] for s in samples], f"micro-batches of {budget} tokens")  # noqa: B023
                seen.extend(id(s) for s in samples)  # noqa: B023

        trainer.step(subject.samples, audit=False, observe=observe)
        tally.require(len(seen) == len(subject.samples), "the gradient forward of some samples was not seen")


def _rl_step(subject: Subject, engine: Engine, trainer: Trainer, tally: Tally) -> list[Sample]:
    """Roll out, train with the oracle watching (not strict: it counts), hand the weights over."""
    engine.load_weights(trainer.named_weights(), trainer.version)
    completions = engine.generate(subject.requests)
    samples = to_samples(subject.requests, completions)
    oracle = Oracle(strict=False, bisect_command="")
    oracle.begin(samples)
    trainer.step(samples, audit=True, observe=oracle.observe)
    found = oracle.metrics()
    tally.compared += int(found["train/logprob_compared_tokens"])
    for name in ("train/logprob_mismatch_tokens", "train/rescore_mismatch_tokens"):
        if found[name] and not tally.mismatched:
            tally.first = f"{name} {found[name]} at weight version {trainer.version - 1}"
        tally.mismatched += int(found[name])
    counted = found["train/logprob_compared_tokens"] + found["train/logprob_uncompared_tokens"]
    sampled = sum(len(s.token_ids) for s in samples)
    tally.require(counted == sampled, f"the oracle accounts for {counted:g} of {sampled} sampled tokens")
    tally.require(found["train/logprob_uncompared_tokens"] == 0, "some tokens were not compared")
    return samples


def after_update(subject: Subject, tally: Tally) -> None:
    """Three updates large enough to change every logprob: rollout and trainer agree at each version."""
    engine, trainer = subject.make_loop()
    before = trainer.compute_digest()
    for _ in range(3):
        _rl_step(subject, engine, trainer, tally)
    from_masters = engine.load_weights(named_masters(trainer.model), trainer.version)
    tally.require(from_masters == trainer.compute_digest(), "the compute weights are not those of the masters")
    loaded = engine.load_weights(trainer.named_weights(), trainer.version)
    tally.require(loaded == trainer.compute_digest(), "engine and trainer hold different weights")
    tally.require(loaded != before, "the weights never changed")
    completions = engine.generate(subject.requests)
    samples = to_samples(subject.requests, completions)
    tally.arrays(trainer.score(samples), [s.logprobs for s in samples], "after three updates")


def trajectory_twice(subject: Subject, tally: Tally) -> None:
    """Two RL steps, twice from the start: the same tokens, logprobs and weights."""
    runs = []
    for _ in range(2):
        engine, trainer = subject.make_loop()
        samples = [s for _ in range(2) for s in _rl_step(subject, engine, trainer, Tally())]
        runs.append((samples, trainer.master_digest()))
        del engine, trainer  # before the next ones are built: large models fit once only
    (a, digest_a), (b, digest_b) = runs
    for x, y in zip(a, b, strict=True):
        if x.token_ids != y.token_ids:
            tally.problems.append(f"sample {x.name}: other tokens the second time")
            return
    tally.arrays([s.logprobs for s in a], [s.logprobs for s in b], "second time")
    tally.require(digest_a == digest_b, "the weights differ the second time")
