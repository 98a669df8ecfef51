"""rms_norm, and add_rms_norm: residual add followed by the norm.

Definition: h' = round_residual(h + x); y = round((h' * (1 / sqrt(mean(h'²) + eps))) * w), all in fp32, the mean over
one fixed tree that depends on the row length only, reading the *rounded* residual.
"""

from __future__ import annotations

import torch

from exactrl.ops.cpu import jit
from exactrl.ops.cpu import norm as kernels
from exactrl.ops.weight import Weight, plain


def rms_norm_reference(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def rms_norm_plain(h: torch.Tensor, weight: Weight, eps: float) -> torch.Tensor:
    w = plain(weight)
    return torch.nn.functional.rms_norm(h.to(w.dtype), (h.shape[-1],), w, eps)


def add_rms_norm_plain(
    h: torch.Tensor, x: torch.Tensor, weight: Weight, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    h = h + x
    return h, rms_norm_plain(h, weight, eps)


def _norm(h: torch.Tensor, weight: Weight, eps: float) -> torch.Tensor:
    rows, n = h.shape
    y = torch.empty(rows, n, dtype=weight.dtype)
    args = (jit.flat(h), jit.flat(weight.rows()), jit.flat(y), n, eps)
    jit.run(kernels.rms_norm_range, kernels.rms_norm_parallel, rows, rows * n * 4, args)
    return y


def _add_norm(h: torch.Tensor, x: torch.Tensor, weight: Weight, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows, n = h.shape
    h_out, y = torch.empty_like(h), torch.empty(rows, n, dtype=weight.dtype)
    args = (jit.flat(h), jit.flat(x), jit.flat(weight.rows()), jit.flat(h_out), jit.flat(y), n, eps)
    jit.run(kernels.add_rms_norm_range, kernels.add_rms_norm_parallel, rows, rows * n * 4, args)
    return h_out, y


def _norm_backward(
    h: torch.Tensor, weight: Weight, dy: torch.Tensor, extra: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dh in h's dtype, dw fp32); `extra` is the gradient that reached h' directly."""
    rows, n = h.shape
    jobs = -(-rows // kernels.ROWS_PER_JOB)
    dh, dw = torch.empty_like(h), torch.zeros(jobs, n)
    other = dy if extra is None else extra.contiguous()
    args = (
        jit.flat(h), jit.flat(weight.rows()), jit.flat(dy.contiguous()), jit.flat(other), extra is not None,
        jit.flat(dh), jit.flat(dw), rows, n, eps,
    )  # fmt: skip
    jit.run(kernels.rms_norm_backward_range, kernels.rms_norm_backward_parallel, jobs, rows * n * 8, args)
    return dh, jit.sum_rows(dw)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, master, weight, eps):
        ctx.save_for_backward(h)
        ctx.weight, ctx.eps = weight, eps
        return _norm(h, weight, eps)

    @staticmethod
    def backward(ctx, dy):
        dh, dw = _norm_backward(ctx.saved_tensors[0], ctx.weight, dy, None, ctx.eps)
        return dh, dw, None, None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, x, master, weight, eps):
        h_out, y = _add_norm(h, x, weight, eps)
        ctx.save_for_backward(h_out)
        ctx.weight, ctx.eps, ctx.x_dtype = weight, eps, x.dtype
        return h_out, y

    @staticmethod
    def backward(ctx, dh_out, dy):
        dh, dw = _norm_backward(ctx.saved_tensors[0], ctx.weight, dy, dh_out, ctx.eps)
        return dh, dh.to(ctx.x_dtype), dw, None, None


def rms_norm_exact(h: torch.Tensor, weight: Weight, eps: float) -> torch.Tensor:
    """h [T, n] in the residual dtype -> [T, n] in the weight's dtype."""
    if weight.master is not None and torch.is_grad_enabled():
        return _RmsNorm.apply(h, weight.master, weight, eps)
    return _norm(h, weight, eps)


def add_rms_norm_exact(
    h: torch.Tensor, x: torch.Tensor, weight: Weight, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h + x rounded to h's dtype, its norm in the weight's dtype)."""
    if weight.master is not None and torch.is_grad_enabled():
        return _AddRmsNorm.apply(h, x, weight.master, weight, eps)
    return _add_norm(h, x, weight, eps)
