"""Attention with the splits in parallel where latency counts, in CUDA C++ for sm_90: a cluster of blocks to a split.

Kernel: cluster_attention.cu with the files it needs; definition: attention.py; the list of splits is that of
triton_split_attention.py. At most 8 rows x grouped heads of a sequence.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch

from exactrl.ops.cuda.attention_host import scale_of
from exactrl.ops.cuda.attention_tiles import ClusterTile
from exactrl.ops.cuda.listed_splits import listed_plan, options_of, source_of
from exactrl.ops.cuda.nvrtc import Kernel
from exactrl.ops.cuda.triton_attention import page_size_of, strides

if TYPE_CHECKING:
    from exactrl.ops.cuda.attention import AttentionRows

THREADS = 256


def source() -> str:
    return source_of("cluster_attention.cu")


def source_options(heads: int, kv_heads: int, dim: int, page_size: int, tile: ClusterTile) -> list[str]:
    return options_of(
        heads, kv_heads, dim, page_size, CTAS=tile.blocks, RESIDENT=tile.resident(dim),
        SHARED_BYTES=tile.shared_bytes(dim),
    )  # fmt: skip


@functools.cache
def _kernel(heads: int, kv_heads: int, dim: int, page_size: int, tile: ClusterTile, device: int) -> tuple[Kernel, int]:
    """The kernel, and how many of its clusters the device holds."""
    options = source_options(heads, kv_heads, dim, page_size, tile)
    kernel = Kernel(source(), "attend_clusters", options, tile.shared_bytes(dim))
    return kernel, kernel.most_clusters(THREADS, tile.blocks)


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
    plan = listed_plan(rows, sequences, heads, kv_heads, dim, page_size, tile.blocks)
    kernel, most_clusters = _kernel(heads, kv_heads, dim, page_size, tile, torch.cuda.current_device())
    splits = plan.splits
    clusters = min(len(splits.items) * kv_heads, most_clusters)
    kernel.launch((clusters * tile.blocks, 1, 1), THREADS, (
        q, k, v, out, out if lse is None else lse, int(lse is not None), plan.items, splits.total, plan.counters,
        splits.partial, splits.stats, t, splits.held, *strides(q, k, v, page_size), scale_of(dim),
    ), cluster=tile.blocks)  # fmt: skip
