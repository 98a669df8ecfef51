"""Attention through torch's scaled_dot_product_attention: the plain path, batch-variant by nature."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from exactrl.ops.attention import PAGE, Rows


def packed_attention_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Whole sequences side by side: padded on the right, causal, so padding is never attended to."""
    lengths = rows.starts.diff()
    longest = int(lengths.max())
    index = rows.starts[:-1, None] + torch.arange(longest)
    valid = torch.arange(longest) < lengths[:, None]
    index = torch.where(valid, index, 0)
    q, k, v = (x[index].transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)[valid]


def new_pages_plain(num_pages: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as [page * 16, HK, D]; zeroed, since the padded softmax multiplies what it does not attend to by 0."""
    k, v = (torch.zeros(num_pages * PAGE, kv_heads, dim, dtype=dtype) for _ in range(2))
    return k, v


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Sequences of a batch that attend together, padded: S sequences of up to L query rows and N keys.

    index   int64 [S, L] rows of the batch (0 where padded); valid bool [S, L]
    slots   int64 [S, N] cache slots of the keys; mask bool [S, 1, L, N] keys a row may see
    """

    index: torch.Tensor
    valid: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor


def padded_rows(rows: Rows) -> list[PaddedRows]:
    """Decode rows together, prefill chunks together; made once per step, used by every layer."""
    counts = rows.starts.diff()
    groups = ((counts == 1).nonzero()[:, 0], (counts > 1).nonzero()[:, 0])
    return [_pad(rows, group, counts[group]) for group in groups if group.numel()]


def _pad(rows: Rows, group: torch.Tensor, counts: torch.Tensor) -> PaddedRows:
    offsets = torch.arange(int(counts.max()))
    valid = offsets < counts[:, None]
    position = rows.first[group][:, None] + offsets
    keys = int((rows.first[group] + counts).max())
    pages = rows.tables[group, : -(-keys // PAGE)].long()
    return PaddedRows(
        index=torch.where(valid, rows.starts[:-1][group][:, None] + offsets, 0),
        valid=valid,
        slots=(pages[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)[:, :keys],
        mask=(torch.arange(keys) <= position[:, :, None])[:, None],
    )


def paged_attention_plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: Rows,
    groups: list[PaddedRows],
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
) -> torch.Tensor:
    """Writes k, v, gathers every sequence's pages into padded batches (`groups` = padded_rows(rows)) and attends."""
    k_pages[rows.slots], v_pages[rows.slots] = k, v
    out = torch.empty_like(q)
    for g in groups:
        keys, values = k_pages[g.slots].transpose(1, 2), v_pages[g.slots].transpose(1, 2)
        queries = q[g.index].transpose(1, 2)
        attended = scaled_dot_product_attention(queries, keys, values, attn_mask=g.mask, enable_gqa=True)
        out[g.index[g.valid]] = attended.transpose(1, 2)[g.valid]
    return out
