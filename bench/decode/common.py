"""Decode kernels that are measured here, the streaming kernel among them, which is not offered."""

from __future__ import annotations

from collections.abc import Callable

import torch

from exactrl.ops.cuda.attention import attention_implementations, streaming
from exactrl.parity.compare import differing

OFFERED = ("cuda-split:16x4-c3", "cuda-decode-tma:32x3-c2")
Attend = Callable[..., None]


def kernels() -> tuple[Attend, dict[str, Attend]]:
    """(the reference, others by name)."""
    offered = attention_implementations()
    found: dict[str, Attend] = {name: offered[name].attend for name in OFFERED}
    found |= {i.name: i.attend for i in streaming()}
    return offered["reference"].attend, found


def different_rows(out: torch.Tensor, lse: torch.Tensor, right: torch.Tensor, right_lse: torch.Tensor) -> torch.Tensor:
    """bool [T]"""
    return differing(out, right).flatten(1).any(1) | differing(lse, right_lse).any(0)
