"""Backward of causal attention over packed sequences on the CPU.

P is recomputed from q, k and the forward's base-2 log-sum-exp; tiles of 64 x 64. Every sum has one fixed order, so
the gradient is reproducible; sequences and kv heads are independent jobs.
"""

from __future__ import annotations

import numba
import numpy as np

from exactrl.ops.cpu import microkernel
from exactrl.ops.cpu.jit import inline, kernel, parallel_kernel
from exactrl.ops.cpu.simd import (
    load,
    store,
    vexp2,
    vfirst,
    vload,
    vmul,
    vsplat,
    vstore,
    vsub,
)

T = 64
ZERO = np.float32(0)
run_1, run_2, run_4 = microkernel.run_1, microkernel.run_2, microkernel.run_4


@inline
def _product(rows, a, a_at, rs, cs, b, b_at, ldb, k, c, c_at, ldc, columns, add):
    """C[rows, columns] = (or +=) A[rows, k] B[k, columns]; columns a multiple of 16."""
    j = 0
    while columns - j >= 64:
        for r in range(0, rows, 4):
            run_4(min(4, rows - r), a, a_at + r * rs, rs, cs, b, b_at + j, ldb, k, c, c_at + r * ldc + j, ldc, add)
        j += 64
    if columns - j >= 32:
        for r in range(0, rows, 8):
            run_2(min(8, rows - r), a, a_at + r * rs, rs, cs, b, b_at + j, ldb, k, c, c_at + r * ldc + j, ldc, add)
        j += 32
    if columns - j >= 16:
        for r in range(0, rows, 8):
            run_1(min(8, rows - r), a, a_at + r * rs, rs, cs, b, b_at + j, ldb, k, c, c_at + r * ldc + j, ldc, add)


@inline
def _four(n):
    return np.empty(n, np.float32), np.empty(n, np.float32), np.empty(n, np.float32), np.empty(n, np.float32)


@inline
def _gather(x, row0, n, heads, head, d, dv, padded, out):
    """Rows of one head to float32 [padded, Dv], zero elsewhere."""
    for i in range(padded * dv):
        out[i] = ZERO
    for t in range(n):
        for i in range(d):
            out[t * dv + i] = load(x, ((row0 + t) * heads + head) * d + i)


@inline
def _transpose(x, n, d, dv, padded, out):
    """[n, Dv] to [D, padded], zero elsewhere."""
    for i in range(d):
        for t in range(padded):
            out[i * padded + t] = x[t * dv + i] if t < n else ZERO


@inline
def _tile(ib, jb, n, q, do, kt, vt, lse, delta, padded, d, dv, scale2, scale, p, ds):
    """P and scale * dS of one 64 x 64 tile; masked entries are +0."""
    rows = min(T, n - ib)
    _product(rows, q, ib * dv, dv, 1, kt, jb, padded, d, p, 0, T, T, False)
    _product(rows, do, ib * dv, dv, 1, vt, jb, padded, d, ds, 0, T, T, False)
    for r in range(rows):
        visible = ib + r - jb + 1
        for j in range(0, T, 16):
            at = r * T + j
            e = vexp2(vsub(vmul(vload(p, at), vsplat(scale2)), vsplat(lse[ib + r])))
            e = vfirst(e, visible - j, ZERO)
            vstore(p, at, e)
            g = vmul(vmul(e, vsub(vload(ds, at), vsplat(delta[ib + r]))), vsplat(scale))
            vstore(ds, at, vfirst(g, visible - j, ZERO))
    return rows


@kernel
def attention_backward_range(
    first, stop, stride, q, k, v, out, lse, d_out, starts, dq, dk, dv_out, heads, kv_heads, d, dv, scale2, scale
):
    """Job = (sequence, kv head). Token-major [T, heads, D] arrays; starts [sequences + 1]: first token of each."""
    group = heads // kv_heads
    longest = 0
    for i in range(starts.size - 1):
        longest = max(longest, starts[i + 1] - starts[i])
    most = (longest + T - 1) // T * T
    k32, v32, kt, vt = _four(most * dv)
    gk, gv, q32, do32 = _four(most * dv)
    gq, row_lse = np.empty(most * dv, np.float32), np.empty(most, np.float32)
    delta, p, ds = np.empty(most, np.float32), np.empty(T * T, np.float32), np.empty(T * T, np.float32)
    for job in range(first, stop, stride):
        seq, h = job // kv_heads, job % kv_heads
        row0 = starts[seq]
        n = starts[seq + 1] - row0
        padded = (n + T - 1) // T * T
        _gather(k, row0, n, kv_heads, h, d, dv, padded, k32)
        _gather(v, row0, n, kv_heads, h, d, dv, padded, v32)
        _transpose(k32, n, d, dv, padded, kt)
        _transpose(v32, n, d, dv, padded, vt)
        gk[:] = ZERO
        gv[:] = ZERO
        for head in range(h * group, (h + 1) * group):
            _gather(q, row0, n, heads, head, d, dv, padded, q32)
            _gather(d_out, row0, n, heads, head, d, dv, padded, do32)
            gq[:] = ZERO
            for t in range(n):
                at = ((row0 + t) * heads + head) * d
                acc = ZERO
                for i in range(d):
                    acc += do32[t * dv + i] * load(out, at + i)
                delta[t] = acc
                row_lse[t] = lse[(row0 + t) * heads + head]
            for ib in range(0, n, T):
                for jb in range(0, ib + T, T):
                    rows = _tile(ib, jb, n, q32, do32, kt, vt, row_lse, delta, padded, d, dv, scale2, scale, p, ds)
                    keys = min(T, n - jb)
                    _product(keys, p, 0, 1, T, do32, ib * dv, dv, rows, gv, jb * dv, dv, dv, True)
                    _product(keys, ds, 0, 1, T, q32, ib * dv, dv, rows, gk, jb * dv, dv, dv, True)
                    _product(rows, ds, 0, T, 1, k32, jb * dv, dv, keys, gq, ib * dv, dv, dv, True)
            _scatter(gq, row0, n, heads, head, d, dv, dq)
        _scatter(gk, row0, n, kv_heads, h, d, dv, dk)
        _scatter(gv, row0, n, kv_heads, h, d, dv, dv_out)


@inline
def _scatter(x, row0, n, heads, head, d, dv, out):
    for t in range(n):
        for i in range(d):
            store(out, ((row0 + t) * heads + head) * d + i, x[t * dv + i])


@parallel_kernel
def attention_backward_parallel(
    threads, jobs, q, k, v, out, lse, d_out, starts, dq, dk, dv_out, heads, kv_heads, d, dv, scale2, scale
):
    for t in numba.prange(threads):
        attention_backward_range(
            np.int64(t),
            jobs,
            threads,
            q,
            k,
            v,
            out,
            lse,
            d_out,
            starts,
            dq,
            dk,
            dv_out,
            heads,
            kv_heads,
            d,
            dv,
            scale2,
            scale,
        )
