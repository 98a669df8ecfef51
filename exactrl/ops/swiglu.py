"""swiglu: y = silu(gate) * up, silu(g) = g / (1 + exp(-g)), in fp32, rounded once."""

from __future__ import annotations

import torch

from exactrl.ops.cpu import jit
from exactrl.ops.cpu import swiglu as kernels


def swiglu_plain(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


swiglu_reference = swiglu_plain  # torch's own ops, differentiable in any dtype


def _forward(gate_up: torch.Tensor) -> torch.Tensor:
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, n, dtype=gate_up.dtype)
    args = (jit.flat(gate_up), jit.flat(y), n)
    jit.run(kernels.swiglu_range, kernels.swiglu_parallel, rows, rows * n * 16, args)
    return y


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return _forward(gate_up)

    @staticmethod
    def backward(ctx, dy):
        (gate_up,) = ctx.saved_tensors
        rows, n = gate_up.shape[0], gate_up.shape[1] // 2
        grad = torch.empty_like(gate_up)
        args = (jit.flat(gate_up), jit.flat(dy.contiguous()), jit.flat(grad), n)
        jit.run(kernels.swiglu_backward_range, kernels.swiglu_backward_parallel, rows, rows * n * 24, args)
        return grad


def swiglu_exact(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 I] -> [T, I]."""
    return _SwiGlu.apply(gate_up) if gate_up.requires_grad else _forward(gate_up)
