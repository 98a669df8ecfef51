"""Merges the partial results of splits in a launch of its own, in CUDA C++. Kernel: merge_splits.cu; definition:
attention.py."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from exactrl.ops.cuda.nvrtc import Kernel
from exactrl.ops.cuda.triton_split_attention import SPLIT, SplitPlan

FOLDER = Path(__file__).parent
FILES = ("hopper.cuh", "split_items.cuh", "merge_splits.cu")
THREADS = 128


@dataclass(frozen=True, slots=True)
class MergeTile:
    """A thread takes `width` columns (1 or 4) of a row, and `in_flight` splits before it uses the first."""

    width: int
    in_flight: int

    def parts(self, held: int, dim: int) -> int:
        """Blocks for the rows of one (sequence, kv head)."""
        return -(-held * dim // (THREADS * self.width))


FEW, MANY = MergeTile(4, 8), MergeTile(1, 48)  # splits of the longest sequence


def source() -> str:
    return "".join((FOLDER / name).read_text() for name in FILES)


def source_options(heads: int, kv_heads: int, dim: int, parts: int, tile: MergeTile) -> list[str]:
    values = {
        "DIM": dim, "HEADS": heads, "KV_HEADS": kv_heads, "PAGE_SIZE": 64, "WIDTH": tile.width,
        "PARTS": parts, "IN_FLIGHT": tile.in_flight,
    }  # fmt: skip
    return ["--fmad=false", *(f"-D{name}={value}" for name, value in values.items())]


@functools.cache
def _kernel(heads: int, kv_heads: int, dim: int, parts: int, tile: MergeTile, device: int) -> Kernel:
    return Kernel(source(), "merge_splits", source_options(heads, kv_heads, dim, parts, tile))


def merge_splits(
    plan: SplitPlan, most_keys: int, heads: int, kv_heads: int, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Fills the rows of all sequences of `plan` that have more than one split; none has more than `most_keys` keys. The
    launch before, which stores their partial results, may still run."""
    if most_keys <= SPLIT:
        return
    t, _, dim = out.shape
    tile = FEW if most_keys <= FEW.in_flight * SPLIT else MANY
    parts = tile.parts(plan.held, dim)
    kernel = _kernel(heads, kv_heads, dim, parts, tile, torch.cuda.current_device())
    kernel.launch((len(plan.merges) * kv_heads * parts, 1, 1), THREADS, (
        out, out if lse is None else lse, int(lse is not None), plan.merges, plan.partial, plan.stats, plan.rows.starts,
        plan.rows.lengths, t, plan.held,
    ), overlaps=True)  # fmt: skip
