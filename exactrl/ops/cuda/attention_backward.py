"""Gradient of packed causal attention from its output and log-sum-exp: PyTorch's flash kernel, deterministic or not."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from exactrl.ops.cuda.determinism import deterministic_algorithms

if TYPE_CHECKING:
    from exactrl.ops.cuda.attention import AttentionRows


def packed_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    rows: AttentionRows,
    *,
    deterministic: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of whole sequences side by side; lse fp32 [H, T], natural logarithm. `deterministic`: dQ is added up
    in a fixed order instead of with atomics."""
    longest = int(rows.counts.max())
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)  # dropout's random state
    with deterministic_algorithms(q.device) if deterministic else nullcontext():
        return torch.ops.aten._flash_attention_backward(
            d_out.contiguous(), q, k, v, out, lse, rows.starts, rows.starts, longest, longest, 0.0, True,
            unused, unused, scale=q.shape[-1] ** -0.5,
        )  # fmt: skip
