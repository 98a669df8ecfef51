"""RMSNorm and per-head QK-norm with RoPE on the CPU.

Reduction over a row of n elements: lane i % 16 holds a fused-multiply-add chain over its elements ascending; the lanes
are added as the tree (i, i+8), (i, i+4), (i, i+2), (i, i+1). It depends on n only.
"""

from __future__ import annotations

import numba
import numpy as np

from exactrl.ops.cpu.jit import inline, kernel, parallel_kernel
from exactrl.ops.cpu.simd import (
    load,
    load_lanes,
    sqrt,
    store,
    store_lanes,
    vadd,
    vfma,
    vload,
    vload_n,
    vmul,
    vsplat,
    vstore,
    vstore_n,
    vsub,
    vsum,
)

ONE = np.float32(1)
ZERO = np.float32(0)
ROWS_PER_JOB = 64  # rows whose weight gradient is summed ascending into one partial


@inline
def inverse_rms(x, at, n, eps):
    """1 / sqrt(mean(x²) + eps) of x[at : at + n], each step IEEE fp32."""
    acc = vsplat(ZERO)
    for i in range(0, n - 15, 16):
        v = vload(x, at + i)
        acc = vfma(v, v, acc)
    tail = n % 16
    if tail:
        v = vload_n(x, at + n - tail, tail)
        acc = vfma(v, v, acc)
    # eps arrives as a Python float: without the cast the sum would be taken in fp64
    return ONE / sqrt(vsum(acc) / np.float32(n) + np.float32(eps))


@inline
def _scale_row(x, x_at, w, inverse, y, y_at, n):
    """y = (x * inverse) * w, rounded once."""
    r = vsplat(inverse)
    for i in range(0, n - 15, 16):
        vstore(y, y_at + i, vmul(vmul(vload(x, x_at + i), r), vload(w, i)))
    tail = n % 16
    if tail:
        i = n - tail
        vstore_n(y, y_at + i, vmul(vmul(vload_n(x, x_at + i, tail), r), vload_n(w, i, tail)), tail)


@kernel
def rms_norm_range(first, stop, stride, x, w, y, n, eps):
    for row in range(first, stop, stride):
        _scale_row(x, row * n, w, inverse_rms(x, row * n, n, eps), y, row * n, n)


@parallel_kernel
def rms_norm_parallel(threads, jobs, x, w, y, n, eps):
    for t in numba.prange(threads):
        rms_norm_range(np.int64(t), jobs, threads, x, w, y, n, eps)


@kernel
def add_rms_norm_range(first, stop, stride, h, x, w, h_out, y, n, eps):
    """h_out = h + x rounded to the residual dtype; y = norm of the rounded h_out."""
    for row in range(first, stop, stride):
        at = row * n
        for i in range(0, n - 15, 16):
            vstore(h_out, at + i, vadd(vload(h, at + i), vload(x, at + i)))
        tail = n % 16
        if tail:
            i = at + n - tail
            vstore_n(h_out, i, vadd(vload_n(h, i, tail), vload_n(x, i, tail)), tail)
        _scale_row(h_out, at, w, inverse_rms(h_out, at, n, eps), y, at, n)


@parallel_kernel
def add_rms_norm_parallel(threads, jobs, h, x, w, h_out, y, n, eps):
    for t in numba.prange(threads):
        add_rms_norm_range(np.int64(t), jobs, threads, h, x, w, h_out, y, n, eps)


@inline
def _row_backward(x, x_at, w, dy, dy_at, n, eps, dx, dx_at, dw, dw_at, extra, extra_at, has_extra):
    """dx = norm backward (+ extra); dw[dw_at:] += dy * x̂. dy, dx and extra may have any storage dtype."""
    inverse = inverse_rms(x, x_at, n, eps)
    r = vsplat(inverse)
    acc = vsplat(ZERO)
    for i in range(0, n, 16):
        lanes = min(16, n - i)
        xhat = vmul(load_lanes(x, x_at + i, lanes), r)
        g = load_lanes(dy, dy_at + i, lanes)
        store_lanes(dw, dw_at + i, vfma(g, xhat, load_lanes(dw, dw_at + i, lanes)), lanes)
        acc = vfma(vmul(g, load_lanes(w, i, lanes)), xhat, acc)
    mean = vsplat(vsum(acc) / np.float32(n))
    for i in range(0, n, 16):
        lanes = min(16, n - i)
        xhat = vmul(load_lanes(x, x_at + i, lanes), r)
        g = vmul(load_lanes(dy, dy_at + i, lanes), load_lanes(w, i, lanes))
        d = vmul(r, vsub(g, vmul(xhat, mean)))
        if has_extra:
            d = vadd(d, load_lanes(extra, extra_at + i, lanes))
        store_lanes(dx, dx_at + i, d, lanes)


