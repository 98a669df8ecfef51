"""linear: y = x Wᵀ.

Definition: per output element one fp32 fused-multiply-add chain over K ascending (with k_leaves > 1: K cut into that
many equal leaves, added as a balanced binary tree in fp32), rounded to the output dtype once.
"""

from __future__ import annotations

import torch

from exactrl.ops.cpu import gemm, jit
from exactrl.ops.weight import Weight, plain


def linear_reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.T


def linear_plain(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    return torch.nn.functional.linear(x, plain(weight))


def product(x: torch.Tensor, weight: Weight, out_dtype: torch.dtype, leaves: int = 1) -> torch.Tensor:
    """Canonical x Wᵀ without autograd; x [M, K] contiguous -> [M, N]."""
    n, k = weight.shape
    m = x.shape[0]
    y = torch.empty(m, n, dtype=out_dtype)
    assert weight.panels is not None, "canonical products read packed panels"
    gemm.gemm(jit.flat(x), k, 1, jit.flat(weight.panels), jit.flat(y), m, k, n, leaves=leaves)
    return y


def columns(b: torch.Tensor) -> torch.Tensor:
    """float32 panels of a [K, N] matrix, for products with it on the right."""
    k, n = b.shape
    out = torch.empty(-(-n // gemm.PANEL) * k * gemm.PANEL, dtype=torch.float32)
    gemm.pack_columns(jit.flat(b), k, n, jit.flat(out))
    return out


def grad_input(dy: torch.Tensor, w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """dy [M, N] W [N, K] -> [M, K]."""
    m, n = dy.shape
    k = w.shape[1]
    dx = torch.empty(m, k, dtype=dtype)
    gemm.gemm(jit.flat(dy), n, 1, jit.flat(columns(w)), jit.flat(dx), m, n, k)
    return dx


def grad_weight(dy: torch.Tensor, x: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """dyᵀ [N, M] x [M, K] -> float32 [N, K], added to `into` when given."""
    m, n = dy.shape
    k = x.shape[1]
    dw = torch.empty(n, k) if into is None else into
    gemm.gemm(jit.flat(dy), 1, n, jit.flat(columns(x)), jit.flat(dw), n, m, k, accumulate=into is not None)
    return dw


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, master, weight, leaves):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return product(x, weight, x.dtype, leaves)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dy = dy.contiguous()
        dx = grad_input(dy, ctx.weight.rows(), x.dtype) if ctx.needs_input_grad[0] else None
        return dx, grad_weight(dy, x), None, None


def linear_exact(x: torch.Tensor, weight: Weight, leaves: int = 1) -> torch.Tensor:
    """x [M, K] -> [M, N] in x's dtype. `leaves` must divide K."""
    if weight.master is not None and torch.is_grad_enabled():
        return _Linear.apply(x, weight.master, weight, leaves)
    return product(x, weight, x.dtype, leaves)
