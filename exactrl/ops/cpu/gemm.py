"""Canonical matrix products on the CPU.

Definition: C[m, n] = one fused-multiply-add chain over k ascending, fp32, starting from +0; with `leaves` > 1, k is cut
into that many equal leaves, each such a chain, added as a balanced binary tree in fp32. Rounded to C's dtype once.

B is packed: panels of 32 columns, [panels][k][32], padded with zeros.
"""

from __future__ import annotations

import numba
import numpy as np

from exactrl.ops.cpu import microkernel
from exactrl.ops.cpu.jit import inline, kernel, parallel_kernel, run, threads_for
from exactrl.ops.cpu.simd import load_lanes, store_lanes, vadd, vload, vload_n, vstore, vstore_n

PANEL = 32
ROWS = 64  # rows of A worked on at once: with K_BLOCK columns they stay in the L2 cache
K_BLOCK = 512
GROUP = 16  # panels per job at most

run_2 = microkernel.run_2


@kernel
def pack_rows(w, k, n, out):
    """Panels of Wᵀ for y = x Wᵀ: w is [n, k] row-major, out [panels, k, 32] of the same dtype."""
    for p in range((n + 31) // 32):
        for j in range(32):
            row = p * 32 + j
            base = p * k * 32 + j
            if row < n:
                for i in range(k):
                    out[base + i * 32] = w[row * k + i]
            else:
                for i in range(k):
                    out[base + i * 32] = 0


@kernel
def pack_columns(b, k, n, out):
    """Panels of B itself: b is [k, n] row-major (float32 or bf16), out [panels, k, 32] float32."""
    for p in range((n + 31) // 32):
        width = min(32, n - p * 32)
        left, right = min(16, width), max(0, width - 16)
        for i in range(k):
            to, src = (p * k + i) * 32, i * n + p * 32
            if width == 32:
                vstore(out, to, vload(b, src))
                vstore(out, to + 16, vload(b, src + 16))
            else:
                vstore(out, to, load_lanes(b, src, left))
                vstore(out, to + 16, load_lanes(b, src + 16, right))


@inline
def _copy_block(a, offset, rs, cs, rows, k, out):
    """rows x k of A to float32: row-major [rows, k] where A is (cs == 1), else [k, ROWS], read along rows (rs == 1)."""
    if cs == 1:
        for r in range(rows):
            for i in range(0, k - 15, 16):
                vstore(out, r * k + i, vload(a, offset + r * rs + i))
            tail = k % 16
            if tail:
                at = k - tail
                vstore_n(out, r * k + at, vload_n(a, offset + r * rs + at, tail), tail)
    else:
        for i in range(k):
            for r in range(0, rows, 16):
                vstore(out, i * ROWS + r, load_lanes(a, offset + i * cs + r, rows - r))


@inline
def _add_leaves(acc, size, leaves):
    """Balanced tree over leaf buffers [leaves, size]; the result ends in leaf 0."""
    step = 1
    while step < leaves:
        for leaf in range(0, leaves, 2 * step):
            for i in range(0, size, 16):
                left, right = leaf * size + i, (leaf + step) * size + i
                vstore(acc, left, vadd(vload(acc, left), vload(acc, right)))
        step *= 2


@inline
def _store_rows(acc, width, c, n, row, rows, column, columns, accumulate):
    """rows x columns from acc (row stride width) to c[row:, column:] (row stride n)."""
    for r in range(rows):
        at, src = (row + r) * n + column, r * width
        for j in range(0, columns, 16):
            lanes = min(16, columns - j)
            v = vload(acc, src + j)
            if accumulate:
                v = vadd(load_lanes(c, at + j, lanes), v)
            store_lanes(c, at + j, v, lanes)


@kernel
def gemm_range(first, stop, stride, a, rs, cs, b, c, m, k, n, leaves, group, accumulate):
    """Jobs of C[m, n] = A[m, k] B (or += if `accumulate`: the finished product is added to c once).

    A is row-major (cs == 1) or column-major (rs == 1); job = (block of 64 rows, group of panels).
    """
    panels = (n + 31) // 32
    groups = (panels + group - 1) // group
    leaf_k = k // leaves
    kb_max = min(K_BLOCK, leaf_k)
    size = ROWS * group * PANEL
    acc = np.empty(size * leaves, np.float32)
    block = np.empty(ROWS * kb_max, np.float32)
    column_major = cs != 1
    for job in range(first, stop, stride):
        row, p0 = job // groups * ROWS, job % groups * group
        rows, count = min(ROWS, m - row), min(group, panels - p0)
        width = count * PANEL
        for leaf in range(leaves):
            for k0 in range(leaf * leaf_k, (leaf + 1) * leaf_k, K_BLOCK):
                kb = min(K_BLOCK, (leaf + 1) * leaf_k - k0)
                more = k0 > leaf * leaf_k
                _copy_block(a, row * rs + k0 * cs, rs, cs, rows, kb, block)
                block_rs, block_cs = (1, ROWS) if column_major else (kb, 1)
                for p in range(count):
                    b_at = ((p0 + p) * k + k0) * PANEL
                    for r in range(0, rows, 8):
                        c_at = leaf * size + r * width + p * PANEL
                        a_at, count_r = r * block_rs, min(8, rows - r)
                        run_2(count_r, block, a_at, block_rs, block_cs, b, b_at, PANEL, kb, acc, c_at, width, more)
        if leaves > 1:
            _add_leaves(acc, size, leaves)
        column = p0 * PANEL
        _store_rows(acc, width, c, n, row, rows, column, min(width, n - column), accumulate)


@parallel_kernel
def gemm_parallel(threads, jobs, a, rs, cs, b, c, m, k, n, leaves, group, accumulate):
    for t in numba.prange(threads):
        gemm_range(np.int64(t), jobs, threads, a, rs, cs, b, c, m, k, n, leaves, group, accumulate)


def gemm(
    a: np.ndarray, rs: int, cs: int, b: np.ndarray, c: np.ndarray, m: int, k: int, n: int,
    *, leaves: int = 1, accumulate: bool = False,
) -> None:  # fmt: skip
    """C = A B (or +=): see the module docstring. `leaves` must divide k."""
    even = leaves >= 1 and leaves & (leaves - 1) == 0 and k % leaves == 0
    assert even, f"{leaves} leaves cannot cut K = {k}"
    if k == 0:  # an empty sum: the kernel would never write its accumulators
        if not accumulate:
            c[: m * n] = 0
        return
    panels, work = -(-n // PANEL), float(m) * n * k
    threads = threads_for(work)
    group = min(GROUP, panels if threads == 1 else max(1, -(-panels // threads)))
    jobs = -(-m // ROWS) * -(-panels // group)
    run(gemm_range, gemm_parallel, jobs, work, (a, rs, cs, b, c, m, k, n, leaves, group, accumulate))
