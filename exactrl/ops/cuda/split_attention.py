"""Attention with the splits in parallel, in CUDA C++ for sm_90: each warp takes a split. For many splits.

Kernel: split_attention.cu with the files it needs; definition: attention.py.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch

from exactrl.contract import AttentionShape
from exactrl.ops.cuda.attention_tiles import WARPS, WarpTile
from exactrl.ops.cuda.listed_splits import listed_plan, options_of, source_of
from exactrl.ops.cuda.merge_splits import merge_splits
from exactrl.ops.cuda.nvrtc import Kernel, Launch

if TYPE_CHECKING:
    from exactrl.ops.cuda.attention import AttentionRows


FILES = ("split_rows.cuh", "split_feed.cuh", "split_attention.cu")


def source_options(shape: AttentionShape, tile: WarpTile) -> list[str]:
    return options_of(shape, RING=tile.ring, WARPS=WARPS)


@functools.cache
def _kernel(shape: AttentionShape, tile: WarpTile, device: int) -> Kernel:
    return Kernel(source_of(*FILES), "attend_splits", source_options(shape, tile), tile.shared_bytes(shape.dim))


def attend_splits(
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
    arguments = plan.arguments(q, k, v, out, lse)

    def make() -> Launch:
        tile = WarpTile.of(plan.shape.dim)
        kernel = _kernel(plan.shape, tile, torch.cuda.current_device())
        return kernel.ready((plan.blocks(tile.ctas), 1, 1), WARPS * 32, (arguments,))

    plan.ready("splits", make)()
    merge_splits(plan, arguments)
