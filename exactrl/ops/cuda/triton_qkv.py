"""QK-norm, rotary embedding and the write of keys and values in Triton; definition in qkv.py.

Legend: T tokens, H query heads, HK key heads, D head dimension, J jobs of 32 tokens. One program takes HEADS heads of
a few tokens (backward: of one job), all of q, of k or of v. A head is held as its halves a, b, which rotation pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from exactrl.ops.cuda.triton_early import EARLY, wait
from exactrl.ops.cuda.triton_rows import JOB, inverse_rms, row_stride, row_tree, warps_for

if TYPE_CHECKING:
    from exactrl.ops.qkv import HeadShape, RopeTable

HEADS = 8
STAGES = 1  # tokens whose loads are under way in the backward
MANY, TOKENS = 1024, 4  # from so many tokens on a program of the forward takes so many; changes no bit
SIZES = ["POSITIONS", "T"]


@triton.jit
def _halves(x, first, COUNT: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr):
    """fp32 [HEADS, D / 2] twice; heads from COUNT on read as 0."""
    h, i = first + tl.arange(0, HEADS), tl.arange(0, D // 2)
    at, mask = x + h[:, None] * D + i[None, :], (h < COUNT)[:, None]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32), tl.load(at + D // 2, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_halves(y, first, a, b, COUNT: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr):
    h, i = first + tl.arange(0, HEADS), tl.arange(0, D // 2)
    at, mask = y + h[:, None] * D + i[None, :], (h < COUNT)[:, None]
    tl.store(at, a.to(y.dtype.element_ty), mask=mask)
    tl.store(at + D // 2, b.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _angles(cos, sin, position, POSITIONS, D: tl.constexpr, HEADS: tl.constexpr):
    """[HEADS, D / 2] each, equal rows: read where they are used, they need no exchange between threads. NaN for a
    position outside the table, so that it cannot pass unseen."""
    i = tl.arange(0, HEADS)[:, None] * 0 + tl.arange(0, D // 2)[None, :]
    here = position + tl.zeros_like(i)  # as a tensor: the interpreter has a number here
    known = (here >= 0) & (here < POSITIONS)
    at = position * (D // 2) + i
    c = tl.load(cos + at, mask=known, other=float("nan"))
    return c, tl.load(sin + at, mask=known, other=float("nan"))


@triton.jit
def _weights(w, D: tl.constexpr, HEADS: tl.constexpr):
    """fp32 [HEADS, D / 2] twice, equal rows."""
    i = tl.arange(0, HEADS)[:, None] * 0 + tl.arange(0, D // 2)[None, :]
    return tl.load(w + i).to(tl.float32), tl.load(w + D // 2 + i).to(tl.float32)


@triton.jit
def _head_tree(a, b):
    """The tree over a whole head, whose last step adds the halves: D is a power of two."""
    return row_tree(a) + row_tree(b)


@triton.jit
def _normed_rotated(
    x, first, wa, wb, cos, sin, position, POSITIONS, y, eps, written,
    COUNT: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The angles are asked for last: only they wait for the position."""
    a, b = _halves(x, first, COUNT, D, HEADS)
    c, s = _angles(cos, sin, position, POSITIONS, D, HEADS)
    r = inverse_rms(_head_tree(a * a, b * b), eps, D)[:, None]
    a = ((a * r) * wa).to(y.dtype.element_ty).to(tl.float32)
    b = ((b * r) * wb).to(y.dtype.element_ty).to(tl.float32)
    if written:
        _store_halves(y, first, a * c - b * s, b * c + a * s, COUNT, D, HEADS)


@triton.jit
def _slot(slots, token):
    if slots is None:
        return token
    else:
        return tl.load(slots + token).to(tl.int64)


