"""Where a forward's keys and values live: the only difference between scoring, training and decoding."""

from __future__ import annotations

from typing import Protocol

import torch

from exactrl.ops import Ops
from exactrl.ops.attention import Rows, new_pages, packed_attention, paged_attention, write_kv
from exactrl.ops.attention_plain import new_pages_plain, packed_attention_plain, padded_rows, paged_attention_plain
from exactrl.ops.qkv import HeadShape


class AttentionState(Protocol):
    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, H, D], k, v [T, HK, D] of the batch's rows -> [T, H, D]; keys and values become visible first."""
        ...


class PackedState:
    """Whole sequences side by side, each from position 0 (trainer). Differentiable."""

    def __init__(self, ops: Ops, rows: Rows) -> None:
        self.ops, self.rows = ops, rows

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.ops.exact:
            return packed_attention(q, k, v, self.rows, self.ops.contract)
        return packed_attention_plain(q, k, v, self.rows)


class PagedState:
    """A paged KV cache per layer (engine). Set `rows` before each forward."""

    def __init__(self, ops: Ops, layers: int, num_pages: int, shape: HeadShape, dtype: torch.dtype) -> None:
        self.ops = ops
        if ops.exact:
            self.pages = [new_pages(num_pages, shape, dtype) for _ in range(layers)]
        else:
            self.pages = [new_pages_plain(num_pages, shape.kv_heads, shape.dim, dtype) for _ in range(layers)]
        self._no_lse = torch.empty(0)

    @property
    def rows(self) -> Rows:
        return self._rows

    @rows.setter
    def rows(self, rows: Rows) -> None:
        self._rows = rows
        self._groups = [] if self.ops.exact else padded_rows(rows)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k_pages, v_pages = self.pages[layer]
        if not self.ops.exact:
            return paged_attention_plain(q, k, v, self.rows, self._groups, k_pages, v_pages)
        write_kv(k, v, self.rows, k_pages, v_pages)
        return paged_attention(q, self.rows, k_pages, v_pages, self.ops.contract, self._no_lse)

    def fill(self, value: float) -> None:
        """Overwrites the whole cache; with NaN it shows that nothing stale is ever read."""
        for k_pages, v_pages in self.pages:
            k_pages.fill_(value)
            v_pages.fill_(value)
