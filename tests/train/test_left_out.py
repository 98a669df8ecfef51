"""Samples that are not in the loss, and the KL to a reference policy: exact values, gradients, and what is compared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from exactrl.algo.algorithm import get_algorithm
from exactrl.errors import UsageError
from exactrl.train.trainer import Trainer
from tests.model.test_qwen3 import build, config
from tests.train.helpers import (
    Recorder,
    captured_gradients,
    make_engine,
    make_trainer,
    one_torch_thread,  # noqa: F401
    recorded,
    roll_out,
    unobserved,
    workload,
)


@pytest.fixture(scope="module")
def samples():
    return roll_out(make_engine(), workload())


def gradients(samples, **settings):
    trainer = make_trainer(max_tokens_per_microbatch=200, **settings)
    found = captured_gradients(trainer)
    metrics = trainer.step(samples, audit=False, observe=unobserved)
    return found, metrics, trainer


def without(samples, left_out):
    return [replace(s, in_loss=i not in left_out) for i, s in enumerate(samples)]


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "constant-length"])
def test_the_gradient_is_that_of_the_others_alone(samples, aggregation):
    """Same values up to rounding (micro-batches differ), loss and entropy of the kept tokens only."""
    settings = {"loss_aggregation": aggregation, "max_new_tokens": 30}
    out = {1, 2, 7, 12}
    (a,), mine, _ = gradients(without(samples, out), **settings)
    (b,), theirs, _ = gradients([s for i, s in enumerate(samples) if i not in out], **settings)
    for name, g in a.items():
        torch.testing.assert_close(g, b[name], rtol=1e-4, atol=1e-7)
    assert mine == pytest.approx(theirs, rel=1e-5)


def test_left_out_tokens_are_compared(samples):
    recorder = Recorder()
    make_trainer().step(without(samples, {0, 3, 5}), audit=True, observe=recorder)
    assert recorder.seen["train"] == recorder.seen["rescore"] == recorded(samples)


def test_D_05_a_minibatch_with_nothing_in_the_loss_makes_no_update(samples):
    """Neither momentum nor weight decay act; the other half is updated."""
    trainer = make_trainer(weight_decay=0.5)
    trainer.step(samples, audit=False, observe=unobserved)  # momentum to be kept from acting
    before, recorder = trainer.master_digest(), Recorder()
    now = [replace(s, in_loss=False, weight_version=trainer.version) for s in samples]
    metrics = trainer.step(now, audit=False, observe=recorder)
    assert trainer.master_digest() == before
    assert metrics == {"train/lr": trainer.lr}
    assert len(recorder.seen["train"]) == len(samples)
    found, metrics, trainer = gradients(without(samples, range(8)), minibatches=2)
    assert len(found) == 1
    assert trainer.version == 2
    assert metrics["train/grad_norm"] > 0


def scored(samples, reference):
    trainer = make_trainer(reference=reference)
    return [
        replace(s, reference_logprobs=x, advantage=0.0)
        for s, x in zip(samples, trainer.score_reference(samples), strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_reference_scores_with_the_rollouts_bits(dtype):
    """Same weights, another model object, any micro-batch: the very bits that decoding recorded."""
    samples = roll_out(make_engine(dtype, kv_tokens=160), workload())
    reference = build(config(), dtype=dtype, trainable=False)
    for budget in (64, 8192):
        trainer = make_trainer(dtype, reference=reference, max_tokens_per_microbatch=budget)
        found = trainer.score_reference(samples)
        assert [x.tobytes() for x in found] == [s.logprobs.tobytes() for s in samples]
    trainer.step(samples, audit=False, observe=unobserved)
    assert [x.tobytes() for x in trainer.score_reference(samples)] == [x.tobytes() for x in found]  # frozen
    assert any(x.tobytes() != y.tobytes() for x, y in zip(trainer.score(samples), found, strict=True))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_loss_has_the_gradient_of_kl(samples, estimator):
    """Advantages are 0, so the loss is coef * mean KL; its gradient is that of sum w * d * logprob with d held fixed,
    whatever estimates the value."""
    reference = build(config(), dtype=torch.float32, trainable=False, seed=5)
    ours = scored(samples, reference)
    (got,), metrics, _ = gradients(ours, kl_coef=0.3, kl_estimator=estimator)
    d = np.concatenate([s.logprobs.astype(np.float64) - s.reference_logprobs for s in ours])
    value = {"k1": d, "k2": d**2 / 2, "k3": np.expm1(-d) + d}[estimator].mean()
    assert metrics["train/loss"] == pytest.approx(0.3 * value, rel=1e-5)
    # The same gradient by another road: d as an advantage of each token (policy gradient has -A * grad logprob).
    as_advantage = [
        replace(s, token_advantages=(-0.3 * (s.logprobs - s.reference_logprobs)).astype(np.float32)) for s in ours
    ]
    (expected,), _, _ = gradients(as_advantage)
    for name, g in got.items():
        torch.testing.assert_close(g, expected[name], rtol=1e-4, atol=1e-7)
    assert max(float(g.abs().max()) for g in got.values()) > 1e-3


def test_kl_of_left_out_tokens_is_left_out(samples):
    ours = scored(samples, build(config(), dtype=torch.float32, trainable=False, seed=5))
    out = {0, 4, 9}
    _, mine, _ = gradients(without(ours, out), kl_coef=1.0)
    _, theirs, _ = gradients([s for i, s in enumerate(ours) if i not in out], kl_coef=1.0)
    assert mine["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-6)


def test_a_missing_reference_is_named(samples):
    with pytest.raises(UsageError, match="no reference policy"):
        make_trainer().score_reference(samples)
    with pytest.raises(UsageError, match="0#0 has no reference logprobs"):
        gradients(samples, kl_coef=0.1)


def test_token_advantages_take_the_place_of_the_responses(samples):
    one = [replace(s, token_advantages=np.full(len(s.token_ids), s.advantage, np.float32)) for s in samples]
    other = [replace(s, advantage=99.0) for s in one]
    (a,), _, _ = gradients(samples)
    for variant in (one, other):
        (b,), _, _ = gradients(variant)
        assert all(torch.equal(g, b[name]) for name, g in a.items())


def test_algorithm_without_a_reference_never_scores_one(samples):
    trainer = Trainer(build(config(), dtype=torch.float32, trainable=True), get_algorithm("grpo"), lr=0.0)
    assert trainer.reference is None
    trainer.step(samples, audit=False, observe=unobserved)
