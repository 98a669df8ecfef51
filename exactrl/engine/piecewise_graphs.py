"""Steps with prompts in them on a GPU, as captured pieces: everything between two attentions is one graph.

Attention itself, which needs the host's lengths where a sequence has many rows, is launched between the pieces. They
are captured for a number of tokens, rounded up; rows that no token needs write nothing to the cache and are not read,
as in decode_graphs.py. Op by op a step of a small model takes several times as long to launch as to compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from exactrl.engine.capture import Capture, Replay
from exactrl.engine.decode_graphs import rows_of
from exactrl.model.attention_state import CacheState, Tensors
from exactrl.model.cuda_attention_state import CudaPagedState
from exactrl.model.qwen3 import Qwen3

if TYPE_CHECKING:
    from exactrl.ops.cuda.binding import CudaRows
    from exactrl.ops.interface import HeadArguments

MOST_TOKENS = 2048  # of a step that is captured: larger ones take longer to compute than to launch


@dataclass(frozen=True, slots=True)
class _Rows:
    """Of a batch, what a layer reads outside attention."""

    slots: torch.Tensor


@dataclass(slots=True)
class _Pieces:
    """Graphs for one number of tokens T and what they read and write; `hidden` [T, hidden], `rope` is kept alive."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    hidden: torch.Tensor
    replays: list[Replay]
    rope: object


@dataclass(slots=True)
class _Cut:
    """The attention state of a forward that is captured: a layer's queries go to `queries`, then the piece ends; the
    next one finds the layer's attention in `attended`."""

    cache: CudaPagedState
    rows: _Rows
    queries: torch.Tensor
    attended: torch.Tensor
    cut: Callable[[], None]

    def qkv(self, layer: int, x: torch.Tensor, heads: HeadArguments, seen: bool) -> Tensors:
        self.cache.rows = cast("CudaRows", self.rows)
        return self.cache.qkv(layer, x, heads, seen)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        assert k is None and v is None, "keys and values go into the cache in the kernel before"  # noqa: PT018
        self.queries.copy_(q)
        self.cut()
        return self.attended


class PiecewiseGraphs:
    """See the module."""

    def __init__(self, model: Qwen3, cache: CacheState, max_tokens: int, capture: Capture) -> None:
        """`max_tokens`: prompt + response of the longest sequence."""
        self.model, self.cache, self._capture = model, cast(CudaPagedState, cache), capture
        self._pieces: dict[int, _Pieces] = {}
        shape = (MOST_TOKENS, model.shape.heads, model.shape.dim)  # of all sizes: one layer's are in use at a time
        self._queries, self._attended = (
            torch.zeros(shape, dtype=model.dtype, device=model.ops.device) for _ in range(2)
        )
        model.reserve_positions(max_tokens)

    @property
    def num_captured(self) -> int:
        """Numbers of tokens."""
        return len(self._pieces)

    def serves(self, tokens: int) -> bool:
        return tokens <= MOST_TOKENS

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, rows: CudaRows) -> torch.Tensor:
        """As the model's, over the cache: ids, positions int64 [T] -> [T, hidden], valid until the next call."""
        count, size = len(ids), rows_of(len(ids), MOST_TOKENS)
        if (pieces := self._pieces.get(size)) is None:
            pieces = self._pieces[size] = self._captured(size)
        assert rows.slots is not None, "packed rows have no cache"
        for into, given in ((pieces.ids, ids), (pieces.positions, positions), (pieces.slots, rows.slots)):
            into[:count] = given
        pieces.slots[count:] = -1  # ids and positions may be those of an earlier step
        queries, attended = self._queries[:count], self._attended[:count]
        *layers, last = pieces.replays
        for layer, replay in enumerate(layers):
            replay()
            self.cache.rows = rows
            self.cache.attend_into(layer, queries, attended)
        last()
        return pieces.hidden[:count]

    def _captured(self, size: int) -> _Pieces:
        """Captured on rows that are all padding: it leaves the cache as it is."""
        ids, positions = (torch.zeros(size, dtype=torch.int64, device=self.model.ops.device) for _ in range(2))
        slots = torch.full_like(ids, -1)
        hidden = torch.zeros(size, self.model.config.hidden_size, dtype=self.model.dtype, device=ids.device)

        def run(cut: Callable[[], None]) -> None:
            state = _Cut(self.cache, _Rows(slots), self._queries[:size], self._attended[:size], cut)
            hidden.copy_(self.model(ids, positions, state))

        return _Pieces(ids, positions, slots, hidden, self._capture(run), self.model.rope)
