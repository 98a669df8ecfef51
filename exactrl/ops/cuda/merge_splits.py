"""Merges the partial results of splits in a launch of its own, in CUDA C++. Kernel: merge_splits.cu; definition:
attention.py."""

from __future__ import annotations

import functools

import torch

from exactrl.contract import AttentionShape
from exactrl.ops.cuda.listed_splits import Arguments, ListedPlan, options_of, source_of
from exactrl.ops.cuda.nvrtc import Kernel, Launch
from exactrl.ops.cuda.triton_split_attention import SPLIT

FILES = ("merge_splits.cu",)
THREADS = 128
FEW, MANY = 8, 32
"""Splits of each sequence that are loaded before the first is used: where the longest has up to FEW, and beyond."""


def source_options(shape: AttentionShape, parts: int, in_flight: int) -> list[str]:
    return options_of(shape, PARTS=parts, IN_FLIGHT=in_flight)


@functools.cache
def _kernel(shape: AttentionShape, parts: int, in_flight: int, device: int) -> Kernel:
    return Kernel(source_of(*FILES), "merge_splits", source_options(shape, parts, in_flight))


def merge_splits(plan: ListedPlan, arguments: Arguments, early: bool = False) -> None:
    """Fills the rows of all sequences of `plan` that have more than one split. The launch before is the one that stores
    their partial results; with `early` this one may come and wait while it runs, where there are few splits."""
    if plan.most_keys <= SPLIT:
        return

    def make() -> Launch:
        shape, splits = plan.shape, plan.splits
        parts = -(-splits.held * shape.dim // (THREADS * 4))
        in_flight = FEW if plan.most_keys <= FEW * SPLIT else MANY
        kernel = _kernel(shape, parts, in_flight, torch.cuda.current_device())
        return kernel.ready((len(splits.merges) * shape.kv_heads * parts, 1, 1), THREADS, (
            arguments, splits.merges, splits.rows.starts, splits.rows.lengths,
        ), early=early and in_flight == FEW)  # fmt: skip

    plan.ready("merge after early" if early else "merge", make)()
