"""Gradient of the embedding in Triton: rows of one id are added in token order. Legend: T tokens, N row length."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from exactrl.ops.cuda.triton_early import EARLY, wait

BLOCK = 512


@triton.jit
def embedding_backward_kernel(dy, sorted_ids, order, stops, grad, N, BLOCK: tl.constexpr):
    """The program of the first token of an id adds them all; the programs of the others have nothing to do."""
    wait()
    at, i = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N
    row = tl.load(sorted_ids + at)
    before = tl.load(sorted_ids + tl.maximum(at - 1, 0))
    if (at == 0) | (before != row):
        total = tl.zeros((BLOCK,), tl.float32)
        for j in range(at, tl.load(stops + at).to(tl.int32)):
            total = total + tl.load(dy + tl.load(order + j) * N + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad + row * N + i, total, mask=inside)


def backward(dy: torch.Tensor, ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """dy [T, N], contiguous, ids int64 [T] -> fp32 [vocabulary, N]."""
    tokens, n = dy.shape
    grad = torch.zeros(vocabulary, n, dtype=torch.float32, device=dy.device)
    sorted_ids, order = torch.sort(ids, stable=True)
    stops = torch.searchsorted(sorted_ids, sorted_ids, right=True)
    embedding_backward_kernel[(tokens, triton.cdiv(n, BLOCK))](
        dy, sorted_ids, order, stops, grad, n, BLOCK, num_warps=4, **EARLY
    )
    return grad
