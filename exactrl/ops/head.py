"""Language-model head: hidden states -> logprobs (trainer) or sampled tokens with their logprobs (engine).

Definition: logits = canonical linear with fp32 output; then ops/cpu/logprob.py. Both sides run the same kernel for
(max, sum), so the sampler's logprob and the loss's are one function.
"""

from __future__ import annotations

import numpy as np
import torch

from exactrl.contract import Contract
from exactrl.ops.cpu import jit
from exactrl.ops.cpu import logprob as kernels
from exactrl.ops.linear import grad_input, grad_weight, product
from exactrl.ops.weight import Weight, plain

CHUNK_BYTES = 64 << 20  # logits held at once; rows are independent, so the cut changes no bit


def logprobs_reference(hidden, w, targets, temperatures):
    """(logprob of the target, entropy), differentiable in the dtype of its arguments."""
    lp = torch.log_softmax(hidden @ w.T / temperatures[:, None], -1)
    return lp.gather(1, targets[:, None])[:, 0], -(lp.exp() * lp).sum(-1)


def logprobs_plain(hidden: torch.Tensor, weight: Weight, targets, temperatures):
    logits = torch.nn.functional.linear(hidden, plain(weight)).float() / temperatures[:, None]
    lp = torch.log_softmax(logits, -1)
    with torch.no_grad():
        entropy = -(lp.exp() * lp).sum(-1)
    return lp.gather(1, targets[:, None])[:, 0], entropy


def _check_temperatures(temperatures: torch.Tensor) -> None:
    """Any other dtype would compile another kernel, whose target logit is divided in fp64: other bits."""
    assert temperatures.dtype == torch.float32, f"temperatures must be float32, not {temperatures.dtype}"


def _chunk_rows(weight: Weight) -> int:
    return max(1, CHUNK_BYTES // (4 * weight.shape[0]))


class _Logprobs(torch.autograd.Function):
    """Logits are kept for the backward while all of them fit in one chunk, and made again (same bits) otherwise."""

    @staticmethod
    def forward(ctx, hidden, master, weight, targets, temperatures, contract):
        rows, vocab = hidden.shape[0], weight.shape[0]
        _check_temperatures(temperatures)
        if rows:  # kernels check no bounds
            low, high = targets.min().item(), targets.max().item()
            known = low >= 0 and high < vocab
            assert known, f"targets {low} to {high} in a vocabulary of {vocab}"
        logprobs, entropy, lse = torch.empty(rows), torch.empty(rows), torch.empty(rows, 2)
        size = _chunk_rows(weight)
        for a in range(0, rows, size):
            b = min(rows, a + size)
            logits = product(hidden[a:b], weight, torch.float32)
            arrays = [
                jit.flat(x) for x in (logits, targets[a:b], temperatures[a:b], logprobs[a:b], lse[a:b], entropy[a:b])
            ]
            args = (*arrays, vocab, contract.vocab_block)
            jit.run(kernels.logprob_range, kernels.logprob_parallel, b - a, (b - a) * vocab * 48.0, args)
        ctx.save_for_backward(hidden, targets, temperatures, lse, entropy)
        ctx.weight, ctx.logits = weight, logits if 0 < rows <= size else None
        return logprobs, entropy

    @staticmethod
    def backward(ctx, d_logprobs, d_entropy):
        hidden, targets, temperatures, lse, entropy = ctx.saved_tensors
        weight, (rows, vocab) = ctx.weight, (hidden.shape[0], ctx.weight.shape[0])
        d_logprobs, d_entropy = d_logprobs.contiguous(), d_entropy.contiguous()
        dh, dw = torch.empty_like(hidden), torch.zeros(weight.shape)
        size = _chunk_rows(weight)
        for a in range(0, rows, size):
            b = min(rows, a + size)
            logits = product(hidden[a:b], weight, torch.float32) if ctx.logits is None else ctx.logits
            d_logits = torch.empty_like(logits)
            parts = (targets, temperatures, lse, entropy, d_logprobs, d_entropy)
            args = (jit.flat(logits), *(jit.flat(x[a:b]) for x in parts), jit.flat(d_logits), vocab)
            jit.run(
                kernels.logprob_backward_range, kernels.logprob_backward_parallel, b - a, (b - a) * vocab * 24.0, args
            )
            dh[a:b] = grad_input(d_logits, weight.rows(), hidden.dtype)
            grad_weight(d_logits, hidden[a:b], into=dw)
        return dh, dw, None, None, None, None


def logprobs_exact(hidden: torch.Tensor, weight: Weight, targets, temperatures, contract: Contract):
    """hidden [R, K], targets int64 [R], temperatures float32 [R] > 0 -> (logprobs, entropy), float32 [R]."""
    if weight.master is not None and torch.is_grad_enabled():
        return _Logprobs.apply(hidden, weight.master, weight, targets, temperatures, contract)
    with torch.no_grad():
        return _Logprobs.forward(_NoContext(), hidden, None, weight, targets, temperatures, contract)


class _NoContext:
    def save_for_backward(self, *tensors) -> None:
        pass


def sample_exact(hidden: torch.Tensor, weight: Weight, temperatures, keys, positions, contract: Contract):
    """One token per row.

    hidden [R, K]; temperatures float32 [R] (0: greedy, logprob at temperature 1); keys int64 [R]: noise keys, the bits
    of the unsigned numbers; positions int64 [R]: the position the sampled token will have. Returns (tokens int64 [R],
    logprobs float32 [R]); token -1 where a row holds no logit above -inf.
    """
    rows, vocab = hidden.shape[0], weight.shape[0]
    _check_temperatures(temperatures)
    noise = keys.numpy().view(np.uint64)
    tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    size = _chunk_rows(weight)
    for a in range(0, rows, size):
        b = min(rows, a + size)
        logits = product(hidden[a:b], weight, torch.float32)
        args = (
            jit.flat(logits), jit.flat(temperatures[a:b]), noise[a:b], jit.flat(positions[a:b]), jit.flat(tokens[a:b]),
            jit.flat(logprobs[a:b]), vocab, contract.vocab_block,
        )  # fmt: skip
        jit.run(kernels.sample_range, kernels.sample_parallel, b - a, (b - a) * vocab * 96.0, args)
    return tokens, logprobs


def sample_plain(hidden: torch.Tensor, weight: Weight, temperatures, keys, positions):
    """The same interface with torch's own ops; the noise is the canonical one."""
    logits = torch.nn.functional.linear(hidden, weight.rows()).float()
    greedy = temperatures == 0
    logits = logits / torch.where(greedy, 1.0, temperatures)[:, None]
    noise = torch.empty(logits.shape)
    args = (keys.numpy().view(np.uint64), jit.flat(positions), jit.flat(noise), logits.shape[1])
    jit.run(kernels.noise_range, kernels.noise_parallel, len(keys), logits.numel() * 48.0, args)
    tokens = torch.where(greedy[:, None], logits, logits + noise).argmax(-1)
    return tokens, torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]


def gumbel_uniforms(key: int, position: int, vocab: int) -> np.ndarray:
    """The uniform numbers u behind the noise of one draw, float32 [vocab] (numerics.md, "sampling")."""
    out = np.empty(vocab, np.float32)
    kernels.uniform_row(np.uint64(key), position, out)
    return out
