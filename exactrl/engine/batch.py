"""One step's chunks as the flat arrays that the model and the sampler read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from exactrl.engine.scheduler import Chunk
from exactrl.ops.interface import ModelOps
from exactrl.ops.qkv import HeadShape
from exactrl.ops.rows import row_positions


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of S chunks, R of which are followed by a sampled token.

    ids, positions   int64 [T]
    rows             attention's view of them (interface.BatchRows)
    sample_rows      int64 [R]  rows whose hidden state is sampled from
    sample_positions int64 [R]  position the sampled token will have
    temperatures     float32 [R]
    keys             uint64 [R]  noise keys
    """

    ids: torch.Tensor
    positions: torch.Tensor
    rows: Any
    sample_rows: torch.Tensor
    sample_positions: torch.Tensor
    temperatures: torch.Tensor
    keys: np.ndarray

    @classmethod
    def build(cls, chunks: Sequence[Chunk], shape: HeadShape, ops: ModelOps) -> Batch:
        """On the host, but for `rows`."""
        counts = np.fromiter((c.num_tokens for c in chunks), np.int64, len(chunks))
        first = np.fromiter((c.start for c in chunks), np.int64, len(chunks))
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        ids: list[int] = []
        for c in chunks:
            ids += c.seq.token_ids[c.start : c.start + c.num_tokens]
        positions = row_positions(starts, first)
        sampling = [(i, c.seq) for i, c in enumerate(chunks) if c.samples]
        last = starts[1:][[i for i, _ in sampling]] - 1
        requests = [seq.request for _, seq in sampling]
        return cls(
            ids=torch.tensor(ids, dtype=torch.int64),
            positions=torch.from_numpy(positions),
            rows=ops.rows(starts, first, _tables(chunks), shape),
            sample_rows=torch.from_numpy(last),
            sample_positions=torch.tensor([seq.num_tokens for _, seq in sampling], dtype=torch.int64),
            temperatures=torch.tensor([r.params.temperature for r in requests], dtype=torch.float32),
            keys=np.array([r.noise_key for r in requests], np.uint64),
        )


def _tables(chunks: Sequence[Chunk]) -> np.ndarray:
    """Block tables, int32 [S, longest], padded with 0 (never read)."""
    longest = max(len(c.seq.block_ids) for c in chunks)
    tables = np.zeros((len(chunks), longest), np.int32)
    for row, c in zip(tables, chunks, strict=True):
        row[: len(c.seq.block_ids)] = c.seq.block_ids
    return tables
