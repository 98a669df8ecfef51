"""GSPO: one importance ratio per response."""

from __future__ import annotations

import torch

from exactrl.algo.losses import counted_only, policy_loss, require_finite


def gspo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    token_weights: torch.Tensor,
    sequence_ids: torch.Tensor,
    num_sequences: int,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean over the response of logprob - old logprob).

    Source: GSPO, arXiv:2507.18071, eq. 5 and 7; its bounds are 3e-4 and 4e-4, since a mean of log-ratios moves little.
    Tensors [N] as in policy_loss; sequence_ids int64 [N] in 0 .. num_sequences - 1, whole responses only. With the
    weights of "sequence-mean" the weights of a response add up to 1 / number of responses: eq. 5. The gradient goes
    through s, so every token of a response gets the same one, and a clipped response has none.

    Metrics and errors as policy_loss: a clipped response counts with all its tokens, "log_ratio_abs" is of log s.
    Tokens of weight 0 are left out of the mean; a response without any token has no ratio and adds nothing.
    """
    counted, (logprobs, old_logprobs, advantages) = counted_only(token_weights, logprobs, old_logprobs, advantages)
    require_finite(logprobs, old_logprobs, advantages, advantages)  # names the token, which the mean would hide
    sums = torch.zeros(num_sequences, dtype=torch.float64, device=logprobs.device)
    lengths = sums.index_add(0, sequence_ids, counted.double()).clamp(min=1)
    means = sums.index_add(0, sequence_ids, (logprobs - old_logprobs).double()) / lengths
    log_ratio = means.to(logprobs.dtype).index_select(0, sequence_ids)  # its backward adds in one fixed order
    return policy_loss(log_ratio, torch.zeros_like(old_logprobs), advantages, token_weights, clip_low, clip_high)