@kernel
def rms_norm_backward_range(first, stop, stride, x, w, dy, extra, has_extra, dx, dw, rows, n, eps):
    """Job = 64 rows; dw is float32 [jobs, n] of zeros, a partial sum per job."""
    for job in range(first, stop, stride):
        for row in range(job * ROWS_PER_JOB, min(rows, (job + 1) * ROWS_PER_JOB)):
            at = row * n
            _row_backward(x, at, w, dy, at, n, eps, dx, at, dw, job * n, extra, at, has_extra)


@parallel_kernel
def rms_norm_backward_parallel(threads, jobs, x, w, dy, extra, has_extra, dx, dw, rows, n, eps):
    for t in numba.prange(threads):
        rms_norm_backward_range(np.int64(t), jobs, threads, x, w, dy, extra, has_extra, dx, dw, rows, n, eps)


@inline
def _rotate(x, at, cos, sin, c_at, half, y, y_at, sign):
    """Rotary embedding of one head: pairs (i, i + half); sign -1 rotates back. Products and sums rounded separately."""
    for i in range(half):
        a, b = load(x, at + i), load(x, at + half + i)
        c, s = cos[c_at + i], sign * sin[c_at + i]
        store(y, y_at + i, a * c - b * s)
        store(y, y_at + half + i, b * c + a * s)


@kernel
def qkv_range(first, stop, stride, qkv, wq, wk, cos, sin, positions, q, k, v, heads, kv_heads, d, eps):
    """Job = token. qkv [T, (H + 2 HK) D] -> q [T, H, D], k, v [T, HK, D]; q and k normalised, rounded, then rotated."""
    row = np.empty(d, q.dtype)
    half = d // 2
    for t in range(first, stop, stride):
        base = t * (heads + 2 * kv_heads) * d
        c_at = positions[t] * half
        for h in range(heads):
            at = base + h * d
            _scale_row(qkv, at, wq, inverse_rms(qkv, at, d, eps), row, 0, d)
            _rotate(row, 0, cos, sin, c_at, half, q, (t * heads + h) * d, ONE)
        for h in range(kv_heads):
            at = base + (heads + h) * d
            _scale_row(qkv, at, wk, inverse_rms(qkv, at, d, eps), row, 0, d)
            _rotate(row, 0, cos, sin, c_at, half, k, (t * kv_heads + h) * d, ONE)
        at = base + (heads + kv_heads) * d
        for i in range(kv_heads * d):
            v[t * kv_heads * d + i] = qkv[at + i]


@parallel_kernel
def qkv_parallel(threads, jobs, qkv, wq, wk, cos, sin, positions, q, k, v, heads, kv_heads, d, eps):
    for t in numba.prange(threads):
        qkv_range(np.int64(t), jobs, threads, qkv, wq, wk, cos, sin, positions, q, k, v, heads, kv_heads, d, eps)


@kernel
def qkv_backward_range(
    first, stop, stride, qkv, wq, wk, cos, sin, positions, dq, dk, dv, dqkv, dwq, dwk, tokens, heads, kv_heads, d, eps
):
    """Job = 64 tokens; dwq, dwk are float32 [jobs, D] of zeros."""
    row = np.empty(d, np.float32)
    half = d // 2
    for job in range(first, stop, stride):
        for t in range(job * ROWS_PER_JOB, min(tokens, (job + 1) * ROWS_PER_JOB)):
            base = t * (heads + 2 * kv_heads) * d
            c_at = positions[t] * half
            for h in range(heads):
                at = base + h * d
                _rotate(dq, (t * heads + h) * d, cos, sin, c_at, half, row, 0, -ONE)
                _row_backward(qkv, at, wq, row, 0, d, eps, dqkv, at, dwq, job * d, row, 0, False)
            for h in range(kv_heads):
                at = base + (heads + h) * d
                _rotate(dk, (t * kv_heads + h) * d, cos, sin, c_at, half, row, 0, -ONE)
                _row_backward(qkv, at, wk, row, 0, d, eps, dqkv, at, dwk, job * d, row, 0, False)
            at = base + (heads + kv_heads) * d
            for i in range(kv_heads * d):
                store(dqkv, at + i, load(dv, t * kv_heads * d + i))


@parallel_kernel
def qkv_backward_parallel(
    threads, jobs, qkv, wq, wk, cos, sin, positions, dq, dk, dv, dqkv, dwq, dwk, tokens, heads, kv_heads, d, eps
):
    for t in numba.prange(threads):
        qkv_backward_range(
            np.int64(t), jobs, threads,
            qkv, wq, wk, cos, sin, positions, dq, dk, dv, dqkv, dwq, dwk, tokens, heads, kv_heads, d,
            eps,
        )  # fmt: skip
