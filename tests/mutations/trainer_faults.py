"""Faults of the trainer: micro-batches, what is compared and when, and weights after an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from exactrl.rl import loop
from exactrl.train import trainer as trainer_module
from exactrl.train.packing import MicroBatch
from exactrl.train.trainer import Trainer
from exactrl.types import Sample
from tests.mutations.fault import Apply, Fault, Hits, replacing
from tests.mutations.scenarios import (
    ORACLE_MIXED,
    ORACLE_NOTHING,
    ORACLE_OWN,
    ORACLE_RESCORE,
    ORACLE_TRAIN,
    ORACLE_TWICE,
    ORACLE_VERSION,
    SYNC,
    Setup,
    ops_rung,
    rung,
)

AUDIT = Setup(audit=True)
TWO_MINIBATCHES = Setup(minibatches=2)


def micro_batches(change: Callable[[MicroBatch], MicroBatch]) -> Apply:
    def make(original: Callable, hits: Hits) -> Callable:
        def build(samples, *rest) -> MicroBatch:
            before = original(samples, *rest)
            after = change(before)
            if after is not before:
                hits()
            return after

        return build

    return replacing(MicroBatch, "build", make)


def anothers_page(batch: MicroBatch) -> MicroBatch:
    """The second sample of a micro-batch reads the first one's first page."""
    if len(batch.lengths) < 2:
        return batch
    tables = batch.rows.tables.clone()
    tables[1, 0] = tables[0, 0]
    return replace(batch, rows=replace(batch.rows, tables=tables))


def neighbours_temperature(batch: MicroBatch) -> MicroBatch:
    return replace(batch, temperatures=batch.temperatures.roll(1))


def padding_row(batch: MicroBatch) -> MicroBatch:
    """Every token is scored by the row after the right one; the last one by a row of no one's."""
    return replace(batch, predict=(batch.predict + 1).clamp(max=len(batch.ids) - 1))


def last_left_out(original: Callable, hits: Hits) -> Callable:
    """The last sample of a pack is never trained on."""

    def pack(samples, budget):
        batches = original(samples, budget)
        if len(batches[-1]) > 1 and torch.is_grad_enabled():
            hits()
            batches[-1] = batches[-1][:-1]
        return batches

    return pack


def steps(change: Callable[[Trainer, Sequence[Sample], bool, Callable, Callable], dict]) -> Apply:
    """Trainer.step becomes change(trainer, samples, audit, observe, original)."""

    def make(original: Callable, hits: Hits) -> Callable:
        def step(self: Trainer, samples, *, audit, observe):
            hits()
            return change(self, samples, audit, observe, original)

        return step

    return replacing(Trainer, "step", make)


def observing(change: Callable[[str, Sequence[Sample], Sequence], Sequence]) -> Apply:
    """What the oracle is shown becomes change(kind, samples, logprobs)."""

    def step(self, samples, audit, observe, original):
        def see(kind, version, chosen, logprobs):
            observe(kind, version, chosen, change(kind, chosen, logprobs))

        return original(self, samples, audit=audit, observe=see)

    return steps(step)


def only_with_advantage(self, samples, audit, observe, original):
    return original(self, [s for s in samples if s.advantage], audit=audit, observe=observe)


def audit_after_update(self, samples, audit, observe, original):
    result = original(self, samples, audit=False, observe=lambda *seen: None)
    observe("rescore", samples[0].weight_version, samples, self.score(samples))
    return result


def update_first(original: Callable, hits: Hits) -> Callable:
    """The optimizer steps before the forward that is compared."""

    def accumulate(self: Trainer, part, samples, old, observe, sums):
        original(self, part, samples, old, lambda *seen: None, {})
        self.optimizer.step()
        trainer_module.refresh(self.model)
        hits()
        original(self, part, samples, old, observe, sums)

    return accumulate


def later_minibatch_as_if_first(original: Callable, hits: Hits) -> Callable:
    """A minibatch after the first update is compared as if its weights were the rollout's."""

    def accumulate(self: Trainer, part, samples, old, observe, sums):
        version = self.version
        if samples[0].weight_version != version:
            hits()
        self.version = samples[0].weight_version
        try:
            original(self, part, samples, old, observe, sums)
        finally:
            self.version = version

    return accumulate


def scores_rolled(original: Callable, hits: Hits) -> Callable:
    """The audit gives each sample the scores of another minibatch's."""

    def score(self: Trainer, samples):
        hits()
        scores = original(self, samples)
        half = len(scores) // 2
        return scores[half:] + scores[:half]

    return score


def no_refresh(original: Callable, hits: Hits) -> Callable:
    return lambda model: hits()


def one_not_refreshed(original: Callable, hits: Hits) -> Callable:
    """One weight's compute copy stays that of the step before."""

    def refresh(model):
        weight = model.layers[1].down
        old = weight.value().clone()
        original(model)
        hits()
        weight._set(old)

    return refresh


def earlier_samples(relabel: bool = False, groups: slice = slice(None)) -> Apply:
    """From the second step on, (some) groups of the step before come again."""

    def make(original: Callable, hits: Hits) -> Callable:
        kept: list = []

        def collect(settings, step, cursor, engine, task, progress):
            fresh = original(settings, step, cursor, engine, task, progress)
            kept.append(list(fresh.groups))
            if step > 1:
                hits()
                fresh.groups[groups] = kept[-2][groups]
                for s in fresh.samples:
                    s.weight_version = engine.weight_version if relabel else s.weight_version
            return fresh

        return collect

    return replacing(loop, "collect", make)


