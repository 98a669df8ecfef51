"""embedding on a GPU: rows of the table, cast to the residual dtype, which is exact.

The gather rounds nothing and adds nothing, so that it has one set of bits whoever does it: torch's is used. Backward:
the rows of dy of one id, in fp32, added to 0 in token order.
"""

from __future__ import annotations

import torch

from exactrl.ops.cuda import triton_embedding as kernels


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, master, w, dtype):
        ctx.save_for_backward(ids)
        ctx.vocabulary = w.shape[0]
        return w[ids].to(dtype)

    @staticmethod
    def backward(ctx, dy):
        return None, kernels.backward(dy.contiguous(), ctx.saved_tensors[0], ctx.vocabulary), None, None


def embedding(
    ids: torch.Tensor, w: torch.Tensor, dtype: torch.dtype, *, master: torch.Tensor | None = None
) -> torch.Tensor:
    """ids int64 [T] -> [T, N] in `dtype`, which is w's or wider. The fp32 gradient of w goes to `master`."""
    if torch.is_grad_enabled() and master is not None and master.requires_grad:
        return _Embedding.apply(ids, master, w, dtype)
    return w[ids].to(dtype)
