"""The list of a batch's splits with their pages, made once a step for the CUDA C++ kernels: listed_items.cuh."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from exactrl.ops.cuda.nvrtc import Kernel
from exactrl.ops.cuda.triton_split_attention import SplitPlan, split_plan

if TYPE_CHECKING:
    from exactrl.ops.cuda.attention import AttentionRows

FOLDER = Path(__file__).parent
LISTED = 40  # words of an item: 8, and the pages of every 16th key


def source_of(*names: str) -> str:
    files = ("hopper.cuh", "warp_tiles.cuh", "split_items.cuh", "listed_items.cuh", *names)
    return "".join((FOLDER / name).read_text() for name in files)


def options_of(heads: int, kv_heads: int, dim: int, page_size: int, **others: int) -> list[str]:
    values = {"DIM": dim, "HEADS": heads, "KV_HEADS": kv_heads, "PAGE_SIZE": page_size, **others}
    return ["--fmad=false", *(f"-D{name}={value}" for name, value in values.items())]


@functools.cache
def _lister(page_size: int, device: int) -> Kernel:
    return Kernel(source_of(), "list_items", options_of(1, 1, 64, page_size))


@dataclass(frozen=True, slots=True)
class ListedPlan:
    """items int32 [capacity, LISTED]; counters int32, 0 between launches: `each` for every (sequence, kv head), and one
    more."""

    splits: SplitPlan
    lister: Kernel
    items: torch.Tensor
    counters: torch.Tensor

    def refresh(self) -> None:
        """After that of `splits`."""
        splits, rows = self.splits, self.splits.rows
        assert rows.tables is not None, "splits in parallel read pages"
        self.lister.launch((len(self.items), 1, 1), 32, (
            splits.items, splits.total, rows.starts, rows.lengths, rows.tables, rows.tables.stride(0), self.items,
        ))  # fmt: skip
        self.counters.zero_()  # a launch that was stopped leaves some behind


def listed_plan(
    rows: AttentionRows, sequences: np.ndarray, heads: int, kv_heads: int, dim: int, page_size: int, each: int = 1
) -> ListedPlan:
    """Made once for a batch."""
    splits = split_plan(rows, sequences, heads, kv_heads, dim)  # refreshed before what is added here
    key = ("listed", heads, kv_heads, dim, page_size, each, sequences.tobytes())
    if key not in rows.plans:
        items = torch.empty(len(splits.items), LISTED, dtype=torch.int32, device=rows.starts.device)
        counters = torch.zeros(len(rows.counts) * kv_heads * each + 1, dtype=torch.int32, device=rows.starts.device)
        rows.plans[key] = plan = ListedPlan(splits, _lister(page_size, torch.cuda.current_device()), items, counters)
        plan.refresh()
    return rows.plans[key]
