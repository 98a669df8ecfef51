"""qkv on a GPU: splits the fused projection, applies QK-norm and rotary embedding, writes keys and values.

Definition on `sm90`, per token and head of q or k; rn is a rounding to fp32, round one to qkv's dtype:

    n_i = round(rn(rn(x_i r) fp32(w_i)))     r as in norm.py: tree over the head of D elements, D a power of two
    per pair a = fp32(n_i), b = fp32(n_{i + D/2}), c, s = cos, sin [position, i] in fp32:
        y_i = round(rn(rn(a c) - rn(b s)));  y_{i + D/2} = round(rn(rn(b c) + rn(a s)))

v is copied. Divisions and square roots are IEEE, nothing is contracted. A position outside the table gives NaN.

Backward, dy rotated back in fp32 likewise (s negated), then as in norm.py. dwq, dwk: per head ascending over 32 tokens,
these sums by `columns` of triton_rows.py over (job, head).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from exactrl.ops.cuda import triton_qkv as kernels
from exactrl.ops.cuda.norm import rms_norm_reference
from exactrl.ops.cuda.triton_rows import column_sums

if TYPE_CHECKING:
    from exactrl.ops.qkv import HeadShape, RopeTable


def rotate_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D]; cos, sin [T, D / 2]."""
    a, b = x.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def qkv_reference(qkv, wq, wk, cos, sin, shape: HeadShape, eps: float):
    """torch's own ops, differentiable in the dtype of their arguments; cos, sin gathered per token."""
    sizes = [shape.heads * shape.dim, shape.kv_heads * shape.dim, shape.kv_heads * shape.dim]
    q, k, v = (t.unflatten(-1, (-1, shape.dim)) for t in qkv.split(sizes, -1))
    return (
        rotate_reference(rms_norm_reference(q, wq, eps), cos, sin),
        rotate_reference(rms_norm_reference(k, wk, eps), cos, sin),
        v,
    )


def _packed(qkv, wq, wk, rope, positions, shape: HeadShape, eps):
    k, v = (torch.empty(len(qkv), shape.kv_heads, shape.dim, dtype=qkv.dtype, device=qkv.device) for _ in range(2))
    return kernels.forward(qkv, wq, wk, rope, positions, shape, eps, k, v, None), k, v


class _Qkv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, master_q, master_k, wq, wk, rope, positions, shape, eps):
        ctx.save_for_backward(qkv, wq, wk, positions)
        ctx.rest = (rope, shape, eps)
        return _packed(qkv, wq, wk, rope, positions, shape, eps)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        qkv, wq, wk, positions = ctx.saved_tensors
        rope, shape, eps = ctx.rest
        gradients = dq.contiguous(), dk.contiguous(), dv.contiguous()
        dqkv, parts_q, parts_k = kernels.backward(qkv, wq, wk, rope, positions, shape, eps, *gradients)
        dwq = column_sums(parts_q) if ctx.needs_input_grad[1] else None
        dwk = column_sums(parts_k) if ctx.needs_input_grad[2] else None
        return dqkv, dwq, dwk, None, None, None, None, None, None


def qkv(
    x: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    rope: RopeTable,
    positions: torch.Tensor,
    shape: HeadShape,
    eps: float,
    *,
    master_q: torch.Tensor | None = None,
    master_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, (H + 2 HK) D], positions int64 [T] -> q [T, H, D], k, v [T, HK, D]; fp32 gradients go to the masters."""
    eps = float(np.float32(eps))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, master_q, master_k)):
        return _Qkv.apply(x, master_q, master_k, wq, wk, rope, positions, shape, eps)
    return _packed(x, wq, wk, rope, positions, shape, eps)


def qkv_into_cache(
    x: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    rope: RopeTable,
    positions: torch.Tensor,
    shape: HeadShape,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """-> q [T, H, D]; k and v go to row slots[t] = page * page_size + offset of keys, values [pages, page_size, HK, D].

    slots int64 [T] on the device, all different; a negative one marks padding, whose k and v are not written. Slots are
    not compared with the cache's size: that would wait for the device. Not differentiable.
    """
    for pages in (keys, values):
        assert pages.shape[2:] == (shape.kv_heads, shape.dim), (pages.shape, shape)
        assert pages.stride(0) == pages.shape[1] * pages.stride(1), f"pages with gaps between them: {pages.stride()}"
        assert pages.dtype == x.dtype, (pages.dtype, x.dtype)
    eps = float(np.float32(eps))
    k, v = (pages.view(-1, shape.kv_heads, shape.dim) for pages in (keys, values))
    return kernels.forward(x, wq, wk, rope, positions, shape, eps, k, v, slots)
