"""embedding: rows of the table, cast to the residual dtype (exact); backward adds rows in token order."""

from __future__ import annotations

import torch

from exactrl.ops.weight import Weight, plain


def embedding_plain(ids: torch.Tensor, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    return torch.nn.functional.embedding(ids, plain(weight)).to(dtype)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, master, weight, dtype):
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape
        return weight.rows()[ids].to(dtype)

    @staticmethod
    def backward(ctx, dy):
        (ids,) = ctx.saved_tensors
        # embedding_dense_backward walks the tokens in order for each row: deterministic on the CPU
        grad = torch.ops.aten.embedding_dense_backward(dy.float(), ids, ctx.shape[0], -1, False)
        return None, grad, None, None


def embedding_exact(ids: torch.Tensor, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """ids int64 [T] -> [T, hidden] in `dtype`, which is the weight's dtype or wider."""
    if weight.master is not None and torch.is_grad_enabled():
        return _Embedding.apply(ids, weight.master, weight, dtype)
    return weight.rows()[ids].to(dtype)
