"""The trees that add rows and columns on `sm90`, and what the row kernels share.

tree(v_0 … v_{n-1}), along a row: fp32, padded with +0 to the next power of two. While more than 1024 values are left,
the second half is added to the first (v_i + v_{i + half}); then neighbours (0, 1), (2, 3) … are added until one is
left.

columns(v_0 … v_{R-1}), over rows: neighbours only, in chunks of 64 that are padded with +0, until one is left.

Each step of the kernels adds pairs, so that neither warps nor the register layout can choose an order: tl.sum over more
than two elements would follow the layout. 1024 because a thread of a long row holds elements 1024 or more apart, and
adds them without asking others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from exactrl.ops.cuda.triton_exact import EARLY, wait

LONGEST_ROW = 16384
JOB = 32  # rows whose weight gradient is summed ascending into one partial
WIDTH_LEVELS = tl.constexpr(10)  # 1024 values
CHUNK = tl.constexpr(64)  # partials that one program adds; a power of two, so that chunks are subtrees
COLUMNS = 64


def warps_for(elements: int) -> int:
    """Warps of a program with so many elements; decides time, never bits."""
    return min(max(elements // 1024, 1), 8)


def row_stride(t: torch.Tensor, inner: int = 1) -> int:
    """Stride of the first dimension; the last `inner` dimensions must be contiguous."""
    size = 1
    for dim in range(-1, -1 - inner, -1):
        assert t.stride(dim) == size or t.shape[dim] == 1, f"strides {t.stride()} of {tuple(t.shape)}: rows have gaps"
        size *= t.shape[dim]
    return t.stride(0)


@triton.constexpr_function
def _levels(length):
    """log2 of a power of two."""
    return length.bit_length() - 1


@triton.constexpr_function
def _levels_across_warps(length):
    """Of the 10 levels of a long row: enough for 8 warps."""
    return 3 if length >= 512 else 0


@triton.jit
def row_tree(v):
    """fp32 [R, P] -> [R], tree over P (a power of two)."""
    for _ in tl.static_range(_levels(v.shape[1]) - WIDTH_LEVELS):
        v = tl.sum(v.reshape([v.shape[0], 2, v.shape[1] // 2]), 1)
    last: tl.constexpr = _levels_across_warps(v.shape[1])
    for _ in tl.static_range(_levels(v.shape[1]) - last):
        v = tl.sum(v.reshape([v.shape[0], v.shape[1] // 2, 2]), 2)
    for _ in tl.static_range(last):  # one exchange for all of them, where tl.sum needs one for each
        left, right = tl.split(v.reshape([v.shape[0], v.shape[1] // 2, 2]))
        v = left + right
    return v.reshape([v.shape[0]])


@triton.jit
def inverse_rms(total, eps, N: tl.constexpr):
    """1 / sqrt(total / N + eps), each step rounded as IEEE says; total fp32 [R], the tree over x² of a row of N."""
    length = tl.full(total.shape, N, tl.float32)
    one = tl.full(total.shape, 1.0, tl.float32)
    return tl.div_rn(one, tl.sqrt_rn(tl.div_rn(total, length) + eps))


@triton.jit(do_not_specialize=["rows"])
def column_tree_kernel(parts, sums, rows, N, COLUMNS: tl.constexpr):
    """sums[i] = columns of parts[64 i : 64 i + 64], padded with +0; parts fp32 [rows, N]."""
    wait()
    chunk = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = chunk * CHUNK + tl.arange(0, CHUNK)
    at = row[:, None] * N + columns[None, :]
    v = tl.load(parts + at, mask=(row[:, None] < rows) & (columns[None, :] < N), other=0.0)
    tl.store(sums + chunk * N + columns, row_tree(v.T), mask=columns < N)


def column_sums(parts: torch.Tensor) -> torch.Tensor:
    """parts fp32 [R, N], contiguous -> [N], added as `columns` says."""
    assert parts.is_contiguous(), parts.stride()
    n = parts.shape[1]
    if parts.shape[0] == 0:
        return parts.new_zeros(n)
    while parts.shape[0] > 1:
        rows = parts.shape[0]
        sums = parts.new_empty(triton.cdiv(rows, CHUNK.value), n)
        column_tree_kernel[(sums.shape[0], triton.cdiv(n, COLUMNS))](
            parts, sums, rows, n, COLUMNS, num_warps=4, **EARLY
        )
        parts = sums
    return parts[0]
