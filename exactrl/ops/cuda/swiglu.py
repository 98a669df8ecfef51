"""swiglu on a GPU: y = silu(gate) * up.

Definition on `sm90`, per element; rn is a rounding to fp32:

    g, u = fp32(gate), fp32(up);  e = ex2(rn(-g fp32(log2 e)))
    y = round(rn(rn(g / rn(1 + e)) u))

ex2 is the hardware's ex2.approx.ftz.f32; the division is IEEE, nothing is contracted.

Backward: s = rn(1 / rn(1 + e)), t = rn(g s); dup = rn(dy t); dgate = rn(rn(dy u) rn(s rn(1 + rn(g - t)))).
"""

from __future__ import annotations

import torch

from exactrl.ops.cuda import triton_swiglu as kernels


def swiglu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """torch's own ops, differentiable in any dtype."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return kernels.forward(gate_up)

    @staticmethod
    def backward(ctx, dy):
        return kernels.backward(ctx.saved_tensors[0], dy.contiguous())


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 I], rows may be strided -> [T, I]."""
    if torch.is_grad_enabled() and gate_up.requires_grad:
        return _SwiGlu.apply(gate_up)
    return kernels.forward(gate_up)
