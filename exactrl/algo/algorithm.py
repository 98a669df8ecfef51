"""An RL algorithm is two functions: advantages from rewards, loss from logprobs. A new one is a line in _PARTS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from exactrl.algo.advantages import (
    dr_grpo_advantages,
    grpo_step_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    reinforce_pp_token_advantages,
    rloo_advantages,
)
from exactrl.algo.cispo import cispo_loss
from exactrl.algo.gspo import gspo_loss
from exactrl.algo.losses import policy_loss
from exactrl.config.algorithms import ALGORITHM_RULES, dual_clip_fits
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
# Rewards of all groups, penalties float64 [length] of each response -> advantages float64 [length] of each response.
TokenAdvantages = Callable[
    [Sequence[ArrayLike], Sequence[Sequence[NDArray[np.float64]]]], list[list[NDArray[np.float64]]]
]
# (batch, clip_low, clip_high) -> weighted sum with gradient, and sums for metrics; both add up over micro-batches.
Loss = Callable[[TokenBatch, float, float], tuple[torch.Tensor, dict[str, torch.Tensor]]]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """`min_group`: groups of fewer samples have no advantage. `token_advantages` takes penalties in the reward token by
    token; where it is None, their sum over a response is taken off its reward. `needs_old_logprobs`: whether the loss
    reads them; where not, samples need none and TokenBatch.old_logprobs is empty."""

    name: str
    advantages: Advantages
    loss: Loss
    min_group: int = 2
    token_advantages: TokenAdvantages | None = None
    needs_old_logprobs: bool = True


def ppo(
    batch: TokenBatch, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """losses.policy_loss: one ratio per token, sequence boundaries play no part."""
    b = batch
    return policy_loss(b.logprobs, b.old_logprobs, b.advantages, b.token_weights, clip_low, clip_high, dual_clip)


def gspo(batch: TokenBatch, clip_low: float, clip_high: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """gspo.gspo_loss: one ratio per sequence."""
    b = batch
    return gspo_loss(
        b.logprobs, b.old_logprobs, b.advantages, b.token_weights, b.sequence_ids, b.num_sequences, clip_low, clip_high
    )


def cispo(batch: TokenBatch, clip_low: float, clip_high: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """cispo.cispo_loss: clipped constant weights."""
    return cispo_loss(batch.logprobs, batch.old_logprobs, batch.advantages, batch.token_weights, clip_low, clip_high)


_PARTS: dict[str, tuple[Advantages, Loss]] = {
    "grpo": (grpo_step_advantages, ppo),  # DeepSeekMath, arXiv:2402.03300
    "dr_grpo": (dr_grpo_advantages, ppo),  # arXiv:2503.20783
    "rloo": (rloo_advantages, ppo),  # arXiv:2402.14740; the clip acts from the second minibatch of a step on
    "reinforce_pp": (reinforce_pp_advantages, ppo),  # arXiv:2501.03262
    "reinforce_pp_baseline": (reinforce_pp_baseline_advantages, ppo),
    "gspo": (grpo_step_advantages, gspo),  # arXiv:2507.18071
    "cispo": (grpo_step_advantages, cispo),  # arXiv:2506.13585
    # arXiv:2503.14476: mean over tokens, clip_high > clip_low; train.dynamic_sampling, overlong_cache, overlong_filter
    "dapo": (grpo_step_advantages, ppo),
}
_TOKEN_ADVANTAGES = {"reinforce_pp": reinforce_pp_token_advantages}
ALGORITHMS = {
    name: Algorithm(name, *parts, ALGORITHM_RULES[name].min_group, _TOKEN_ADVANTAGES.get(name))
    for name, parts in _PARTS.items()
}


def get_algorithm(name: str, dual_clip: float = 0.0) -> Algorithm:
    """The algorithm, its loss bounded by dual_clip where that is not 0.

    Raises ConfigError for an unknown name, with the nearest known one, and for a loss that has no dual clip.
    """
    if name not in ALGORITHMS:
        near = get_close_matches(name.lower(), ALGORITHMS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known algorithms: {', '.join(ALGORITHMS)}"
        raise ConfigError(f"train.algorithm {name!r} is unknown; {hint}")
    if dual_clip == 0:
        return ALGORITHMS[name]
    if problem := dual_clip_fits(name, dual_clip):
        raise ConfigError(problem)
    return replace(ALGORITHMS[name], loss=partial(ppo, dual_clip=dual_clip))
