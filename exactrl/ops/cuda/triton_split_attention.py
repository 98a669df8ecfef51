"""Attention with the splits in parallel, in Triton: for few rows of each sequence, above all decode.

Definition in attention.py. A small kernel lists the (sequence, split) pairs of a batch once a step; programs walk the
list, a fixed number on each multiprocessor. Whoever finishes the last split of a (sequence, key head) merges all of
them, ascending: the bits do not depend on who that is. A captured graph serves changing lengths, because the list is
made on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from exactrl.ops.cuda.attention_host import multiprocessors, scale_of
from exactrl.ops.cuda.attention_tiles import AttentionTile
from exactrl.ops.cuda.triton_attention import (
    BLOCK,
    LN2,
    NEG_INF,
    SPLIT,
    block_update,
    key_rows,
    merge_split,
    page_size_of,
    strides,
)
from exactrl.ops.cuda.triton_exact import EXACT

if TYPE_CHECKING:
    from exactrl.ops.cuda.attention import AttentionRows

UNROLL = 8  # splits whose partial results are in flight while merging


@triton.jit(do_not_specialize=["N", "capacity"])
def _plan(
    sequences, starts, lengths, items, total, merges, arrived, N, capacity, SPLIT: tl.constexpr, HK: tl.constexpr,
    PADDED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program i lists the splits of sequence i. items int32 [capacity, 3]: sequence, split, place of its partial
    results. Whole splits come first, so that short ones fill the gaps at the end. More splits than `capacity`: every
    sequence is listed with split -1, which writes NaN. merges int32 [N, 2]: sequence, place of its first split; -1
    where there is nothing to merge."""
    me, i = tl.program_id(0), tl.arange(0, PADDED)
    s = tl.load(sequences + i, mask=i < N, other=0)
    has_rows = (i < N) & (tl.load(starts + s + 1) > tl.load(starts + s))
    length = tl.where(has_rows, tl.load(lengths + s), 0)
    whole, rest = length // SPLIT, (length % SPLIT > 0).to(tl.int32)
    mine, before = i == me, i < me
    sequence = tl.sum(tl.where(mine, s, 0), 0)
    my_whole, my_rest = tl.sum(tl.where(mine, whole, 0), 0), tl.sum(tl.where(mine, rest, 0), 0)
    first_whole, first_rest = tl.sum(tl.where(before, whole, 0), 0), tl.sum(tl.where(before, rest, 0), 0)
    all_whole, count = tl.sum(whole, 0), tl.sum(whole + rest, 0)
    fits = count <= capacity
    if me == 0:
        tl.store(total, tl.where(fits, count, N))
    tl.store(merges + 2 * me, sequence)
    tl.store(merges + 2 * me + 1, tl.where(fits & (my_whole + my_rest > 1), first_whole + first_rest, -1))
    c = tl.arange(0, CHUNK)
    for j in range(0, tl.where(fits, my_whole, 0), CHUNK):
        at, inside = items + 3 * (first_whole + j + c), j + c < my_whole
        tl.store(at, sequence + c * 0, mask=inside)
        tl.store(at + 1, j + c, mask=inside)
        tl.store(at + 2, first_whole + first_rest + j + c, mask=inside)
    if (my_rest > 0) & fits:
        at = items + 3 * (all_whole + first_rest)
        tl.store(at, sequence)
        tl.store(at + 1, my_whole)
        tl.store(at + 2, first_whole + first_rest + my_whole)
    if not fits:
        tl.store(items + 3 * me, sequence)
        tl.store(items + 3 * me + 1, -1)
    for head in tl.static_range(HK):
        tl.store(arrived + sequence * HK + head, 0)


@triton.jit
def _finish(A, M, L, out, lse, row, h, d, inside, T, H: tl.constexpr, D: tl.constexpr):
    y = tl.div_rn(A, L[:, None])
    tl.store(out + (row[:, None] * H + h[:, None]) * D + d[None, :], y.to(out.dtype.element_ty), mask=inside[:, None])
    if lse is not None:
        tl.store(lse + h.to(tl.int64) * T + row, (M + tl.log2(L)) * LN2, mask=inside)


