"""Attention with the splits in parallel, in CUDA C++ for sm_90: decode, at most 8 rows x grouped heads of a sequence.

Kernel: split_attention.cu with the files it needs; definition: attention.py; the list of splits is that of
triton_split_attention.py.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from exactrl.ops.cuda.attention_host import multiprocessors, page_map, scale_of
from exactrl.ops.cuda.attention_tiles import WARPS, WarpTile
from exactrl.ops.cuda.merge_splits import merge_splits
from exactrl.ops.cuda.nvrtc import Kernel
from exactrl.ops.cuda.triton_attention import page_size_of, strides
from exactrl.ops.cuda.triton_split_attention import split_plan

if TYPE_CHECKING:
    from exactrl.ops.cuda.attention import AttentionRows

FOLDER = Path(__file__).parent
FILES = ("hopper.cuh", "warp_tiles.cuh", "split_items.cuh", "split_feed.cuh", "split_attention.cu")


def source() -> str:
    return "".join((FOLDER / name).read_text() for name in FILES)


def source_options(heads: int, kv_heads: int, dim: int, page_size: int, tile: WarpTile) -> list[str]:
    values = {
        "DIM": dim, "HEADS": heads, "KV_HEADS": kv_heads, "PAGE_SIZE": page_size, "KEYS": tile.keys, "RING": tile.ring,
        "WARPS": WARPS, "TMA": int(tile.tma),
    }  # fmt: skip
    return ["--fmad=false", *(f"-D{name}={value}" for name, value in values.items())]


@functools.cache
def _kernel(heads: int, kv_heads: int, dim: int, page_size: int, tile: WarpTile, device: int) -> Kernel:
    options = source_options(heads, kv_heads, dim, page_size, tile)
    return Kernel(source(), "attend_splits", options, tile.shared_bytes(dim))


def attend_splits(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: AttentionRows,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sequences: np.ndarray,
    tile: WarpTile,
) -> None:
    """AttentionImplementation.attend. Row strides of q are even, those of k and v multiples of 8."""
    t, heads, dim = q.shape
    kv_heads, page_size = k.shape[-2], page_size_of(k, rows)
    assert rows.tables is not None, "splits in parallel read pages"
    assert out.is_contiguous(), out.stride()
    plan = split_plan(rows, sequences, heads, kv_heads, dim)
    blocks = min(len(plan.items) * kv_heads, multiprocessors(q.device) * tile.ctas)
    kernel = _kernel(heads, kv_heads, dim, page_size, tile, torch.cuda.current_device())
    kernel.launch((blocks, 1, 1), WARPS * 32, (
        q, k, v, *(page_map(x, min(tile.keys, page_size)) for x in (k, v)), out, out if lse is None else lse,
        int(lse is not None), plan.items, plan.total, plan.partial, plan.stats, rows.starts, rows.lengths,
        rows.tables, rows.tables.stride(0), t, plan.held, *strides(q, k, v, page_size), scale_of(dim),
    ))  # fmt: skip
    merge_splits(plan, int(rows.most_keys[sequences].max()), heads, kv_heads, out, lse)
