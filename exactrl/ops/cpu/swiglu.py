"""SwiGLU on the CPU: y = (g / (1 + exp(-g))) * u in fp32, rounded once. gate_up is [T, 2 I]: gate, then up."""

from __future__ import annotations

import numba
import numpy as np

from exactrl.ops.cpu.jit import inline, kernel, parallel_kernel
from exactrl.ops.cpu.simd import (
    load_lanes,
    store_lanes,
    vadd,
    vdiv,
    vexp,
    vload,
    vload_n,
    vmul,
    vneg,
    vsplat,
    vstore,
    vstore_n,
    vsub,
)

ONE = np.float32(1)


@inline
def _swiglu(g, u):
    return vmul(vdiv(g, vadd(vsplat(ONE), vexp(vneg(g)))), u)


@kernel
def swiglu_range(first, stop, stride, gate_up, y, n):
    """Job = row; n = I."""
    for row in range(first, stop, stride):
        g, u, out = row * 2 * n, row * 2 * n + n, row * n
        for i in range(0, n - 15, 16):
            vstore(y, out + i, _swiglu(vload(gate_up, g + i), vload(gate_up, u + i)))
        tail = n % 16
        if tail:
            i = n - tail
            v = _swiglu(vload_n(gate_up, g + i, tail), vload_n(gate_up, u + i, tail))
            vstore_n(y, out + i, v, tail)


@parallel_kernel
def swiglu_parallel(threads, jobs, gate_up, y, n):
    for t in numba.prange(threads):
        swiglu_range(np.int64(t), jobs, threads, gate_up, y, n)


@inline
def _backward(gate_up, g_at, u_at, dy, dy_at, d_gate_up, lanes):
    one = vsplat(ONE)
    g, u, d = load_lanes(gate_up, g_at, lanes), load_lanes(gate_up, u_at, lanes), load_lanes(dy, dy_at, lanes)
    s = vdiv(one, vadd(one, vexp(vneg(g))))
    silu = vmul(g, s)
    slope = vmul(s, vadd(one, vsub(g, silu)))
    store_lanes(d_gate_up, g_at, vmul(vmul(d, u), slope), lanes)
    store_lanes(d_gate_up, u_at, vmul(d, silu), lanes)


@kernel
def swiglu_backward_range(first, stop, stride, gate_up, dy, d_gate_up, n):
    for row in range(first, stop, stride):
        for i in range(0, n, 16):
            g_at = row * 2 * n + i
            _backward(gate_up, g_at, g_at + n, dy, row * n + i, d_gate_up, min(16, n - i))


@parallel_kernel
def swiglu_backward_parallel(threads, jobs, gate_up, dy, d_gate_up, n):
    for t in numba.prange(threads):
        swiglu_backward_range(np.int64(t), jobs, threads, gate_up, dy, d_gate_up, n)
