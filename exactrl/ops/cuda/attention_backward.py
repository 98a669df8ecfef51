"""Gradient of packed causal attention from its output and log-sum-exp: PyTorch's flash kernel, set deterministic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from exactrl.ops.cuda.attention import AttentionRows


@contextmanager
def _deterministic() -> Iterator[None]:
    """The flash kernel asks torch's global flag whether to add up dQ in a fixed order instead of with atomics."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # or every torch.empty is written twice
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def packed_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    rows: AttentionRows,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of whole sequences side by side; lse fp32 [H, T], natural logarithm."""
    longest = int(rows.counts.max())
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)  # dropout's random state
    with _deterministic():
        return torch.ops.aten._flash_attention_backward(
            d_out.contiguous(), q, k, v, out, lse, rows.starts, rows.starts, longest, longest, 0.0, True,
            unused, unused, scale=q.shape[-1] ** -0.5,
        )  # fmt: skip
