"""Language-model head on a GPU: hidden states -> log-probabilities for the loss, in row chunks.

Definition on `sm90`; rn is fp32, round to nearest, and nothing is contracted. Per row of temperature T:

    logits = canonical linear with fp32 output;  x = rn(logits / T), IEEE division
    c = fp32(log2 e);  exp(a) stands for exp2(rn(a * c)), exp2 is ex2.approx.ftz.f32;  ln as libdevice computes it
    per block of vocab_block = 128 entries (the last one is filled up with -inf):
        m = max x (0 instead of -inf in the differences)
        s = tree of exp(x - m);  q = tree of rn(exp(x - m) * (x - m)), 0 where x is -inf
        tree: neighbours 2 i and 2 i + 1 are added until one number is left
    M = max m over the blocks (0 instead of -inf);  w = exp(m - M)
    S = sum of rn(w * s) over the blocks, ascending from 0, one chain
    Q = likewise of rn(w * rn(q + rn(s * rn(m - M)))), the second term 0 where m is -inf
    logprob of t = rn(rn(x_t - M) - ln S);  entropy = rn(ln S - Q / S), IEEE division

One NaN or +inf among the logits makes every number of the row NaN. The sampler (sampling.py) runs the same two kernels
on logits of the same bits: one function. Bits depend neither on the cut into chunks nor on how many blocks a program
takes. Triples (m, s, q) are per absolute block: shards of the vocabulary that end at block borders may send them.

Backward: d logits = (g (1[t] - p) - h p (ln p + H)) / T, rounded to the dtype of the hidden states for the two library
GEMMs. Deterministic: chunks ascending, no atomics.
"""

from __future__ import annotations

import torch

from exactrl.ops.cuda.linear import grad_input, grad_weight
from exactrl.ops.cuda.matmul import Product

CHUNK_BYTES = 1 << 30  # fp32 logits held at once; rows are independent, so the cut changes no bit
F32 = torch.float32


def chunk_rows(vocab: int, chunk_bytes: int) -> int:
    """Rows whose logits fit into `chunk_bytes`: whole tiles of 128 where one fits, at least one row."""
    rows = max(1, chunk_bytes // (4 * vocab))
    return rows - rows % 128 if rows >= 128 else rows


class _Logprobs(torch.autograd.Function):
    """Logits are kept for the backward while all of them fit in one chunk, and made again (same bits) otherwise."""

    @staticmethod
    def forward(ctx, hidden, master, w, targets, temperatures, product, chunk_bytes):
        from exactrl.ops.cuda.triton_logprob import blocks, merge

        rows, size = len(hidden), chunk_rows(len(w), chunk_bytes)
        logprobs, entropy = torch.empty_like(temperatures), torch.empty_like(temperatures)
        lse, logits = temperatures.new_empty(rows, 2), None
        for a in range(0, rows, size):
            cut = slice(a, min(rows, a + size))
            logits = product(hidden[cut], w, F32, 1)
            parts = blocks(logits, temperatures[cut], entropy=True)
            logprobs[cut], lse[cut], entropy[cut] = merge(parts, logits, temperatures[cut], targets[cut])
        ctx.save_for_backward(hidden, w, targets, temperatures, lse, entropy)
        ctx.logits, ctx.product, ctx.size = logits if rows <= size else None, product, size
        return logprobs, entropy

    @staticmethod
    def backward(ctx, d_logprobs, d_entropy):
        from exactrl.ops.cuda.triton_logprob import logits_gradient

        hidden, w, targets, temperatures, lse, entropy = ctx.saved_tensors
        d_logprobs, d_entropy = d_logprobs.contiguous(), d_entropy.contiguous()
        dh, dw, rows = torch.empty_like(hidden), None, len(hidden)
        for a in range(0, rows, ctx.size):
            cut = slice(a, min(rows, a + ctx.size))
            logits = ctx.product(hidden[cut], w, F32, 1) if ctx.logits is None else ctx.logits
            d_logits = logits_gradient(
                logits, temperatures[cut], targets[cut], lse[cut], entropy[cut], d_logprobs[cut], d_entropy[cut],
                hidden.dtype,
            )  # fmt: skip
            if ctx.needs_input_grad[0]:
                dh[cut] = grad_input(d_logits, w)
            if ctx.needs_input_grad[1]:
                dw = grad_weight(d_logits, hidden[cut], dw)
        if ctx.needs_input_grad[1] and dw is None:
            dw = torch.zeros(w.shape, dtype=F32, device=w.device)
        return dh if ctx.needs_input_grad[0] else None, dw, None, None, None, None, None


class _NoContext:
    def save_for_backward(self, *tensors) -> None:
        pass


def logprobs_exact(
    hidden: torch.Tensor,
    w: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    product: Product,
    *,
    master: torch.Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs, entropy), fp32 [R], of hidden [R, K] and w [V, K]; the fp32 gradient of w goes to `master` when given.

    targets int64 [R], temperatures fp32 [R] > 0. Nothing waits for the device, so a target outside the vocabulary is
    not refused: its logprob is NaN.
    """
    assert targets.dtype == torch.int64, f"targets must be int64, not {targets.dtype}"
    assert targets.shape == temperatures.shape == hidden.shape[:1], (targets.shape, temperatures.shape, hidden.shape)
    targets, temperatures = targets.contiguous(), temperatures.contiguous()
    if torch.is_grad_enabled() and (hidden.requires_grad or (master is not None and master.requires_grad)):
        return _Logprobs.apply(hidden, master, w, targets, temperatures, product, chunk_bytes)
    with torch.no_grad():
        return _Logprobs.forward(_NoContext(), hidden, None, w, targets, temperatures, product, chunk_bytes)
