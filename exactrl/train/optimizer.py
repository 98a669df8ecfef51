"""AdamW on fp32 masters, and a global gradient norm whose bits do not depend on threads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from exactrl.errors import NonFiniteError
from exactrl.ops.cpu import jit
from exactrl.ops.cpu.reduce import sum_of_squares


def make_optimizer(
    parameters: Sequence[torch.nn.Parameter], lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101); decay applies to matrices only, as is usual."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=1e-8, foreach=True)


def gradient_norm(parameters: Sequence[torch.nn.Parameter]) -> float:
    """Global L2 norm. Raises NonFiniteError for a NaN or infinite gradient."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients and gradients[0].is_cuda:  # a sum per tensor in a fixed order, then of these: no atomics
        norms = torch.stack(torch._foreach_norm(gradients)).double()
        total = float(norms.square().sum())
    else:
        total = math.fsum(sum_of_squares(jit.flat(g)) for g in gradients)
    if not math.isfinite(total):
        raise NonFiniteError(f"the squared gradient norm is {total}; this update was not made")
    return math.sqrt(total)


def clip_gradients(parameters: Sequence[torch.nn.Parameter], limit: float) -> float:
    """Scales all gradients so that their norm is at most `limit`; returns the norm before."""
    norm = gradient_norm(parameters)
    if norm > limit:
        for p in parameters:
            if p.grad is not None:
                p.grad.mul_(limit / (norm + 1e-6))
    return norm
