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


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """A batch's list of splits, and a counter for each (sequence, kv head, block of a cluster), 0 between launches."""

    splits: SplitPlan
    arrived: torch.Tensor

    def refresh(self) -> None:
        """The list is refreshed by itself; a launch that was stopped leaves counters behind."""
        self.arrived.zero_()


def _plan(rows: AttentionRows, sequences: np.ndarray, heads: int, kv_heads: int, dim: int, blocks: int) -> ClusterPlan:
    splits = split_plan(rows, sequences, heads, kv_heads, dim)
    key = ("cluster", heads, kv_heads, dim, blocks, sequences.tobytes())
    if key not in rows.plans:
        counters = torch.zeros(len(rows.counts), kv_heads, blocks, dtype=torch.int32, device=rows.starts.device)
        rows.plans[key] = ClusterPlan(splits, counters)
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
    plan = _plan(rows, sequences, heads, kv_heads, dim, tile.blocks)
    kernel, most_clusters = _kernel(heads, kv_heads, dim, page_size, tile, torch.cuda.current_device())
    splits = plan.splits
    clusters = min(len(splits.items) * kv_heads, most_clusters)
    kernel.launch((clusters * tile.blocks, 1, 1), THREADS, (
        q, k, v, out, out if lse is None else lse, int(lse is not None), splits.items, splits.total, plan.arrived,
        splits.partial, splits.stats, rows.starts, rows.lengths, rows.tables, rows.tables.stride(0), t, splits.held,
        *strides(q, k, v, page_size), scale_of(dim),
    ), cluster=tile.blocks)  # fmt: skip
