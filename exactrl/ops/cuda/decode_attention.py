"""Splits in parallel, few or many: both kernels give the same bits; which one runs follows from what the host knows of
a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from exactrl.ops.cuda.attention_host import multiprocessors
from exactrl.ops.cuda.listed_splits import listed_plan
from exactrl.ops.cuda.split_attention import attend_splits
from exactrl.ops.cuda.stream_attention import attend_stream

if TYPE_CHECKING:
    from exactrl.ops.cuda.attention import AttentionRows

FEW = 30
"""(Split, kv head) pairs for each multiprocessor that the streaming kernel takes. Its time over the other's on an H200,
head dim 128: 0.98 at 16, 0.96 at 26; at 31 0.98 (8 sequences), 1.02 (64), 1.02 (256); 1.01 at 62; 1.03 at 124."""


def attend_few_or_many(
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
    attend = attend_stream if plan.pairs <= FEW * multiprocessors(q.device) else attend_splits
    attend(q, k, v, rows, out, lse, sequences)
