"""CISPO: the importance ratio is a clipped constant, so no token loses its gradient."""

from __future__ import annotations

import torch

from exactrl.algo.losses import counted_only, metric_sums, require_finite, weighted_sum


def cispo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    token_weights: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logprob, summed with token_weights; tensors [N].

    Source: CISPO, MiniMax-M1, arXiv:2506.13585, eq. 4 and 5. The paper sets no lower bound: clip_low = 1.
    Metrics as policy_loss; "clipped" are the tokens whose weight was clipped, whatever the sign of A: their gradient is
    bounded, not zero. Raises NonFiniteError for a NaN or infinite logprob or advantage; a ratio that overflows is
    clipped like any other. Tokens of weight 0 count nowhere.
    """
    counted, (logprobs, old_logprobs, advantages) = counted_only(token_weights, logprobs, old_logprobs, advantages)
    log_ratio = logprobs.detach() - old_logprobs
    ratio = log_ratio.exp()
    loss = -(ratio.clamp(1 - clip_low, 1 + clip_high) * advantages * logprobs)
    require_finite(logprobs, old_logprobs, advantages, loss)
    sums = metric_sums(counted, ratio, log_ratio, ratio < 1 - clip_low, ratio > 1 + clip_high)
    return weighted_sum(loss, token_weights), sums
