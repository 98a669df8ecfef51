"""Keys and values of a forward on a GPU; see attention_state.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from exactrl.ops.qkv import HeadShape

if TYPE_CHECKING:
    from exactrl.ops.cuda.binding import CudaOps, CudaRows
    from exactrl.ops.interface import HeadArguments


class CudaPackedState:
    """Whole sequences side by side, each from position 0 (trainer). Differentiable."""

    def __init__(self, ops: CudaOps, rows: CudaRows) -> None:
        self.ops, self.rows = ops, rows

    def qkv(
        self, layer: int, x: torch.Tensor, heads: HeadArguments, seen: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        return self.ops.qkv(x, *heads)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        assert k is not None, "packed attention has no cache"
        assert v is not None, "packed attention has no cache"
        return self.ops.packed_attention(q, k, v, self.rows)


class CudaPagedState:
    """A paged KV cache per layer (engine). Set `rows` before each forward. Keys and values go from the fused kernel
    into the cache; only a probe gets them as tensors, read back from where attention reads them."""

    rows: CudaRows

    def __init__(self, ops: CudaOps, layers: int, num_pages: int, shape: HeadShape, dtype: torch.dtype) -> None:
        """Raises torch.OutOfMemoryError."""
        self.ops = ops
        self.pages, self._memory = ops.new_cache(layers, num_pages, shape, dtype)

    def qkv(
        self, layer: int, x: torch.Tensor, heads: HeadArguments, seen: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        q = self.ops.qkv_into_cache(x, heads, self.rows, self.pages[layer])
        if not seen:
            return q, None, None
        k, v = (pages.flatten(0, 1)[self.rows.slots] for pages in self.pages[layer])
        return q, k, v

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        for given, pages in zip((k, v), self.pages[layer], strict=True):
            if given is not None:  # a probe may have replaced it
                pages.flatten(0, 1)[self.rows.slots] = given
        return self.ops.paged_attention(q, self.rows, self.pages[layer])

    def attend_into(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """As `attend` where the cache has keys and values already; the result goes to `out`."""
        self.ops.paged_attention(q, self.rows, self.pages[layer], out)

    def give_back(self) -> None:
        """Gives the memory back; addresses, and graphs captured with them, stay."""
        if self._memory is not None:
            self._memory.give_back()

    def take_again(self) -> None:
        """After `give_back`; nothing of what was cached is left. Raises torch.OutOfMemoryError."""
        if self._memory is not None:
            self._memory.take()

    def fill(self, value: float) -> None:
        """Overwrites the whole cache; with NaN it shows that nothing stale is ever read."""
        for k_pages, v_pages in self.pages:
            k_pages.fill_(value)
            v_pages.fill_(value)
