"""Sampling on a GPU: full fp32 logits -> one token per row and its log-probability. No state, no wait for the device.

Definition on `sm90`: x, M, ln S and the logprob as in head.py. The token is the lowest index of the largest
rn(x + noise), noise = -ln(-ln u), u from Philox as in triton_noise.py: the CPU's u, bit for bit, but the device's own
ln. Temperature 0 is greedy: the lowest index of the largest logit, its logprob at temperature 1. NaN and -inf never
win; a row without any logit above -inf has token -1 and logprob NaN.
"""

from __future__ import annotations

import torch


def sample_exact(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    *,
    digest: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(tokens int64 [R], logprobs fp32 [R], digests int64 [R] of the rows' whole log-probabilities when asked for).

    logits fp32 [R, V]; temperatures fp32 [R] >= 0; keys int64 [R] (`transfer.key_bits`); positions int64 [R]: the
    position that the sampled token will have.
    """
    from exactrl.ops.cuda.triton_logprob import blocks, logprob_digests, merge

    assert keys.dtype == positions.dtype == torch.int64, (keys.dtype, positions.dtype)
    assert keys.shape == positions.shape == logits.shape[:1], (keys.shape, positions.shape, logits.shape)
    tokens = torch.empty_like(positions, memory_format=torch.contiguous_format)
    if len(logits) == 0:
        return tokens, torch.empty_like(temperatures), torch.empty_like(tokens) if digest else None
    temperatures = temperatures.contiguous()
    parts = blocks(logits, temperatures, noise=(keys.contiguous(), positions.contiguous()))
    logprobs, lse, _ = merge(parts, logits, temperatures, tokens)
    if not digest:
        return tokens, logprobs, None
    return tokens, logprobs, logprob_digests(logits, torch.where(temperatures == 0, 1.0, temperatures), lse)