@triton.jit(do_not_specialize=SIZES)
def qkv_kernel(
    qkv, wq, wk, cos, sin, positions, slots, q, k, v, POSITIONS, T, stride, stride_k, stride_v, eps,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens; q [T, H, D]. k and v: row slots[token] of the cache, nothing where that is negative; without slots
    row `token`."""
    wait()
    Q: tl.constexpr = (H + HEADS - 1) // HEADS
    K: tl.constexpr = (HK + HEADS - 1) // HEADS
    start, block = (tl.program_id(0) // (Q + 2 * K)).to(tl.int64) * TOKENS, tl.program_id(0) % (Q + 2 * K)
    stop = tl.minimum(start + TOKENS, T)
    if block < Q:
        wa, wb = _weights(wq, D, HEADS)
        for token in range(start, stop):
            _normed_rotated(
                qkv + token * stride, block * HEADS, wa, wb, cos, sin, tl.load(positions + token), POSITIONS,
                q + token * H * D, eps, token >= 0, H, D, HEADS,
            )  # fmt: skip
    elif block < Q + K:
        wa, wb = _weights(wk, D, HEADS)
        for token in range(start, stop):
            position, slot = tl.load(positions + token), _slot(slots, token)
            _normed_rotated(
                qkv + token * stride + H * D, (block - Q) * HEADS, wa, wb, cos, sin, position, POSITIONS,
                k + slot * stride_k, eps, slot >= 0, HK, D, HEADS,
            )  # fmt: skip
    else:
        first = (block - Q - K) * HEADS
        for token in range(start, stop):
            slot = _slot(slots, token)
            a, b = _halves(qkv + token * stride + (H + HK) * D, first, HK, D, HEADS)
            if slot >= 0:
                _store_halves(v + slot * stride_v, first, a, b, HK, D, HEADS)


@triton.jit
def _job_backward(
    x, w, cos, sin, positions, dy, dx, parts, start, stop, first, POSITIONS, stride, stride_dy, stride_dx, eps,
    COUNT: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tokens start … stop - 1 ascending; parts: this job's fp32 [COUNT, D]."""
    wa, wb = _weights(w, D, HEADS)
    dwa, dwb = tl.zeros((HEADS, D // 2), tl.float32), tl.zeros((HEADS, D // 2), tl.float32)
    for token in tl.range(start, stop, num_stages=STAGES):
        c, s = _angles(cos, sin, tl.load(positions + token), POSITIONS, D, HEADS)
        a, b = _halves(x + token * stride, first, COUNT, D, HEADS)
        ya, yb = _halves(dy + token * stride_dy, first, COUNT, D, HEADS)
        ga, gb = ya * c + yb * s, yb * c - ya * s
        r = inverse_rms(_head_tree(a * a, b * b), eps, D)[:, None]
        ua, ub = a * r, b * r
        dwa, dwb = dwa + ga * ua, dwb + gb * ub
        ga, gb = ga * wa, gb * wb
        mean = tl.div_rn(_head_tree(ga * ua, gb * ub), tl.full((HEADS,), D, tl.float32))[:, None]
        da, db = r * (ga - ua * mean), r * (gb - ub * mean)
        _store_halves(dx + token * stride_dx, first, da, db, COUNT, D, HEADS)
    _store_halves(parts, first, dwa, dwb, COUNT, D, HEADS)


@triton.jit(do_not_specialize=SIZES)
def qkv_backward_kernel(
    qkv, wq, wk, cos, sin, positions, dq, dk, dv, dqkv, parts_q, parts_k, POSITIONS, T, stride, eps,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, JOB: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One job; parts_q fp32 [J, H, D], parts_k [J, HK, D]; dq, dk, dv, dqkv contiguous."""
    wait()
    Q: tl.constexpr = (H + HEADS - 1) // HEADS
    K: tl.constexpr = (HK + HEADS - 1) // HEADS
    WIDTH: tl.constexpr = (H + 2 * HK) * D
    job, block = (tl.program_id(0) // (Q + 2 * K)).to(tl.int64), tl.program_id(0) % (Q + 2 * K)
    start, stop = job * JOB, tl.minimum(job * JOB + JOB, T)
    if block < Q:
        _job_backward(
            qkv, wq, cos, sin, positions, dq, dqkv, parts_q + job * H * D, start, stop, block * HEADS, POSITIONS,
            stride, H * D, WIDTH, eps, H, D, HEADS, STAGES,
        )  # fmt: skip
    elif block < Q + K:
        _job_backward(
            qkv + H * D, wk, cos, sin, positions, dk, dqkv + H * D, parts_k + job * HK * D, start, stop,
            (block - Q) * HEADS, POSITIONS, stride, HK * D, WIDTH, eps, HK, D, HEADS, STAGES,
        )  # fmt: skip
    else:
        first = (block - Q - K) * HEADS
        for token in range(start, stop):
            a, b = _halves(dv + token * HK * D, first, HK, D, HEADS)
            _store_halves(dqkv + token * WIDTH + (H + HK) * D, first, a, b, HK, D, HEADS)


def _heads(shape: HeadShape) -> int:
    """Heads of one program; decides time, never bits."""
    assert shape.dim >= 2, f"no head of dimension {shape.dim} has two halves"
    assert shape.dim & (shape.dim - 1) == 0, f"the tree of a head needs a power of two, not {shape.dim}"
    return min(HEADS, triton.next_power_of_2(shape.kv_heads))


def _blocks(shape: HeadShape, heads: int) -> int:
    return triton.cdiv(shape.heads, heads) + 2 * triton.cdiv(shape.kv_heads, heads)


def forward(
    qkv: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    rope: RopeTable,
    positions: torch.Tensor,
    shape: HeadShape,
    eps: float,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor | None,
) -> torch.Tensor:
    """-> q [T, H, D]; k, v as rows [·, HK, D], strided between rows, are written at `slots` (None: at the token)."""
    tokens, heads = qkv.shape[0], _heads(shape)
    assert qkv.shape[1] == (shape.heads + 2 * shape.kv_heads) * shape.dim, (qkv.shape, shape)
    assert wq.shape == wk.shape == (shape.dim,), (wq.shape, wk.shape, shape)
    assert len(positions) == tokens, (positions.shape, qkv.shape)
    assert positions.is_contiguous()
    assert slots is None or (slots.is_contiguous() and len(slots) == tokens), slots
    q = torch.empty(tokens, shape.heads, shape.dim, dtype=qkv.dtype, device=qkv.device)
    each, warps = (TOKENS, warps_for(heads * shape.dim)) if tokens >= MANY else (1, warps_for(4 * heads * shape.dim))
    qkv_kernel[(triton.cdiv(tokens, each) * _blocks(shape, heads),)](
        qkv, wq, wk, rope.cos, rope.sin, positions, slots, q, k, v, rope.cos.shape[0], tokens, row_stride(qkv),
        row_stride(k, 2), row_stride(v, 2), eps, shape.heads, shape.kv_heads, shape.dim, heads, each,
        num_warps=warps, **EARLY,
    )  # fmt: skip
    return q


def backward(qkv, wq, wk, rope: RopeTable, positions, shape: HeadShape, eps: float, dq, dk, dv):
    """(dqkv, fp32 partial sums [J H, D] of dwq and [J HK, D] of dwk); dq, dk, dv are contiguous."""
    tokens, heads, jobs = qkv.shape[0], _heads(shape), triton.cdiv(qkv.shape[0], JOB)
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    parts_q, parts_k = (
        torch.empty(jobs * n, shape.dim, dtype=torch.float32, device=qkv.device) for n in (shape.heads, shape.kv_heads)
    )
    qkv_backward_kernel[(jobs * _blocks(shape, heads),)](
        qkv, wq, wk, rope.cos, rope.sin, positions, dq, dk, dv, dqkv, parts_q, parts_k, rope.cos.shape[0], tokens,
        row_stride(qkv), eps, shape.heads, shape.kv_heads, shape.dim, heads, JOB, STAGES,
        num_warps=warps_for(heads * shape.dim), **EARLY,
    )  # fmt: skip
    return dqkv, parts_q, parts_k
