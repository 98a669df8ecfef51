"""Attention with the splits in parallel, in CUDA C++ for sm_90: a block streams the keys and values of many splits.

Kernel: stream_attention.cu with the files it needs; definition: attention.py; the list of splits is that of
triton_split_attention.py. At most 8 rows x grouped heads of a sequence.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch

from exactrl.ops.cuda.attention_host import multiprocessors, page_map, scale_of
from exactrl.ops.cuda.attention_tiles import StreamTile
from exactrl.ops.cuda.listed_splits import listed_plan, options_of, source_of
from exactrl.ops.cuda.merge_splits import merge_splits
from exactrl.ops.cuda.nvrtc import Kernel
from exactrl.ops.cuda.triton_attention import BLOCK, page_size_of, strides

if TYPE_CHECKING:
    from exactrl.ops.cuda.attention import AttentionRows

THREADS = 9 * 32


def source() -> str:
    return source_of("stream_attention.cu")


def source_options(heads: int, kv_heads: int, dim: int, page_size: int, tile: StreamTile) -> list[str]:
    return options_of(
        heads, kv_heads, dim, page_size, RING=tile.ring, RESIDENT=tile.ctas, SHARED_BYTES=tile.shared_bytes(dim)
    )


@functools.cache
def _kernel(heads: int, kv_heads: int, dim: int, page_size: int, tile: StreamTile, device: int) -> Kernel:
    options = source_options(heads, kv_heads, dim, page_size, tile)
    return Kernel(source(), "attend_stream", options, tile.shared_bytes(dim))


def attend_stream(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: AttentionRows,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sequences: np.ndarray,
    tile: StreamTile,
) -> None:
    """AttentionImplementation.attend. Row strides of q are even, those of k and v multiples of 8."""
    t, heads, dim = q.shape
    kv_heads, page_size = k.shape[-2], page_size_of(k, rows)
    assert out.is_contiguous(), out.stride()
    most = int(rows.counts[sequences].max()) * (heads // kv_heads)
    assert most <= tile.rows, f"{most} rows x grouped heads of one sequence, but the kernel holds {tile.rows}"
    plan = listed_plan(rows, sequences, heads, kv_heads, dim, page_size)
    splits, (stride_q, _, _) = plan.splits, strides(q, k, v, page_size)
    blocks = min(len(plan.items) * kv_heads, multiprocessors(q.device) * tile.ctas)
    kernel = _kernel(heads, kv_heads, dim, page_size, tile, torch.cuda.current_device())
    kernel.launch((blocks, 1, 1), THREADS, (
        q, *(page_map(x, min(BLOCK, page_size)) for x in (k, v)), out, out if lse is None else lse,
        int(lse is not None), plan.items, splits.total, splits.partial, splits.stats, t, splits.held, stride_q,
        scale_of(dim),
    ))  # fmt: skip
    merge_splits(splits, int(rows.most_keys[sequences].max()), heads, kv_heads, out, lse)
