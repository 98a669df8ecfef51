"""Supervised fine-tuning as an algorithm of the trainer: the likelihood of given responses, no rewards.

It is not in algorithm.ALGORITHMS: a recipe of `exactrl train` cannot choose it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from exactrl.algo.algorithm import Algorithm, TokenBatch
from exactrl.algo.losses import counted_only, weighted_sum
from exactrl.errors import NonFiniteError


def sft_loss(batch: TokenBatch, clip_low: float, clip_high: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-sum_i token_weights_i * logprobs_i (float64 scalar, nats) and "num_tokens"; nothing is clipped.

    Sums over micro-batches add up, as those of losses.policy_loss do. Tokens of weight 0 count nowhere. Raises
    NonFiniteError for a NaN or infinite logprob of any other token.
    """
    counted, (logprobs,) = counted_only(batch.token_weights, batch.logprobs)
    if not (finite := logprobs.isfinite()).all():
        i = int(torch.nonzero(~finite)[0])
        raise NonFiniteError(f"response token {i} of the micro-batch has logprob {float(logprobs.detach()[i])}")
    return weighted_sum(-logprobs, batch.token_weights), {"num_tokens": counted.sum(dtype=torch.float64)}


def _no_advantages(rewards: Sequence[ArrayLike]) -> list[NDArray[np.float64]]:
    raise AssertionError("supervised fine-tuning has no rewards to make advantages from")


SFT = Algorithm("sft", _no_advantages, sft_loss, needs_old_logprobs=False)
