"""The seam: GRPO through it, a sequence-level loss fits it, unknown names are explained."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from exactrl.algo.algorithm import ALGORITHMS, Algorithm, TokenBatch, get_algorithm
from exactrl.algo.losses import policy_loss
from exactrl.config.algorithms import ALGORITHM_RULES, AlgorithmName
from exactrl.errors import ConfigError


def test_unknown_name_gets_the_nearest_match():
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        get_algorithm("GRP0")
    with pytest.raises(ConfigError, match="known algorithms: grpo"):
        get_algorithm("sarsa")
    assert all(get_algorithm(name).name == name for name in ALGORITHMS)


def test_recipes_know_the_same_names():
    assert list(ALGORITHMS) == list(ALGORITHM_RULES) == list(get_args(AlgorithmName))


@pytest.mark.parametrize("name", ["gspo", "cispo"])
def test_dual_clip_is_refused_where_the_loss_has_none(name):
    with pytest.raises(ConfigError, match=f"no sense with {name}"):
        get_algorithm(name, 3.0)


def batch():
    old = torch.tensor([-1.0, -2.0, -3.0])
    new = (old + torch.tensor([0.1, 0.3, -0.5])).requires_grad_()
    return TokenBatch(new, old, torch.tensor([1.0, 1.0, -1.0]), torch.full((3,), 1 / 3), torch.tensor([0, 0, 1]), 2)


def test_grpo():
    b, grpo = batch(), get_algorithm("grpo")
    loss, metrics = grpo.loss(b, 0.2, 0.28)
    expected, _ = policy_loss(b.logprobs, b.old_logprobs, b.advantages, b.token_weights, 0.2, 0.28)
    assert loss == expected
    assert (metrics["clipped_low"], metrics["clipped_high"]) == (1, 1)
    assert [a.tolist() for a in grpo.advantages([[2.0, 2.0]])] == [[0.0, 0.0]]


def test_a_ratio_per_sequence_fits_the_seam():
    def sequence_loss(b, clip_low, clip_high):
        sums = torch.zeros(b.num_sequences).index_add(0, b.sequence_ids, b.logprobs - b.old_logprobs)
        mean = sums / torch.bincount(b.sequence_ids, minlength=b.num_sequences)
        log_ratio = mean[b.sequence_ids]
        return policy_loss(log_ratio, torch.zeros(3), b.advantages, b.token_weights, clip_low, clip_high)

    b = batch()
    loss, metrics = Algorithm("sequence", get_algorithm("grpo").advantages, sequence_loss).loss(b, 0.2, 0.28)
    loss.backward()
    assert torch.allclose(loss.float(), -(2 * torch.tensor(0.2).exp() - 0.8) / 3)
    assert b.logprobs.grad[2] == 0
    assert metrics["clipped"] == 1
