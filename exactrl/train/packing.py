"""Samples to flat micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from exactrl.ops.interface import ModelOps
from exactrl.ops.qkv import HeadShape
from exactrl.types import Sample


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """S whole samples side by side: T input tokens, N response tokens.

    The last response token is predicted but never an input, so a sample of P prompt and R response tokens has
    P + R - 1 inputs, and input row P - 1 + i predicts response token i. Everything follows from lengths, nothing from
    token ids (a pad id may well be an end-of-sequence id).

    ids, positions int64 [T]; predict int64 [N] rows that predict; targets int64 [N]; temperatures float32 [N];
    sequence_ids int64 [N]; lengths: response lengths of the S samples.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    rows: Any
    predict: torch.Tensor
    targets: torch.Tensor
    temperatures: torch.Tensor
    sequence_ids: torch.Tensor
    lengths: tuple[int, ...]

    @classmethod
    def build(cls, samples: Sequence[Sample], shape: HeadShape, ops: ModelOps) -> MicroBatch:
        """On the host, but for `rows` (interface.BatchRows)."""
        prompts = np.array([len(s.prompt_token_ids) for s in samples])
        lengths = np.array([len(s.token_ids) for s in samples])
        inputs = prompts + lengths - 1
        starts = np.concatenate([[0], np.cumsum(inputs)]).astype(np.int64)
        ids = np.concatenate([np.array([*s.prompt_token_ids, *s.token_ids[:-1]], np.int64) for s in samples])
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1], inputs)
        first = starts[:-1] + prompts - 1
        predict = np.concatenate([np.arange(a, a + n) for a, n in zip(first, lengths, strict=True)])
        return cls(
            ids=torch.from_numpy(ids),
            positions=torch.from_numpy(positions),
            rows=ops.packed_rows(inputs.astype(np.int64), shape),
            predict=torch.from_numpy(predict),
            targets=torch.tensor([t for s in samples for t in s.token_ids]),
            temperatures=torch.from_numpy(np.repeat(np.array([s.temperature for s in samples], np.float32), lengths)),
            sequence_ids=torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)),
            lengths=tuple(lengths.tolist()),
        )


def pack(samples: Sequence[Sample], budget: int) -> list[list[int]]:
    """Indices of the samples of each micro-batch, in order, each of at most `budget` input tokens.

    A sample longer than the budget is a micro-batch of its own: it is never cut.
    """
    batches: list[list[int]] = []
    room = 0
    for i, sample in enumerate(samples):
        size = len(sample.prompt_token_ids) + len(sample.token_ids) - 1
        if not batches or size > room:
            batches.append([])
            room = budget
        batches[-1].append(i)
        room -= size
    return batches
