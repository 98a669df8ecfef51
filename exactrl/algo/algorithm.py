"""An RL algorithm is two functions: advantages from rewards, loss from logprobs. A new one is a line in ALGORITHMS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from exactrl.algo.advantages import grpo_step_advantages
from exactrl.algo.losses import policy_loss
from exactrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Response tokens of one micro-batch: N tokens of S whole sequences, flat, sequence after sequence.

    logprobs       float [N], current policy, with gradient
    old_logprobs   float [N], recorded while decoding
    advantages     float [N], a sequence's advantage at each of its tokens
    token_weights  float [N], slices of losses.token_weights of the whole minibatch; 0 leaves a token out
    sequence_ids   int64 [N], 0 .. S - 1 in this micro-batch, for losses with one ratio per sequence
    num_sequences  S, empty responses included (they have no token)
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    token_weights: torch.Tensor
    sequence_ids: torch.Tensor
    num_sequences: int


# All groups of a step (an algorithm may normalise across them) -> float64 [samples] for each group, in order.
Advantages = Callable[[Sequence[ArrayLike]], list[NDArray[np.float64]]]
# (batch, clip_low, clip_high) -> weighted sum with gradient, and sums for metrics; both add up over micro-batches.
Loss = Callable[[TokenBatch, float, float], tuple[torch.Tensor, dict[str, torch.Tensor]]]


@dataclass(frozen=True, slots=True)
class Algorithm:
    name: str
    advantages: Advantages
    loss: Loss


def ppo_loss(batch: TokenBatch, clip_low: float, clip_high: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """losses.policy_loss: one ratio per token, sequence boundaries play no part."""
    return policy_loss(batch.logprobs, batch.old_logprobs, batch.advantages, batch.token_weights, clip_low, clip_high)


# GRPO: DeepSeekMath, arXiv:2402.03300.
ALGORITHMS = {"grpo": Algorithm("grpo", grpo_step_advantages, ppo_loss)}


def get_algorithm(name: str) -> Algorithm:
    """Raises ConfigError for an unknown name, with the nearest known one."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    near = get_close_matches(name.lower(), ALGORITHMS, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known algorithms: {', '.join(ALGORITHMS)}"
    raise ConfigError(f"train.algorithm {name!r} is unknown; {hint}")
