"""rms_norm and add_rms_norm on a GPU: residual add followed by the norm.

Definition on `sm90`, per row of n elements; rn is a rounding to fp32, tree the one of triton_rows.py:

    v_i = fp32(h_i);  add_rms_norm first: h'_i = round_h(rn(h_i + x_i)), stored;  v_i = fp32(h'_i)
    s = tree(rn(v_i v_i));  r = rn(1 / rn(sqrt(rn(rn(s / n) + fp32(eps)))))
    y_i = round_w(rn(rn(v_i r) fp32(w_i)))

round_h rounds to the residual dtype, round_w to the weight's. Divisions and square roots are IEEE, nothing is
contracted. Where h and x are both bfloat16 the compiler makes one bfloat16 addition of the sum and its rounding: fp32
has more than twice as many digits, so that rounding twice gives the same value.

Backward, u_i = rn(v_i r), g_i = rn(dy_i w_i), c = rn(tree(rn(g_i u_i)) / n): d_i = rn(r rn(g_i - rn(u_i c))), then
+ the gradient of h' itself, rounded once. dw: rn(dy_i u_i) summed ascending over 32 rows, these sums by
`columns` of triton_rows.py.
"""

from __future__ import annotations

import numpy as np
import torch

from exactrl.ops.cuda import triton_norm as kernels
from exactrl.ops.cuda.triton_rows import column_sums


def rms_norm_reference(h: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """torch's own ops, differentiable in any dtype: in fp64 for correctness within a tolerance."""
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * w


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, master, w, eps):
        ctx.save_for_backward(h, w)
        ctx.eps = eps
        return kernels.forward(h, None, w, eps)[1]

    @staticmethod
    def backward(ctx, dy):
        h, w = ctx.saved_tensors
        dh, _, parts = kernels.backward(h, w, dy.contiguous(), None, ctx.eps, h.dtype, ctx.needs_input_grad[1])
        return dh, None if parts is None else column_sums(parts), None, None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, x, master, w, eps):
        h_out, y = kernels.forward(h, x, w, eps)
        ctx.save_for_backward(h_out, w)
        ctx.eps, ctx.x_dtype = eps, x.dtype
        return h_out, y

    @staticmethod
    def backward(ctx, dh_out, dy):
        h, w = ctx.saved_tensors
        needs_weight = ctx.needs_input_grad[2]
        dh, dx, parts = kernels.backward(h, w, dy.contiguous(), dh_out.contiguous(), ctx.eps, ctx.x_dtype, needs_weight)
        return dh, dx, None if parts is None else column_sums(parts), None, None


def _differentiable(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def rms_norm(h: torch.Tensor, w: torch.Tensor, eps: float, *, master: torch.Tensor | None = None) -> torch.Tensor:
    """h [T, n] in the residual dtype, w [n] -> [T, n] in w's dtype. The fp32 gradient of w goes to `master`."""
    eps = float(np.float32(eps))
    if _differentiable(h, master):
        return _RmsNorm.apply(h, master, w, eps)
    return kernels.forward(h, None, w, eps)[1]


def add_rms_norm(
    h: torch.Tensor, x: torch.Tensor, w: torch.Tensor, eps: float, *, master: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h + x rounded to h's dtype, its norm in w's dtype); x may be of another dtype."""
    eps = float(np.float32(eps))
    if _differentiable(h, x, master):
        return _AddRmsNorm.apply(h, x, master, w, eps)
    h_out, y = kernels.forward(h, x, w, eps)
    assert h_out is not None
    return h_out, y
