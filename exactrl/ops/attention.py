"""attention: causal, grouped-query, over a paged KV cache; prefill, decode and training are one definition.

Definition in ops/cpu/attention.py and docs/numerics.md. Training writes K and V into pages of its own and runs the very
kernel that decodes; the backward recomputes P from the saved base-2 log-sum-exp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from exactrl.contract import Contract
from exactrl.ops.cpu import attention as kernels
from exactrl.ops.cpu import attention_backward, jit
from exactrl.ops.qkv import HeadShape
from exactrl.ops.rows import consecutive_pages, row_owners, row_slots

PAGE = kernels.PAGE


@dataclass(frozen=True, slots=True)
class Rows:
    """Which query rows a batch holds. Rows of one sequence are consecutive.

    slots    int64 [T]  page * 16 + offset each row's K and V are written to
    tables   int32 [S, P]  pages of each sequence, in order
    starts   int64 [S + 1]  first row of each sequence
    first    int64 [S]  position of each sequence's first row
    tiles    int32 [N, 4]  (sequence, first row, rows, position of the first row), at most `tile_positions` rows each
    """

    slots: torch.Tensor
    tables: torch.Tensor
    starts: torch.Tensor
    first: torch.Tensor
    tiles: torch.Tensor

    @classmethod
    def build(
        cls,
        starts: np.ndarray,
        first: np.ndarray,
        tables: np.ndarray,
        shape: HeadShape,
        slots: np.ndarray | None = None,
    ) -> Rows:
        """starts int64 [S + 1], first int64 [S], tables int32 [S, P]."""
        counts = np.diff(starts)
        if slots is None:
            slots = row_slots(starts, first, tables, PAGE)
        tiles = _tiles(starts, first, counts, max(1, kernels.TILE_ROWS // (shape.heads // shape.kv_heads)))
        arrays = (slots, tables, starts, first, tiles)
        return cls(*(torch.from_numpy(np.ascontiguousarray(a)) for a in arrays))

    @classmethod
    def packed(cls, lengths: np.ndarray, shape: HeadShape) -> Rows:
        """Whole sequences of `lengths` int64 [S] tokens, each from position 0, in pages one after the other."""
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return cls.build(starts, np.zeros(len(lengths), np.int64), consecutive_pages(lengths, PAGE), shape)

    def owners(self, sequences: torch.Tensor) -> torch.Tensor:
        """int64 [T, 2]: (sequence, position) of every row; `sequences` int64 [S] are their numbers."""
        return torch.from_numpy(row_owners(self.starts.numpy(), self.first.numpy(), sequences.numpy()))


def _tiles(starts: np.ndarray, first: np.ndarray, counts: np.ndarray, size: int) -> np.ndarray:
    per = -(-counts // size)
    sequence = np.repeat(np.arange(len(counts)), per)
    index = np.arange(len(sequence)) - np.repeat(np.cumsum(per) - per, per)
    offset = index * size
    rows = np.minimum(size, counts[sequence] - offset)
    return np.stack([sequence, starts[sequence] + offset, rows, first[sequence] + offset], 1).astype(np.int32)


def scales(dim: int) -> tuple[np.float32, np.float32]:
    """(scale * log2 e, scale) as fp32 constants; scale = 1 / sqrt(D)."""
    return np.float32(math.log2(math.e) / math.sqrt(dim)), np.float32(1 / math.sqrt(dim))


def new_pages(num_pages: int, shape: HeadShape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(K pages, V pages), not initialised: K [page, HK, D, 16], V [page, HK, 16, D rounded up to 16]."""
    padded = -(-shape.dim // 16) * 16
    k = torch.empty(num_pages, shape.kv_heads, shape.dim, PAGE, dtype=dtype)
    return k, torch.empty(num_pages, shape.kv_heads, PAGE, padded, dtype=dtype)


def attention_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One sequence: q [T, H, D], k, v [T, HK, D] -> [T, H, D], in the dtype of q."""
    t, heads, dim = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(dim)
    scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -math.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v)


def write_kv(k: torch.Tensor, v: torch.Tensor, rows: Rows, k_pages: torch.Tensor, v_pages: torch.Tensor) -> None:
    """Writes k, v [T, HK, D] of every row into the pages."""
    kv_heads, dim = k.shape[1:]
    arrays = (jit.flat(k), jit.flat(v), jit.flat(rows.slots), jit.flat(k_pages), jit.flat(v_pages))
    kernels.write_pages(*arrays, kv_heads, dim, v_pages.shape[-1])


def paged_attention(
    q: torch.Tensor, rows: Rows, k_pages: torch.Tensor, v_pages: torch.Tensor, contract: Contract, lse: torch.Tensor
) -> torch.Tensor:
    """q [T, H, D] against the pages -> [T, H, D]; `lse` float32 [T, H] is filled unless it is empty."""
    t, heads, dim = q.shape
    kv_heads = k_pages.shape[1]
    assert (contract.kv_block, contract.kv_split % kernels.BLOCK) == (kernels.BLOCK, 0), f"no kernel for {contract}"
    out = torch.empty_like(q)
    args = (
        jit.flat(q), jit.flat(k_pages), jit.flat(v_pages), jit.flat(rows.tiles), jit.flat(rows.tables),
        rows.tables.shape[1], jit.flat(out), jit.flat(lse), heads, kv_heads, dim, v_pages.shape[-1], scales(dim)[0],
        contract.kv_split,
    )  # fmt: skip
    jobs = rows.tiles.shape[0] * kv_heads
    jit.run(kernels.attention_range, kernels.attention_parallel, jobs, 2.0 * t * heads * dim * 64, args)
    return out


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, rows, contract):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        shape = HeadShape(q.shape[1], k.shape[1], q.shape[2])
        k_pages, v_pages = new_pages(int(rows.tables.max()) + 1, shape, q.dtype)
        write_kv(k, v, rows, k_pages, v_pages)
        lse = torch.empty(q.shape[:2])
        out = paged_attention(q, rows, k_pages, v_pages, contract, lse)
        ctx.save_for_backward(q, k, v, out, lse, rows.starts)
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, lse, starts = ctx.saved_tensors
        _, heads, dim = q.shape
        kv_heads = k.shape[1]
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        scale2, scale = scales(dim)
        arrays = [jit.flat(x) for x in (q, k, v, out, lse, d_out.contiguous(), starts, dq, dk, dv)]
        args = (*arrays, heads, kv_heads, dim, -(-dim // 16) * 16, scale2, scale)
        jobs = (starts.numel() - 1) * kv_heads
        serial, parallel = attention_backward.attention_backward_range, attention_backward.attention_backward_parallel
        jit.run(serial, parallel, jobs, 5.0 * q.numel() * 64, args)
        return dq, dk, dv, None, None


def packed_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, contract: Contract) -> torch.Tensor:
    """Whole sequences side by side, each from position 0; pages are this call's own. Differentiable."""
    return _PackedAttention.apply(q, k, v, rows, contract)
