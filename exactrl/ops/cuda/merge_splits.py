"""Merges the partial results of splits in a launch of its own, in CUDA C++. Kernel: merge_splits.cu; definition:
attention.py."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from exactrl.ops.cuda.nvrtc import Kernel
from exactrl.ops.cuda.triton_split_attention import SplitPlan

FOLDER = Path(__file__).parent
FILES = ("hopper.cuh", "split_items.cuh", "split_merge.cuh", "merge_splits.cu")
THREADS = 128
MERGED = 32  # splits in flight


def source() -> str:
    return "".join((FOLDER / name).read_text() for name in FILES)


def source_options(heads: int, kv_heads: int, dim: int) -> list[str]:
    values = {"DIM": dim, "HEADS": heads, "KV_HEADS": kv_heads, "PAGE_SIZE": 64, "MERGED": MERGED}  # no page is read
    return ["--fmad=false", *(f"-D{name}={value}" for name, value in values.items())]


@functools.cache
def _kernel(heads: int, kv_heads: int, dim: int, device: int) -> Kernel:
    return Kernel(source(), "merge_splits", source_options(heads, kv_heads, dim))


def merge_splits(plan: SplitPlan, heads: int, kv_heads: int, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Fills the rows of all sequences of `plan` that have more than one split."""
    t, _, dim = out.shape
    kernel = _kernel(heads, kv_heads, dim, torch.cuda.current_device())
    kernel.launch((len(plan.merges) * kv_heads, 1, 1), THREADS, (
        out, out if lse is None else lse, int(lse is not None), plan.merges, plan.partial, plan.stats, plan.rows.starts,
        plan.rows.lengths, t, plan.held,
    ))  # fmt: skip
