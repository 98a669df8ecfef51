"""Attention with the splits in parallel where latency counts, in CUDA C++ for sm_90: a cluster of blocks to a split.

Kernel: cluster_attention.cu with the files it needs; definition: attention.py; the list of splits is that of
triton_split_attention.py. At most 8 rows x grouped heads of a sequence.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from exactrl.ops.cuda.attention_host import scale_of
from exactrl.ops.cuda.attention_tiles import ClusterTile
from exactrl.ops.cuda.nvrtc import Kernel
from exactrl.ops.cuda.split_attention import FOLDER
from exactrl.ops.cuda.triton_attention import page_size_of, strides
from exactrl.ops.cuda.triton_split_attention import SplitPlan, split_plan

if TYPE_CHECKING:
    from exactrl.ops.cuda.attention import AttentionRows

FILES = ("hopper.cuh", "warp_tiles.cuh", "split_items.cuh", "cluster_attention.cu")
THREADS = 256
LISTED = 40  # words of an item: 8, and the pages of every 16th key
LISTING = ClusterTile(4)  # any: the list does not depend on it


def source() -> str:
    return "".join((FOLDER / name).read_text() for name in FILES)


def source_options(heads: int, kv_heads: int, dim: int, page_size: int, tile: ClusterTile) -> list[str]:
    values = {
        "DIM": dim, "HEADS": heads, "KV_HEADS": kv_heads, "PAGE_SIZE": page_size, "CTAS": tile.blocks,
        "RESIDENT": tile.resident(dim), "SHARED_BYTES": tile.shared_bytes(dim), "FETCH": tile.fetch,
        "SIGNAL_LATE": int(tile.late),
    }  # fmt: skip
    return ["--fmad=false", *(f"-D{name}={value}" for name, value in values.items())]


@functools.cache
def _kernel(heads: int, kv_heads: int, dim: int, page_size: int, tile: ClusterTile, device: int) -> tuple[Kernel, int]:
    """The kernel, and how many of its clusters the device holds."""
    options = source_options(heads, kv_heads, dim, page_size, tile)
    kernel = Kernel(source(), "attend_clusters", options, tile.shared_bytes(dim))
    return kernel, kernel.most_clusters(THREADS, tile.blocks)


@functools.cache
def _lister(heads: int, kv_heads: int, dim: int, page_size: int, device: int) -> Kernel:
    options = source_options(heads, kv_heads, dim, page_size, LISTING)
    return Kernel(source(), "list_items", options, label="attend_clusters")


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """A batch's list of splits with their pages (int32 [capacity, LISTED], see the kernel), and a counter for each
    (sequence, kv head, block of a cluster), 0 between launches."""

    splits: SplitPlan
    lister: Kernel
    items: torch.Tensor
    arrived: torch.Tensor

    def refresh(self) -> None:
        """After that of `splits`."""
        splits, rows = self.splits, self.splits.rows
        assert rows.tables is not None, "splits in parallel read pages"
        self.lister.launch((len(self.items), 1, 1), 32, (
            splits.items, splits.total, rows.starts, rows.lengths, rows.tables, rows.tables.stride(0), self.items,
        ))  # fmt: skip
        self.arrived.zero_()  # a launch that was stopped leaves counters behind


def _plan(
    rows: AttentionRows, sequences: np.ndarray, heads: int, kv_heads: int, dim: int, page_size: int, blocks: int
) -> ClusterPlan:
    splits = split_plan(rows, sequences, heads, kv_heads, dim)  # refreshed before what is added here
    key = ("cluster", heads, kv_heads, dim, page_size, blocks, sequences.tobytes())
    if key not in rows.plans:
        items = torch.empty(len(splits.items), LISTED, dtype=torch.int32, device=rows.starts.device)
        counters = torch.zeros(len(rows.counts), kv_heads, blocks, dtype=torch.int32, device=rows.starts.device)
        lister = _lister(heads, kv_heads, dim, page_size, torch.cuda.current_device())
        rows.plans[key] = plan = ClusterPlan(splits, lister, items, counters)
        plan.refresh()
    return rows.plans[key]


def attend_clusters(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: AttentionRows,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sequences: np.ndarray,
    tile: ClusterTile,
) -> None:
    """AttentionImplementation.attend. Row strides of q are even, those of k and v multiples of 8."""
    t, heads, dim = q.shape
    kv_heads, page_size = k.shape[-2], page_size_of(k, rows)
    assert rows.tables is not None, "splits in parallel read pages"
    assert out.is_contiguous(), out.stride()
    most = int(rows.counts[sequences].max()) * (heads // kv_heads)
    assert most <= tile.rows, f"{most} rows x grouped heads of one sequence, but the kernel holds {tile.rows}"
    plan = _plan(rows, sequences, heads, kv_heads, dim, page_size, tile.blocks)
    kernel, most_clusters = _kernel(heads, kv_heads, dim, page_size, tile, torch.cuda.current_device())
    splits = plan.splits
    clusters = min(len(splits.items) * kv_heads, most_clusters)
    kernel.launch((clusters * tile.blocks, 1, 1), THREADS, (
        q, k, v, out, out if lse is None else lse, int(lse is not None), plan.items, splits.total, plan.arrived,
        splits.partial, splits.stats, t, splits.held, *strides(q, k, v, page_size), scale_of(dim),
    ), cluster=tile.blocks)  # fmt: skip
