"""The supervised loss: value and gradient against a definition in plain Python, left-out tokens, broken ones."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from exactrl.algo.algorithm import ALGORITHMS, TokenBatch, get_algorithm
from exactrl.algo.losses import token_weights
from exactrl.algo.sft import SFT, sft_loss
from exactrl.errors import ConfigError, NonFiniteError

LENGTHS = (3, 1, 5)


def batch(logprobs: np.ndarray, weights: np.ndarray) -> TokenBatch:
    return TokenBatch(
        logprobs=torch.tensor(logprobs, requires_grad=True),
        old_logprobs=torch.zeros(0),
        advantages=torch.zeros(len(logprobs)),
        token_weights=torch.from_numpy(weights),
        sequence_ids=torch.from_numpy(np.repeat(np.arange(len(LENGTHS)), LENGTHS)),
        num_sequences=len(LENGTHS),
    )


def definition(rows: list[list[float]], aggregation: str) -> float:
    if aggregation == "token-mean":
        return -sum(map(sum, rows)) / sum(map(len, rows))
    return -sum(sum(row) / len(row) for row in rows) / len(rows)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
def test_loss_and_gradient_are_those_of_the_definition(aggregation):
    """The gradient is compared with central differences of the definition at every token."""
    flat = np.random.default_rng(0).uniform(-4, 0, sum(LENGTHS))
    at = np.cumsum(LENGTHS)[:-1]

    def reference(x: np.ndarray) -> float:
        return definition([row.tolist() for row in np.split(x, at)], aggregation)

    b = batch(flat, np.concatenate(token_weights(LENGTHS, aggregation)).astype(np.float64))
    loss, metrics = sft_loss(b, 0.2, 0.28)
    loss.backward()
    assert abs(float(loss.detach()) - reference(flat)) < 1e-7  # the weights are float32
    for i in range(len(flat)):
        moved = [flat.copy(), flat.copy()]
        moved[0][i] += 1e-3
        moved[1][i] -= 1e-3
        assert abs(float(b.logprobs.grad[i]) - (reference(moved[0]) - reference(moved[1])) / 2e-3) < 1e-7
    assert {k: float(v) for k, v in metrics.items()} == {"num_tokens": 9.0}


def test_tokens_of_weight_0_count_nowhere_and_may_hold_anything():
    logprobs, weights = np.array([-1.0, math.nan, -math.inf, -3.0]), np.array([0.5, 0.0, 0.0, 0.25])
    b = batch(logprobs, weights)
    loss, metrics = sft_loss(b, 0.0, 0.0)
    loss.backward()
    assert float(loss.detach()) == 0.5 * 1 + 0.25 * 3
    assert b.logprobs.grad.tolist() == [-0.5, 0.0, 0.0, -0.25]
    assert float(metrics["num_tokens"]) == 2


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_broken_logprob_is_named(value):
    b = batch(np.array([-1.0, -2.0, value]), np.full(3, 1 / 3))
    with pytest.raises(NonFiniteError, match=f"response token 2 .*{value}"):
        sft_loss(b, 0.2, 0.28)


def test_sums_over_micro_batches_add_up():
    flat, weights = -np.arange(1.0, 10.0), np.concatenate(token_weights(LENGTHS, "sequence-mean"))
    whole = float(sft_loss(batch(flat, weights), 0, 0)[0].detach())
    parts = [float(sft_loss(batch(flat[s], weights[s]), 0, 0)[0].detach()) for s in (slice(0, 4), slice(4, 9))]
    assert sum(parts) == pytest.approx(whole, rel=1e-12)


def test_a_recipe_of_train_cannot_choose_it():
    assert "sft" not in ALGORITHMS
    with pytest.raises(ConfigError, match="unknown"):
        get_algorithm("sft")
    assert not SFT.needs_old_logprobs
    assert all(a.needs_old_logprobs for a in ALGORITHMS.values())
    with pytest.raises(AssertionError, match="no rewards"):
        replace(SFT, name="x").advantages([[1.0]])
