"""Paged attention on the CPU, prefill and decode alike.

Definition, per query row with `limit` visible keys (numerics.md): scores = fma chain over d ascending, times one fp32
constant; keys cut at absolute multiples of kv_split, each split walked in blocks of 64; online softmax in base 2 with a
rescale at every block; P rounded to the storage dtype, the denominator sums the rounded P (lanes of 16 over the block's
four pages ascending, then a tree); P·V one fma chain over keys ascending, ending at `limit`; splits merged ascending;
one division. Nothing beyond `limit` is read into a result, so stale or NaN pages cannot leak.

Pages hold 16 keys: K as [page, kv head, D, 16] (keys are lanes), V as [page, kv head, 16, Dv], Dv = D rounded up to 16.
"""

from __future__ import annotations

import numba
import numpy as np

from exactrl.ops.cpu import microkernel
from exactrl.ops.cpu.jit import inline, kernel, parallel_kernel
from exactrl.ops.cpu.simd import (
    exp2,
    fma,
    load,
    log,
    store,
    vadd,
    vexp2,
    vfirst,
    vfma,
    vload,
    vmax,
    vmaximum,
    vmul,
    vround,
    vsplat,
    vstore,
    vsub,
    vsum,
)

PAGE = 16
BLOCK = 64
TILE_ROWS = 8  # query rows (positions x grouped heads) that share one walk over the keys
ZERO = np.float32(0)
NEG_INF = np.float32(-np.inf)
LOG2E = np.float32(1.4426950408889634)

run_1, run_2, run_4, run_pages = microkernel.run_1, microkernel.run_2, microkernel.run_4, microkernel.run_pages


@kernel
def write_pages(k, v, slots, k_pages, v_pages, kv_heads, d, dv):
    """Scatters k, v [T, kv heads, D] into pages; slots[t] = page * 16 + offset."""
    for t in range(slots.size):
        page, j = slots[t] // PAGE, slots[t] % PAGE
        for h in range(kv_heads):
            src = (t * kv_heads + h) * d
            k_at = (page * kv_heads + h) * d * PAGE + j
            v_at = ((page * kv_heads + h) * PAGE + j) * dv
            for i in range(d):
                k_pages[k_at + i * PAGE] = k[src + i]
                v_pages[v_at + i] = v[src + i]


@inline
def _add_pv(rows, p, p_at, keys, v_pages, v_at, dv, acc, acc_at):
    """acc[rows, Dv] += P[rows, keys] V[keys, Dv]; P has row stride 64."""
    column = 0
    while dv - column >= 64:
        for r in range(0, rows, 4):
            run_4(min(4, rows - r), p, p_at + r * BLOCK, BLOCK, 1, v_pages, v_at + column, dv, keys,
                  acc, acc_at + r * dv + column, dv, True)  # fmt: skip
        column += 64
    if dv - column >= 32:
        for r in range(0, rows, 8):
            run_2(min(8, rows - r), p, p_at + r * BLOCK, BLOCK, 1, v_pages, v_at + column, dv, keys,
                  acc, acc_at + r * dv + column, dv, True)  # fmt: skip
        column += 32
    if dv - column >= 16:
        for r in range(0, rows, 8):
            run_1(min(8, rows - r), p, p_at + r * BLOCK, BLOCK, 1, v_pages, v_at + column, dv, keys,
                  acc, acc_at + r * dv + column, dv, True)  # fmt: skip


@inline
def _softmax_block(s, at, n, scale, state, r, like):
    """Turns raw scores s[at : at + 64] (n of them valid) into rounded P; updates (max, sum) of row r; returns alpha."""
    best = vsplat(NEG_INF)
    for i in range(0, BLOCK, 16):
        x = vfirst(vmul(vload(s, at + i), vsplat(scale)), n - i, NEG_INF)
        vstore(s, at + i, x)
        best = vmax(best, x)
    old = state[2 * r]
    peak = vmaximum(best)
    new = peak if peak > old else old
    total = vsplat(ZERO)
    for i in range(0, BLOCK, 16):
        p = vround(vexp2(vsub(vload(s, at + i), vsplat(new))), like)
        vstore(s, at + i, p)
        total = vadd(total, p)
    alpha = exp2(old - new)
    state[2 * r] = new
    state[2 * r + 1] = fma(state[2 * r + 1], alpha, vsum(total))
    return alpha


@inline
def _merge(state, acc, whole, whole_acc, r, dv):
    """Merges row r of a finished split into the running result, older splits first."""
    m, m0 = state[2 * r], whole[2 * r]
    new = m if m > m0 else m0
    old_weight, weight = exp2(m0 - new), exp2(m - new)
    whole[2 * r] = new
    whole[2 * r + 1] = fma(state[2 * r + 1], weight, whole[2 * r + 1] * old_weight)
    for i in range(r * dv, (r + 1) * dv, 16):
        v = vmul(vload(whole_acc, i), vsplat(old_weight))
        vstore(whole_acc, i, vfma(vload(acc, i), vsplat(weight), v))


