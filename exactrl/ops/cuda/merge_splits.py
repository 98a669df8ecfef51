"""Merges the partial results of splits in a launch of its own, in CUDA C++. Kernel: merge_splits.cu; definition:
attention.py."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from exactrl.ops.cuda.nvrtc import Kernel
from exactrl.ops.cuda.triton_split_attention import SPLIT, SplitPlan

FOLDER = Path(__file__).parent
FILES = ("hopper.cuh", "split_items.cuh", "merge_splits.cu")
THREADS = 128
FEW, MANY = 8, 32
"""Splits of each sequence that are loaded before the first is used: where the longest has up to FEW, and beyond."""


def source() -> str:
    return "".join((FOLDER / name).read_text() for name in FILES)


def source_options(heads: int, kv_heads: int, dim: int, parts: int, in_flight: int) -> list[str]:
    values = {
        "DIM": dim, "HEADS": heads, "KV_HEADS": kv_heads, "PAGE_SIZE": 64, "PARTS": parts, "IN_FLIGHT": in_flight,
    }  # fmt: skip
    return ["--fmad=false", *(f"-D{name}={value}" for name, value in values.items())]


@functools.cache
def _kernel(heads: int, kv_heads: int, dim: int, parts: int, in_flight: int, device: int) -> Kernel:
    return Kernel(source(), "merge_splits", source_options(heads, kv_heads, dim, parts, in_flight))


def merge_splits(
    plan: SplitPlan, most_keys: int, heads: int, kv_heads: int, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Fills the rows of all sequences of `plan` that have more than one split; none has more than `most_keys` keys. The
    launch before is the one that stores their partial results."""
    if most_keys <= SPLIT:
        return
    t, _, dim = out.shape
    parts = -(-plan.held * dim // (THREADS * 4))
    kernel = _kernel(
        heads, kv_heads, dim, parts, FEW if most_keys <= FEW * SPLIT else MANY, torch.cuda.current_device()
    )
    kernel.launch((len(plan.merges) * kv_heads * parts, 1, 1), THREADS, (
        out, out if lse is None else lse, int(lse is not None), plan.merges, plan.partial, plan.stats, plan.rows.starts,
        plan.rows.lengths, t, plan.held,
    ))  # fmt: skip