def first_one_twice(original: Callable, hits: Hits) -> Callable:
    """The first group's first sample takes the place of its second."""

    def collect(*args):
        found = original(*args)
        hits()
        found.groups[0].samples[1] = found.groups[0].samples[0]
        return found

    return collect


def random_gradient(original: Callable, hits: Hits) -> Callable:
    """An unseeded perturbation, as from atomics in a backward."""
    generator = torch.Generator()
    generator.seed()

    def clip(parameters, limit):
        hits()
        for p in parameters:
            if p.grad is not None:
                p.grad.mul_(1 + 1e-6 * torch.randn(p.grad.shape, generator=generator))
        return original(parameters, limit)

    return clip


BF16 = Setup("bfloat16")
FAULTS = [
    Fault("position/trainer", "positions are one too large",
          micro_batches(lambda b: replace(b, positions=b.positions + 1)), ops_rung("positions")),
    Fault("position/not-restarting", "positions run on from one packed sample to the next",
          micro_batches(lambda b: replace(b, positions=torch.arange(len(b.ids)))), ops_rung("positions")),
    Fault("temperature/twice-trainer", "the trainer divides logits by the temperature twice",
          micro_batches(lambda b: replace(b, temperatures=b.temperatures**2)), ORACLE_TRAIN),
    Fault("temperature/never-trainer", "the trainer ignores the temperature",
          micro_batches(lambda b: replace(b, temperatures=torch.ones_like(b.temperatures))), ORACLE_TRAIN),
    Fault("row_temperature/trainer", "each row is scored at its neighbour's temperature",
          micro_batches(neighbours_temperature), ops_rung("logprob")),
    Fault("packing/anothers-page", "a packed sample attends to another one", micro_batches(anothers_page),
          rung("microbatch_split")),
    Fault("packing/padding-row", "tokens are scored by the row after theirs", micro_batches(padding_row),
          ORACLE_TRAIN),
    Fault("packing/targets-shifted", "the logprob of another token is taken",
          micro_batches(lambda b: replace(b, targets=b.targets.roll(1))), ORACLE_TRAIN),
    Fault("count/zero-advantage", "samples that teach nothing are left out", steps(only_with_advantage),
          rung("after_update", "some tokens were not compared")),
    Fault("count/last-of-pack", "the last sample of a micro-batch is left out",
          replacing(trainer_module, "pack", last_left_out),
          rung("gradient_vs_scoring", "the gradient forward of some samples was not seen")),
    Fault("itself/own-array", "the trainer hands back the rollout's arrays",
          observing(lambda kind, samples, logprobs: [s.logprobs for s in samples]), ORACLE_OWN),
    Fault("itself/copy", "the trainer hands back copies of the rollout's logprobs",
          observing(lambda kind, samples, logprobs: [s.logprobs.copy() for s in samples]),
          rung("oracle", "one logprob was one ulp off, but train/logprob_mismatch_tokens is 0")),
    Fault("itself/copy-audit", "only the audit hands back copies",
          observing(lambda kind, s, logprobs: [x.logprobs.copy() for x in s] if kind == "rescore" else logprobs),
          rung("oracle", "one logprob was one ulp off, but train/rescore_mismatch_tokens is 0")),
    Fault("order/update-first", "the optimizer steps before the comparison",
          replacing(Trainer, "_accumulate", update_first), ORACLE_TRAIN),
    Fault("order/later-minibatch", "a minibatch is compared after an update",
          replacing(Trainer, "_accumulate", later_minibatch_as_if_first), ORACLE_TRAIN, TWO_MINIBATCHES),
    Fault("order/audit-after-update", "the audit scores with the updated weights", steps(audit_after_update),
          ORACLE_RESCORE, AUDIT),
    Fault("audit/wrong-minibatch", "the audit scores the wrong minibatch", replacing(Trainer, "score", scores_rolled),
          ORACLE_RESCORE, Setup(minibatches=2, audit=True)),
    Fault("refresh/none", "compute weights are not refreshed after the update",
          replacing(trainer_module, "refresh", no_refresh),
          rung("after_update", "the compute weights are not those of the masters"), BF16),
    Fault("refresh/none-float32", "kernels read panels from before the update",
          replacing(trainer_module, "refresh", no_refresh), SYNC),
    Fault("refresh/all-but-one", "one weight is not refreshed after the update",
          replacing(trainer_module, "refresh", one_not_refreshed),
          rung("after_update", "the compute weights are not those of the masters"), BF16),
    Fault("old_samples/all", "samples of an older weight version are trained on", earlier_samples(), ORACLE_NOTHING),
    Fault("old_samples/audited", "samples of an older weight version are re-scored", earlier_samples(), ORACLE_VERSION,
          AUDIT),
    Fault("old_samples/one-group", "one group is of an older weight version", earlier_samples(groups=slice(1, 2)),
          ORACLE_MIXED),
    Fault("old_samples/relabelled", "samples of an older weight version under the current number",
          earlier_samples(relabel=True), ORACLE_TRAIN),
    Fault("twice/sample", "one sample stands for two", replacing(loop, "collect", first_one_twice),
          ORACLE_TWICE),
    Fault("determinism/random-gradient", "gradients differ from run to run in the last bits",
          replacing(trainer_module, "clip_gradients", random_gradient),
          rung("trajectory_twice", "(second time|sample .* other tokens|the weights differ)")),
]  # fmt: skip
