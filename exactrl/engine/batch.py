"""One step's chunks as the flat arrays that the model and the sampler read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from exactrl.engine.step import Step
from exactrl.ops.interface import ModelOps
from exactrl.ops.qkv import HeadShape
from exactrl.ops.rows import row_positions
from exactrl.ops.transfer import key_bits


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of S chunks, R of which are followed by a sampled token.

    ids, positions   int64 [T]
    sources          int64 [T]: where an id is pending (Chunk.source), else -1; None where none is
    rows             attention's view of them (interface.BatchRows)
    sample_rows      int64 [R]  rows whose hidden state is sampled from
    sample_positions int64 [R]  position the sampled token will have
    temperatures     float32 [R]
    keys             int64 [R]  noise keys, the bits of the unsigned numbers
    """

    ids: torch.Tensor
    sources: torch.Tensor | None
    positions: torch.Tensor
    rows: Any
    sample_rows: torch.Tensor
    sample_positions: torch.Tensor
    temperatures: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def build(cls, step: Step, shape: HeadShape, ops: ModelOps) -> Batch:
        """On the host, but for `rows`."""
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(step.num_tokens)])
        ids: list[int] = []
        for c in step:
            ids += c.seq.token_ids[c.start : c.start + c.num_tokens]
            if c.source >= 0:
                ids.append(0)
        positions = row_positions(starts, step.start)
        last = starts[1:][step.samples] - 1
        requests = [seq.request for seq in step.sampling]
        return cls(
            ids=torch.tensor(ids, dtype=torch.int64),
            sources=_sources(step, starts),
            positions=torch.from_numpy(positions),
            rows=ops.rows(starts, step.start, _tables(step), shape),
            sample_rows=torch.from_numpy(last),
            sample_positions=torch.from_numpy(positions[last] + 1),
            temperatures=torch.tensor([r.params.temperature for r in requests], dtype=torch.float32),
            keys=key_bits([r.noise_key for r in requests]),
        )

    def known_ids(self, sampled: torch.Tensor) -> torch.Tensor:
        """int64 [T]: ids, with those that are pending taken from `sampled`, the tokens of the step before."""
        return self.ids if self.sources is None else with_pending(self.ids, self.sources, sampled)


def with_pending(ids: torch.Tensor, sources: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """int64 [T]: ids, or entry `sources` of `sampled` where that is not negative."""
    return torch.where(sources < 0, ids, sampled[sources.clamp(min=0)])


def _sources(step: Step, starts: np.ndarray) -> torch.Tensor | None:
    if (step.source < 0).all():
        return None
    sources = np.full(starts[-1], -1, np.int64)
    sources[starts[1:] - 1] = step.source
    return torch.from_numpy(sources)


def _tables(step: Step) -> np.ndarray:
    """Block tables, int32 [S, longest], padded with 0 (never read)."""
    longest = max(len(seq.block_ids) for seq in step.seqs)
    tables = np.zeros((len(step), longest), np.int32)
    for row, seq in zip(tables, step.seqs, strict=True):
        row[: len(seq.block_ids)] = seq.block_ids
    return tables
