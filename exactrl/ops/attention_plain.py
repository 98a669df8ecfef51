"""Attention through torch's scaled_dot_product_attention: the plain path, batch-variant by nature."""

from __future__ import annotations

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


def paged_attention_plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, k_pages: torch.Tensor, v_pages: torch.Tensor
) -> torch.Tensor:
    """Writes k, v, gathers every sequence's pages to one padded batch, and attends: decode rows together, prefill
    chunks together."""
    k_pages[rows.slots], v_pages[rows.slots] = k, v
    counts = rows.starts.diff()
    out = torch.empty_like(q)
    for group in ((counts == 1).nonzero()[:, 0], (counts > 1).nonzero()[:, 0]):
        if group.numel():
            _attend(q, rows, group, counts[group], k_pages, v_pages, out)
    return out


def _attend(q, rows: Rows, group, counts, k_pages, v_pages, out) -> None:
    longest = int(counts.max())
    offsets = torch.arange(longest)
    valid = offsets < counts[:, None]
    index = torch.where(valid, rows.starts[:-1][group][:, None] + offsets, 0)
    position = rows.first[group][:, None] + offsets
    keys = int((rows.first[group] + counts).max())
    pages = rows.tables[group, : -(-keys // PAGE)].long()
    slots = (pages[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)[:, :keys]
    mask = torch.arange(keys) <= position[:, :, None]
    attended = scaled_dot_product_attention(
        q[index].transpose(1, 2), k_pages[slots].transpose(1, 2), v_pages[slots].transpose(1, 2),
        attn_mask=mask[:, None], enable_gqa=True,
    )  # fmt: skip
    out[index[valid]] = attended.transpose(1, 2)[valid]
