"""Attention with the splits in parallel, in CUDA C++ for sm_90: a block streams the keys and values of its splits, and
eight warps share each of them. For few splits.

Kernel: stream_attention.cu with the files it needs; definition: attention.py.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch

from exactrl.contract import AttentionShape
from exactrl.ops.cuda.attention_host import page_map
from exactrl.ops.cuda.attention_tiles import StreamTile
from exactrl.ops.cuda.listed_splits import listed_plan, options_of, source_of
from exactrl.ops.cuda.merge_splits import merge_splits
from exactrl.ops.cuda.nvrtc import Kernel, Launch

if TYPE_CHECKING:
    from exactrl.ops.cuda.attention import AttentionRows

FILES = ("split_rows.cuh", "stream_attention.cu")
THREADS = 9 * 32


def source_options(shape: AttentionShape, tile: StreamTile) -> list[str]:
    return options_of(shape, RING=tile.ring, RESIDENT=tile.ctas, SHARED_BYTES=tile.shared_bytes(shape.dim))


@functools.cache
def _kernel(shape: AttentionShape, tile: StreamTile, device: int) -> Kernel:
    return Kernel(source_of(*FILES), "attend_stream", source_options(shape, tile), tile.shared_bytes(shape.dim))


def attend_stream(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: AttentionRows,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sequences: np.ndarray,
) -> None:
    """AttentionImplementation.attend."""
    plan = listed_plan(q, k, rows, sequences)
    arguments, box = plan.arguments(q, k, v, out, lse), min(plan.shape.kv_block, plan.shape.page_size)
    k_map, v_map = page_map(k, box), page_map(v, box)

    def make() -> Launch:
        tile = StreamTile.of(plan.shape.dim)
        kernel = _kernel(plan.shape, tile, torch.cuda.current_device())
        return kernel.ready((plan.blocks(tile.ctas), 1, 1), THREADS, (arguments, k_map, v_map), early=True)

    launch = plan.ready("stream", make)
    launch.replace(1, k_map)
    launch.replace(2, v_map)
    launch()
    merge_splits(plan, arguments, early=True)
