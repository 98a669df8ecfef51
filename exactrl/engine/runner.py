"""Computes scheduled steps: op by op, or, on a GPU, by replaying graphs (decode_graphs.py, piecewise_graphs.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from exactrl.engine.batch import Batch
from exactrl.engine.decode_graphs import DecodeGraphs
from exactrl.engine.piecewise_graphs import PiecewiseGraphs
from exactrl.engine.results import Computed, Results
from exactrl.model.attention_state import CacheState
from exactrl.model.qwen3 import Probe, Qwen3, unchanged
from exactrl.ops.transfer import on_device

if TYPE_CHECKING:
    from exactrl.engine.scheduler import Chunk


@dataclass(slots=True)
class Runner:
    """Steps over one cache, in the order of the calls. `see` as in Engine; `graphs` and `pieces` serve the steps they
    can."""

    model: Qwen3
    cache: CacheState
    results: Results
    see: Probe = unchanged
    graphs: DecodeGraphs | None = None
    pieces: PiecewiseGraphs | None = None

    @property
    def num_captured(self) -> int:
        """Sizes of steps for which graphs exist."""
        return sum(graphs.num_captured for graphs in (self.graphs, self.pieces) if graphs is not None)

    def launch(self, chunks: Sequence[Chunk]) -> Computed:
        """Starts a step; nothing waits for the GPU. Tokens that are pending come from the step launched before."""
        if self.graphs is not None and self.see is unchanged and self.graphs.serves(chunks):
            return self.graphs.launch(chunks)
        ops = self.model.ops
        batch = on_device(Batch.build(chunks, self.model.shape, ops), ops.device)
        if self.see is not unchanged:
            self.see("rows", batch.rows.owners(torch.tensor([c.seq.index for c in chunks])))
        ids = batch.known_ids(self.results.tokens)
        hidden = self._forward(ids, batch)
        predicting = hidden[self.see("predicting", batch.sample_rows)]
        tokens, logprobs = ops.sample(
            predicting, self.model.head, batch.temperatures, batch.keys, batch.sample_positions
        )
        tokens, logprobs = self.see("sample", tokens), self.see("logprob", logprobs)
        self.results.store(tokens, logprobs)
        return self.results.send(len(tokens))

    def _forward(self, ids: torch.Tensor, batch: Batch) -> torch.Tensor:
        if self.pieces is not None and self.see is unchanged and self.pieces.serves(len(ids)):
            return self.pieces.forward(ids, batch.positions, batch.rows)
        self.cache.rows = batch.rows
        return self.model(ids, batch.positions, self.cache, self.see)