@triton.jit
def _merge_all(
    A, M, L, partial, stats, place, count, r, d, inside, held, HK: tl.constexpr, D: tl.constexpr, UNROLL: tl.constexpr
):
    """(A, M, L) with the `count` splits of a sequence and key head, ascending."""
    for j0 in range(0, count, UNROLL):
        for j in tl.static_range(UNROLL):
            at = (place + (j0 + j) * HK) * held + r
            there = inside & (tl.zeros_like(r) + (j0 + j) < count)  # as a tensor: the interpreter has a number here
            acc = tl.load(partial + at[:, None] * D + d[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg")
            m = tl.load(stats + 2 * at, mask=there, other=NEG_INF, cache_modifier=".cg")
            l = tl.load(stats + 2 * at + 1, mask=there, other=0.0, cache_modifier=".cg")
            A, M, L = merge_split(A, M, L, acc, m, l)
    return A, M, L


@triton.jit(do_not_specialize=["P", "T", "held"])
def _splits(
    q, k, v, out, lse, items, total, arrived, partial, stats, starts, lengths, tables, P, T, held,
    stride_q, stride_k, stride_v, scale, H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """partial fp32 [place, HK, held, D], stats fp32 [place, HK, held, 2]: (m, l) of each row of a split."""
    G: tl.constexpr = H // HK
    r, d, n = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, BLOCK)
    for item in range(tl.program_id(0), tl.load(total) * HK, tl.num_programs(0)):
        hk, pair = item % HK, items + 3 * (item // HK)
        s, split = tl.load(pair), tl.load(pair + 1)
        start, length = tl.load(starts + s), tl.load(lengths + s)
        count = tl.load(starts + s + 1) - start
        inside, h = r < count * G, hk * G + r % G
        row, position = (start + r // G).to(tl.int64), length - count + r // G
        x = tl.load(q + row[:, None] * stride_q + h[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
        acc, m = tl.zeros((ROWS, D), tl.float32), tl.full((ROWS,), NEG_INF, tl.float32)
        l = tl.zeros((ROWS, 16), tl.float32)
        stop = tl.where(split < 0, 0, tl.minimum(split * SPLIT + SPLIT, length))
        for block in tl.range(tl.maximum(split, 0) * SPLIT, stop, BLOCK, num_stages=STAGES):
            at = block + n
            key, exists = key_rows(tables, s, start, at, length, P, PAGE), at < length
            kb = tl.load(k + key[None, :] * stride_k + hk * D + d[:, None], mask=exists[None, :], other=0.0)
            vb = tl.load(v + key[:, None] * stride_v + hk * D + d[None, :], mask=exists[:, None], other=0.0)
            acc, m, l = block_update(x, kb, vb, acc, m, l, at[None, :] <= position[:, None], scale, True, BLOCK)
        A, M, L = tl.zeros((ROWS, D), tl.float32), tl.full((ROWS,), NEG_INF, tl.float32), tl.zeros((ROWS,), tl.float32)
        splits = tl.cdiv(length, SPLIT)
        if (split < 0) | (splits == 1):
            A, M, L = merge_split(A, M, L, acc, m, tl.max(l, 1))
            if split < 0:
                L += float("nan")
            _finish(A, M, L, out, lse, row, h, d, inside, T, H, D)
        else:
            place = tl.load(pair + 2).to(tl.int64) * HK + hk
            held_at = place * held + r
            tl.store(partial + held_at[:, None] * D + d[None, :], acc, mask=inside[:, None])
            tl.store(stats + 2 * held_at, m, mask=inside)
            tl.store(stats + 2 * held_at + 1, tl.max(l, 1), mask=inside)
            tl.debug_barrier()  # all threads have stored before one of them says so
            if tl.atomic_add(arrived + s * HK + hk, 1, sem="acq_rel") == splits - 1:
                tl.store(arrived + s * HK + hk, 0)  # for the next layer
                first = place - split * HK
                A, M, L = _merge_all(A, M, L, partial, stats, first, splits, r, d, inside, held, HK, D, UNROLL)
                _finish(A, M, L, out, lse, row, h, d, inside, T, H, D)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """What a batch's split kernels share in every layer. `held` rows of each split have room in `partial`."""

    rows: AttentionRows
    sequences: torch.Tensor
    items: torch.Tensor
    total: torch.Tensor
    merges: torch.Tensor
    arrived: torch.Tensor
    partial: torch.Tensor
    stats: torch.Tensor
    held: int

    @classmethod
    def build(cls, rows: AttentionRows, sequences: np.ndarray, heads: int, kv_heads: int, dim: int) -> SplitPlan:
        device = rows.starts.device
        capacity = max(len(sequences), int((-(-rows.most_keys[sequences] // SPLIT)).sum()))
        held = int(rows.counts[sequences].max()) * (heads // kv_heads)
        size, extra = (capacity, kv_heads, held, dim), (capacity, kv_heads, held, 2)
        floats = rows.workspace.take(math.prod(size) + math.prod(extra), device)
        plan = cls(
            rows,
            torch.from_numpy(sequences.astype(np.int32)).to(device, non_blocking=True),
            torch.empty(capacity, 3, dtype=torch.int32, device=device),
            torch.empty(1, dtype=torch.int32, device=device),
            torch.empty(len(sequences), 2, dtype=torch.int32, device=device),
            torch.empty(len(rows.counts), kv_heads, dtype=torch.int32, device=device),
            floats[: math.prod(size)].view(size),
            floats[math.prod(size) :].view(extra),
            held,
        )
        plan.refresh()
        return plan

    def refresh(self) -> None:
        """Lists the splits of the present lengths."""
        count = len(self.sequences)
        padded = triton.next_power_of_2(count)
        _plan[(count,)](
            self.sequences, self.rows.starts, self.rows.lengths, self.items, self.total, self.merges, self.arrived,
            count, len(self.items), SPLIT, self.arrived.shape[1], padded, 128, num_warps=4,
        )  # fmt: skip


def split_plan(rows: AttentionRows, sequences: np.ndarray, heads: int, kv_heads: int, dim: int) -> SplitPlan:
    """Made once for a batch."""
    key = ("split", heads, kv_heads, dim, sequences.tobytes())
    if key not in rows.plans:
        rows.plans[key] = SplitPlan.build(rows, sequences, heads, kv_heads, dim)
    return rows.plans[key]


def attend_splits(q, k, v, rows: AttentionRows, out, lse, sequences: np.ndarray, tile: AttentionTile) -> None:
    """AttentionImplementation.attend for few rows of each sequence."""
    t, heads, dim = q.shape
    kv_heads, page_size = k.shape[-2], page_size_of(k, rows)
    most = int(rows.counts[sequences].max()) * (heads // kv_heads)
    assert most <= tile.rows, f"{most} rows x grouped heads of one sequence, but the tile holds {tile.rows}"
    assert rows.tables is not None, "splits in parallel read pages"
    plan = split_plan(rows, sequences, heads, kv_heads, dim)
    programs = min(len(plan.items) * kv_heads, multiprocessors(q.device) * tile.ctas)
    _splits[(programs,)](
        q, k, v, out, lse, plan.items, plan.total, plan.arrived, plan.partial, plan.stats, rows.starts, rows.lengths,
        rows.tables, rows.tables.shape[1], t, plan.held, *strides(q, k, v, page_size), scale_of(dim), heads, kv_heads,
        dim, page_size, SPLIT, BLOCK, tile.rows, UNROLL, tile.stages, num_warps=tile.warps,
        maxnreg=_most_registers(tile), **EXACT,
    )  # fmt: skip


def _most_registers(tile: AttentionTile) -> int:
    """Registers of a thread that leave room for `ctas` programs on a multiprocessor."""
    return min(255, 65536 // (tile.ctas * tile.warps * 32) // 8 * 8)