@inline
def _walk_split(q32, d, dv, group, positions, limit0, s0, s1, table, t_at, k_pages, v_pages, kv_heads, h, scale, s, at4,
                state, acc):  # fmt: skip
    """One split [s0, s1) for a tile: row i * group + g sees keys below limit0 + i. Fills state (max, sum) and acc."""
    rows = positions * group
    for r in range(rows):
        state[2 * r], state[2 * r + 1] = NEG_INF, ZERO
    for i in range(0, rows * dv, 16):
        vstore(acc, i, vsplat(ZERO))
    for b in range(s0, s1, BLOCK):
        last_page = (min(s1, b + BLOCK) - 1) // PAGE
        for j in range(4):
            page = np.int64(table[t_at + min(b // PAGE + j, last_page)])
            at4[j] = (page * kv_heads + h) * d * PAGE
        for r in range(0, rows, 4):
            run_pages(min(4, rows - r), q32, r * d, d, 1, k_pages, at4, PAGE, d, s, r * BLOCK, BLOCK, False)
        for r in range(rows):
            n = min(limit0 + r // group - b, BLOCK)
            if n > 0:
                alpha = vsplat(_softmax_block(s, r * BLOCK, n, scale, state, r, k_pages))
                for i in range(r * dv, (r + 1) * dv, 16):
                    vstore(acc, i, vmul(vload(acc, i), alpha))
        shared = max(0, min(limit0 - b, BLOCK))
        for j in range(0, min(s1 - b, BLOCK), PAGE):
            page = np.int64(table[t_at + (b + j) // PAGE])
            v_at = (page * kv_heads + h) * PAGE * dv
            common = max(0, min(shared - j, PAGE))
            if common > 0:
                _add_pv(rows, s, j, common, v_pages, v_at, dv, acc, 0)
            if common < PAGE:
                # Positions of the tile end at different keys: each finishes its own chain.
                for i in range(1, positions):
                    mine = min(limit0 + i - b - j, PAGE)
                    if mine > common:
                        r = i * group
                        _add_pv(group, s, r * BLOCK + j + common, mine - common, v_pages, v_at + common * dv, dv,
                                acc, r * dv)  # fmt: skip


@kernel
def attention_range(
    first,
    stop,
    stride,
    q,
    k_pages,
    v_pages,
    tiles,
    tables,
    max_pages,
    out,
    lse,
    heads,
    kv_heads,
    d,
    dv,
    scale,
    kv_split,
):
    """Job = (tile, kv head). tiles [N, 4] int32: sequence, first query row, number of rows, position of the first row.

    q, out [T, H, D]; tables [sequences, max_pages] int32; lse [T, H] in base 2 (empty array: not wanted).
    """
    group = heads // kv_heads
    most = max(TILE_ROWS, group)
    q32 = np.empty(most * d, np.float32)
    s, state, whole = np.empty(most * BLOCK, np.float32), np.empty(2 * most, np.float32), np.empty(2 * most, np.float32)
    acc, whole_acc = np.empty(most * dv, np.float32), np.empty(most * dv, np.float32)
    at4 = np.empty(4, np.int64)
    for job in range(first, stop, stride):
        tile, h = job // kv_heads * 4, job % kv_heads
        t_at, row0 = np.int64(tiles[tile]) * max_pages, np.int64(tiles[tile + 1])
        positions, limit0 = np.int64(tiles[tile + 2]), np.int64(tiles[tile + 3]) + 1
        rows, longest = positions * group, limit0 + positions - 1
        for r in range(rows):
            src = ((row0 + r // group) * heads + h * group + r % group) * d
            for i in range(d):
                q32[r * d + i] = load(q, src + i)
        for s0 in range(0, longest, kv_split):
            s1 = min(longest, s0 + kv_split)
            mine, mine_acc = (whole, whole_acc) if s0 == 0 else (state, acc)
            _walk_split(q32, d, dv, group, positions, limit0, s0, s1, tables, t_at, k_pages, v_pages, kv_heads, h,
                        scale, s, at4, mine, mine_acc)  # fmt: skip
            if s0 > 0:
                for r in range(rows):
                    if limit0 + r // group > s0:
                        _merge(state, acc, whole, whole_acc, r, dv)
        for r in range(rows):
            head = (row0 + r // group) * heads + h * group + r % group
            total = whole[2 * r + 1]
            for i in range(d):
                store(out, head * d + i, whole_acc[r * dv + i] / total)
            if lse.size:
                lse[head] = whole[2 * r] + log(total) * LOG2E


@parallel_kernel
def attention_parallel(
    threads, jobs, q, k_pages, v_pages, tiles, tables, max_pages, out, lse, heads, kv_heads, d, dv, scale, kv_split
):
    for t in numba.prange(threads):
        attention_range(
            np.int64(t), jobs, threads,
            q, k_pages, v_pages, tiles, tables, max_pages, out, lse, heads, kv_heads, d, dv, scale,
            kv_split,
        )  # fmt: skip
