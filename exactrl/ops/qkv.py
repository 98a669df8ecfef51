"""qkv: splits the fused projection, applies QK-norm and rotary embedding.

Definition: q and k heads are RMS-normalised (as in norm.py, row length D), rounded, rotated in fp32 with tables built
in fp64 and stored fp32, indexed by absolute position, and rounded again; v is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from exactrl.ops.cpu import jit
from exactrl.ops.cpu import norm as kernels
from exactrl.ops.norm import rms_norm_reference
from exactrl.ops.weight import Weight, plain


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos, sin: float32 [positions, D / 2], never cast with the model."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def build(cls, theta: float, head_dim: int, positions: int) -> RopeTable:
        frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
        return cls(angle.cos().float(), angle.sin().float())

    def to(self, device: torch.device) -> RopeTable:
        return RopeTable(self.cos.to(device), self.sin.to(device))


@dataclass(frozen=True, slots=True)
class HeadShape:
    """heads: query heads; kv_heads divides heads; dim: head dimension, even."""

    heads: int
    kv_heads: int
    dim: int


def rotate_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D]; cos, sin [T, D / 2]."""
    a, b = x.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def qkv_reference(qkv, wq, wk, cos, sin, shape: HeadShape, eps: float):
    """Differentiable, in the dtype of its arguments; cos, sin already gathered per token."""
    q, k, v = _split(qkv, shape)
    return (
        rotate_reference(rms_norm_reference(q, wq, eps), cos, sin),
        rotate_reference(rms_norm_reference(k, wk, eps), cos, sin),
        v,
    )


def _split(qkv: torch.Tensor, shape: HeadShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = qkv.split([shape.heads * shape.dim, shape.kv_heads * shape.dim, shape.kv_heads * shape.dim], -1)
    return q.unflatten(-1, (-1, shape.dim)), k.unflatten(-1, (-1, shape.dim)), v.unflatten(-1, (-1, shape.dim))


def qkv_plain(qkv, wq: Weight, wk: Weight, rope: RopeTable, positions, shape: HeadShape, eps: float):
    q, k, v = _split(qkv, shape)
    cos, sin = rope.cos[positions].to(qkv.dtype), rope.sin[positions].to(qkv.dtype)
    q = torch.nn.functional.rms_norm(q, (shape.dim,), plain(wq), eps)
    k = torch.nn.functional.rms_norm(k, (shape.dim,), plain(wk), eps)
    return rotate_reference(q, cos, sin), rotate_reference(k, cos, sin), v


def _forward(qkv, wq: Weight, wk: Weight, rope: RopeTable, positions, shape: HeadShape, eps: float):
    t, limit = qkv.shape[0], rope.cos.shape[0]
    last = jit.flat(positions).max(initial=0)  # kernels check no bounds
    assert last < limit, f"position {last} is beyond the rotary table of {limit}"
    q = torch.empty(t, shape.heads, shape.dim, dtype=qkv.dtype)
    k, v = (torch.empty(t, shape.kv_heads, shape.dim, dtype=qkv.dtype) for _ in range(2))
    args = (
        jit.flat(qkv), jit.flat(wq.rows()), jit.flat(wk.rows()), jit.flat(rope.cos), jit.flat(rope.sin),
        jit.flat(positions), jit.flat(q), jit.flat(k), jit.flat(v), shape.heads, shape.kv_heads, shape.dim, eps,
    )  # fmt: skip
    jit.run(kernels.qkv_range, kernels.qkv_parallel, t, qkv.numel() * 8, args)
    return q, k, v


class _Qkv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, master_q, master_k, wq, wk, rope, positions, shape, eps):
        ctx.save_for_backward(qkv, positions)
        ctx.rest = (wq, wk, rope, shape, eps)
        return _forward(qkv, wq, wk, rope, positions, shape, eps)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        qkv, positions = ctx.saved_tensors
        wq, wk, rope, shape, eps = ctx.rest
        t = qkv.shape[0]
        jobs = -(-t // kernels.ROWS_PER_JOB)
        dqkv, dwq, dwk = torch.empty_like(qkv), torch.zeros(jobs, shape.dim), torch.zeros(jobs, shape.dim)
        args = (
            jit.flat(qkv), jit.flat(wq.rows()), jit.flat(wk.rows()), jit.flat(rope.cos), jit.flat(rope.sin),
            jit.flat(positions), jit.flat(dq.contiguous()), jit.flat(dk.contiguous()), jit.flat(dv.contiguous()),
            jit.flat(dqkv), jit.flat(dwq), jit.flat(dwk), t, shape.heads, shape.kv_heads, shape.dim, eps,
        )  # fmt: skip
        jit.run(kernels.qkv_backward_range, kernels.qkv_backward_parallel, jobs, qkv.numel() * 16, args)
        return dqkv, jit.sum_rows(dwq), jit.sum_rows(dwk), None, None, None, None, None, None


def qkv_exact(qkv, wq: Weight, wk: Weight, rope: RopeTable, positions, shape: HeadShape, eps: float):
    """qkv [T, (H + 2 HK) D], positions int64 [T] -> q [T, H, D], k [T, HK, D], v [T, HK, D]."""
    if wq.master is not None and torch.is_grad_enabled():
        return _Qkv.apply(qkv, wq.master, wk.master, wq, wk, rope, positions, shape, eps)
    return _forward(qkv, wq, wk, rope, positions, shape, eps)
