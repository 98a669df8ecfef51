"""Attention that walks the splits in order, in Triton: the bit reference of `sm90`, and tuned kernels for many rows.

Definition in attention.py. Legend: T rows, H query heads, HK key heads, G = H / HK, D head dimension, P pages of a
sequence. A query row of a program is (position, grouped head): row r of a sequence's flat list is position r // G.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from exactrl.ops.cuda.attention_host import scale_of
from exactrl.ops.cuda.attention_tiles import AttentionTile
from exactrl.ops.cuda.triton_exact import EXACT

if TYPE_CHECKING:
    from exactrl.ops.cuda.attention import AttentionRows

BLOCK, SPLIT = 64, 512
LN2 = tl.constexpr(0.693147182464599609375)  # ln 2 as fp32
NEG_INF = tl.constexpr(float("-inf"))
SIZES = ["P", "T"]
"""Arguments that change from batch to batch: a kernel is compiled once for all of them."""


@triton.jit
def block_update(q, k, v, acc, m, l, visible, scale, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """One block of keys: k [D, BLOCK], v [BLOCK, D], visible [rows, BLOCK]; l [rows, 16] has equal columns."""
    s = tl.dot(q, k) * scale
    if MASKED:
        s = tl.where(visible, s, NEG_INF)
    mn = tl.maximum(m, tl.max(s, 1))
    mz = tl.where(mn == NEG_INF, 0.0, mn)
    p = tl.exp2(s - mz[:, None])
    al = tl.exp2(m - mz)
    pb = p.to(v.dtype)
    l = tl.dot(pb, tl.full((BLOCK, 16), 1.0, v.dtype), l * al[:, None])
    acc = tl.dot(pb, v, acc * al[:, None])
    return acc, mn, l


@triton.jit
def merge_split(A, M, L, acc, m, l):
    """(A, M, L) with a finished split (acc, m, l) merged into it; rows that saw no key of it stay as they are."""
    seen = m != NEG_INF
    mn = tl.maximum(M, m)
    mz = tl.where(seen, mn, 0.0)
    a = tl.exp2(M - mz)
    b = tl.exp2(m - mz)
    A = tl.where(seen[:, None], A * a[:, None] + acc * b[:, None], A)
    L = tl.where(seen, L * a + l * b, L)
    return A, mn, L


@triton.jit
def key_rows(tables, s, start, positions, length, P, PAGE: tl.constexpr):
    """Row of k and v (as [pages * page_size, HK, D] or [T, HK, D]) of each position; int64."""
    if PAGE:
        page = tl.load(tables + s.to(tl.int64) * P + positions // PAGE, mask=positions < length, other=0)
        return page.to(tl.int64) * PAGE + positions % PAGE
    return start.to(tl.int64) + positions


@triton.jit(do_not_specialize=SIZES)
def _reference(
    q, k, v, out, lse, sequences, starts, lengths, tables, P, T, stride_q, stride_k, stride_v, scale,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """64 positions of one query head; every block is masked and loaded through plain pointers."""
    s, h = tl.load(sequences + tl.program_id(2)), tl.program_id(1)
    start, length = tl.load(starts + s), tl.load(lengths + s)
    count = tl.load(starts + s + 1) - start
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d, n = tl.arange(0, D), tl.arange(0, BLOCK)
    head = h // (H // HK) * D
    row, inside = (start + i).to(tl.int64), i < count
    position = length - count + i
    x = tl.load(q + row[:, None] * stride_q + h * D + d[None, :], mask=inside[:, None], other=0.0)
    A, M, L = tl.zeros((ROWS, D), tl.float32), tl.full((ROWS,), NEG_INF, tl.float32), tl.zeros((ROWS,), tl.float32)
    stop = tl.minimum(length, length - count + (tl.program_id(0) + 1) * ROWS)
    if tl.program_id(0) * ROWS >= count:
        stop = 0
    for split in range(0, stop, SPLIT):
        acc, m = tl.zeros((ROWS, D), tl.float32), tl.full((ROWS,), NEG_INF, tl.float32)
        l = tl.zeros((ROWS, 16), tl.float32)
        for block in range(split, tl.minimum(split + SPLIT, stop), BLOCK):
            at = block + n
            key, exists = key_rows(tables, s, start, at, length, P, PAGE), at < length
            kb = tl.load(k + key[None, :] * stride_k + head + d[:, None], mask=exists[None, :], other=0.0)
            vb = tl.load(v + key[:, None] * stride_v + head + d[None, :], mask=exists[:, None], other=0.0)
            acc, m, l = block_update(x, kb, vb, acc, m, l, at[None, :] <= position[:, None], scale, True, BLOCK)
        A, M, L = merge_split(A, M, L, acc, m, tl.max(l, 1))
    y = tl.div_rn(A, L[:, None])
    tl.store(out + (row[:, None] * H + h) * D + d[None, :], y.to(out.dtype.element_ty), mask=inside[:, None])
    if lse is not None:
        tl.store(lse + h.to(tl.int64) * T + row, (M + tl.log2(L)) * LN2, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _in_order(
    q, k, v, k_tiles, v_tiles, out, lse, tiles, starts, lengths, tables, P, T, stride_q, stride_k, stride_v, scale,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """ROWS rows that share a key head; masks only where some row does not see the whole block."""
    G: tl.constexpr = H // HK
    hk = tl.program_id(0)
    s, tile = tl.load(tiles + 2 * tl.program_id(1)), tl.load(tiles + 2 * tl.program_id(1) + 1)
    start, length = tl.load(starts + s), tl.load(lengths + s)
    count = tl.load(starts + s + 1) - start
    r = tile * ROWS + tl.arange(0, ROWS)
    d, n = tl.arange(0, D), tl.arange(0, BLOCK)
    inside, h = r < count * G, hk * G + r % G
    row, position = (start + r // G).to(tl.int64), length - count + r // G
    x = tl.load(q + row[:, None] * stride_q + h[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
    A, M, L = tl.zeros((ROWS, D), tl.float32), tl.full((ROWS,), NEG_INF, tl.float32), tl.zeros((ROWS,), tl.float32)
    first = length - count + tile * ROWS // G
    stop = tl.minimum(length, length - count + (tile * ROWS + ROWS - 1) // G + 1)
    whole = (first + 1) // BLOCK * BLOCK
    for split in range(0, stop, SPLIT):
        acc, m = tl.zeros((ROWS, D), tl.float32), tl.full((ROWS,), NEG_INF, tl.float32)
        l = tl.zeros((ROWS, 16), tl.float32)
        for block in range(split, tl.minimum(split + SPLIT, whole), BLOCK):
            at = block + n
            if TMA:
                if PAGE:
                    page = tl.load(tables + s.to(tl.int64) * P + block // PAGE)
                    key0 = page * PAGE + block % PAGE
                else:
                    key0 = start + block
                kb = k_tiles.load([key0, hk * D]).T
                vb = v_tiles.load([key0, hk * D])
            else:
                key = key_rows(tables, s, start, at, length, P, PAGE)
                kb = tl.load(k + key[None, :] * stride_k + hk * D + d[:, None])
                vb = tl.load(v + key[:, None] * stride_v + hk * D + d[None, :])
            acc, m, l = block_update(x, kb, vb, acc, m, l, inside[:, None], scale, False, BLOCK)
        for block in range(tl.maximum(split, whole), tl.minimum(split + SPLIT, stop), BLOCK):
            at = block + n
            key, exists = key_rows(tables, s, start, at, length, P, PAGE), at < length
            kb = tl.load(k + key[None, :] * stride_k + hk * D + d[:, None], mask=exists[None, :], other=0.0)
            vb = tl.load(v + key[:, None] * stride_v + hk * D + d[None, :], mask=exists[:, None], other=0.0)
            acc, m, l = block_update(x, kb, vb, acc, m, l, at[None, :] <= position[:, None], scale, True, BLOCK)
        A, M, L = merge_split(A, M, L, acc, m, tl.max(l, 1))
    y = tl.div_rn(A, L[:, None])
    at_out = out + (row[:, None] * H + h[:, None]) * D + d[None, :]
    tl.store(at_out, y.to(out.dtype.element_ty), mask=inside[:, None])
    if lse is not None:
        tl.store(lse + h.to(tl.int64) * T + row, (M + tl.log2(L)) * LN2, mask=inside)


@dataclass(frozen=True, slots=True)
class _TileList:
    """int32 [N, 2] on the device: (sequence, tile), those with most keys first."""

    tiles: torch.Tensor

    def refresh(self) -> None:
        """Depends on host counts only."""


def strides(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_size: int) -> tuple[int, int, int]:
    """Row strides of q, k, v; everything inside a row is contiguous, pages follow each other without a gap."""
    dim = q.shape[-1]
    for t in (q, k, v):
        assert (t.stride(-1), t.stride(-2)) == (1, dim), t.stride()
    if page_size:
        assert k.stride(0) == page_size * k.stride(1), k.stride()
        assert v.stride(0) == page_size * v.stride(1), v.stride()
    return q.stride(0), k.stride(-3), v.stride(-3)


def page_size_of(k: torch.Tensor, rows: AttentionRows) -> int:
    """0 for packed keys."""
    assert (k.dim() == 4) == (rows.tables is not None), "pages come with tables, packed keys without"
    return k.shape[1] if k.dim() == 4 else 0


def table_arguments(rows: AttentionRows) -> tuple[torch.Tensor, int]:
    return (rows.starts, 0) if rows.tables is None else (rows.tables, rows.tables.shape[1])


def attend_reference(q, k, v, rows: AttentionRows, out, lse, sequences: np.ndarray) -> None:
    """AttentionImplementation.attend of the bit reference."""
    t, heads, dim = q.shape
    page_size, (tables, width) = page_size_of(k, rows), table_arguments(rows)
    listed = torch.from_numpy(sequences.astype(np.int32)).to(q.device, non_blocking=True)
    size = 64
    grid = (triton.cdiv(int(rows.counts[sequences].max()), size), heads, len(sequences))
    _reference[grid](
        q, k, v, out, lse, listed, rows.starts, rows.lengths, tables, width, t, *strides(q, k, v, page_size),
        scale_of(dim), heads, k.shape[-2], dim, page_size, SPLIT, BLOCK, size, num_warps=4, num_stages=2, **EXACT,
    )  # fmt: skip


def _tile_list(rows: AttentionRows, sequences: np.ndarray, group: int, tile: AttentionTile) -> torch.Tensor:
    key = ("in_order", group, tile.rows, sequences.tobytes())
    if key not in rows.plans:
        counts = rows.counts[sequences]
        per = -(-counts * group // tile.rows)
        sequence = np.repeat(sequences, per)
        index = np.arange(len(sequence)) - np.repeat(np.cumsum(per) - per, per)
        keys = np.repeat(rows.most_keys[sequences] - counts, per) + (index + 1) * tile.rows // group
        tiles = np.stack([sequence, index], 1)[np.argsort(-keys, kind="stable")].astype(np.int32)
        rows.plans[key] = _TileList(torch.from_numpy(tiles).to(rows.starts.device, non_blocking=True))
    return rows.plans[key].tiles


def attend_in_order(q, k, v, rows: AttentionRows, out, lse, sequences: np.ndarray, tile: AttentionTile) -> None:
    """AttentionImplementation.attend for many rows of each sequence."""
    t, heads, dim = q.shape
    kv_heads = k.shape[-2]
    page_size, (tables, width) = page_size_of(k, rows), table_arguments(rows)
    tiles = _tile_list(rows, sequences, heads // kv_heads, tile)
    k_tiles, v_tiles = (_described(x, kv_heads * dim, dim) for x in (k, v)) if tile.tma else (k, v)
    _in_order[(kv_heads, len(tiles))](
        q, k, v, k_tiles, v_tiles, out, lse, tiles, rows.starts, rows.lengths, tables, width, t,
        *strides(q, k, v, page_size), scale_of(dim), heads, kv_heads, dim, page_size, SPLIT, BLOCK, tile.rows,
        tile.tma, num_warps=tile.warps, num_stages=tile.stages, **EXACT,
    )  # fmt: skip


def _described(x: torch.Tensor, width: int, dim: int) -> TensorDescriptor:
    """k or v as a matrix with a row for each key, read in blocks of one head."""
    count = x.numel() // width
    return TensorDescriptor(x, [count, width], [x.stride(-3), 1], [BLOCK, dim])
