"""Splits in parallel, few or many: a cluster takes each of them up to one for every multiprocessor, beyond that a warp.

Both kernels give the same bits; which one runs follows from what the host knows of a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from exactrl.ops.cuda.attention_host import multiprocessors
from exactrl.ops.cuda.attention_tiles import ClusterTile, WarpTile
from exactrl.ops.cuda.cluster_attention import attend_clusters
from exactrl.ops.cuda.split_attention import attend_splits
from exactrl.ops.cuda.triton_attention import SPLIT

if TYPE_CHECKING:
    from exactrl.ops.cuda.attention import AttentionRows


def attend_few_or_many(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: AttentionRows,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sequences: np.ndarray,
    tile: WarpTile,
) -> None:
    """AttentionImplementation.attend. `tile` is for many splits."""
    splits = int((-(-rows.most_keys[sequences] // SPLIT)).sum()) * k.shape[-2]
    if splits <= multiprocessors(q.device):
        attend_clusters(q, k, v, rows, out, lse, sequences, ClusterTile.of(q.shape[-1]))
    else:
        attend_splits(q, k, v, rows, out, lse, sequences, tile)
