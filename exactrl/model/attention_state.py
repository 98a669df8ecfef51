"""Where a forward's keys and values live: the only difference between scoring, training and decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from exactrl.model.cuda_attention_state import CudaPackedState, CudaPagedState
from exactrl.ops import Ops
from exactrl.ops.attention import Rows, new_pages, packed_attention, paged_attention, write_kv
from exactrl.ops.attention_plain import new_pages_plain, packed_attention_plain, padded_rows, paged_attention_plain
from exactrl.ops.interface import ModelOps
from exactrl.ops.qkv import HeadShape

if TYPE_CHECKING:
    from exactrl.ops.cuda.binding import CudaOps
    from exactrl.ops.interface import HeadArguments

Tensors = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class AttentionState(Protocol):
    def qkv(self, layer: int, x: torch.Tensor, heads: HeadArguments, seen: bool) -> Tensors:
        """x [T, (H + 2 HK) D] -> q [T, H, D], k and v [T, HK, D]. A fused kernel may put k and v where attention reads
        them and return None for both, unless they are `seen` by a probe."""
        ...

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        """q [T, H, D], k, v as `qkv` returned them -> [T, H, D]; keys and values become visible first."""
        ...


class CacheState(AttentionState, Protocol):
    """A paged KV cache. Set `rows` before each forward; `fill` overwrites everything (parity checks). Between
    `give_back` and `take_again` it holds no memory where others may want it, on a GPU; what was cached is lost."""

    rows: Any

    def fill(self, value: float) -> None: ...

    def give_back(self) -> None: ...

    def take_again(self) -> None: ...


def packed_state(ops: ModelOps, rows: Any) -> AttentionState:
    """`rows` from ops.packed_rows."""
    if ops.backend == "cuda":
        return CudaPackedState(cast("CudaOps", ops), rows)
    return PackedState(cast(Ops, ops), rows)


def paged_state(ops: ModelOps, layers: int, num_pages: int, shape: HeadShape, dtype: torch.dtype) -> CacheState:
    if ops.backend == "cuda":
        return CudaPagedState(cast("CudaOps", ops), layers, num_pages, shape, dtype)
    return PagedState(cast(Ops, ops), layers, num_pages, shape, dtype)


class _Separate:
    """QK-norm and rotary embedding in one op, the cache in another."""

    ops: Ops

    def qkv(self, layer: int, x: torch.Tensor, heads: HeadArguments, seen: bool) -> Tensors:
        return self.ops.qkv(x, *heads)


class PackedState(_Separate):
    """Whole sequences side by side, each from position 0 (trainer). Differentiable."""

    def __init__(self, ops: Ops, rows: Rows) -> None:
        self.ops, self.rows = ops, rows

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        assert k is not None
        assert v is not None
        if self.ops.exact:
            return packed_attention(q, k, v, self.rows, self.ops.contract)
        return packed_attention_plain(q, k, v, self.rows)


class PagedState(_Separate):
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

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        assert k is not None
        assert v is not None
        k_pages, v_pages = self.pages[layer]
        if not self.ops.exact:
            return paged_attention_plain(q, k, v, self.rows, self._groups, k_pages, v_pages)
        write_kv(k, v, self.rows, k_pages, v_pages)
        return paged_attention(q, self.rows, k_pages, v_pages, self.ops.contract, self._no_lse)

    def give_back(self) -> None:
        """The memory stays: a trainer beside it has the rest."""

    def take_again(self) -> None:
        pass

    def fill(self, value: float) -> None:
        """Overwrites the whole cache; with NaN it shows that nothing stale is ever read."""
        for k_pages, v_pages in self.pages:
            k_pages.fill_(value)
            v_pages.fill_(value)
