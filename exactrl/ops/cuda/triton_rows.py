"""The trees that add rows and columns on `sm90`, and what the row kernels share.

tree(v_0 … v_{n-1}), along a row: fp32, padded with +0 to the next power of two. While more than 1024 values are left,
the second half is added to the first (v_i + v_{i + half}); then neighbours (0, 1), (2, 3) … are added until one is
left.

columns(v_0 … v_{R-1}), over rows: neighbours only, in chunks of 64 that are padded with +0, until one is left.

Each step of the kernels adds pairs, so that neither warps nor the register layout can choose an order: tl.sum over more
than two elements would follow the layout. 1024 because a thread of a long row holds elements 1024 or more apart, and
adds them without asking others.
"""

# tuples grow while a kernel is compiled
# mypy: disable-error-code="assignment, var-annotated, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from exactrl.ops.cuda.triton_early import EARLY, wait

LONGEST_ROW = 16384
JOB = 32  # rows whose weight gradient is summed ascending into one partial
WIDTH_LEVELS = tl.constexpr(10)  # 1024 values
CHUNK, OWN, COLUMNS = 512, 16, 16  # most partials of a program and of a thread, and its columns; change no bit


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
def _folded(chunks, HALF: tl.constexpr):
    """Chunk c plus chunk c + HALF; those behind the last one are +0."""
    folded = ()
    for c in tl.static_range(HALF):
        if c + HALF < len(chunks):
            folded += (chunks[c] + chunks[c + HALF],)
        elif c < len(chunks):
            folded += (chunks[c] + 0.0,)
    return folded


@triton.jit
def chunked_tree(chunks, P: tl.constexpr):
    """row_tree of rows that are held as chunks fp32 [R, W], P of their values but those of chunks behind the last one.
    W: 512, 1024 or P."""
    R: tl.constexpr = chunks[0].shape[0]
    W: tl.constexpr = chunks[0].shape[1]
    for level in tl.static_range(_levels(P) - WIDTH_LEVELS):
        chunks = _folded(chunks, P // W // 2 >> level)
    if W == 512 and P > 512:
        both = tl.join(chunks[0], chunks[1]).permute(0, 2, 1).reshape([2 * R, W])
        return tl.sum(row_tree(both).reshape([R, 2]), 1)
    else:
        return row_tree(chunks[0])


@triton.jit
def inverse_rms(total, eps, N: tl.constexpr):
    """1 / sqrt(total / N + eps), each step rounded as IEEE says; total fp32 [R], the tree over x² of a row of N."""
    length = tl.full(total.shape, N, tl.float32)
    one = tl.full(total.shape, 1.0, tl.float32)
    return tl.div_rn(one, tl.sqrt_rn(tl.div_rn(total, length) + eps))


@triton.jit(do_not_specialize=["rows"])
def column_tree_kernel(
    parts, sums, rows, N, ROWS: tl.constexpr, OWN: tl.constexpr, COLUMNS: tl.constexpr, LAST: tl.constexpr
):
    """sums[i] = parts[ROWS i : ROWS (i + 1)] added by neighbours, padded with +0; parts fp32 [rows, N].

    OWN neighbours are added by one thread. LAST: + 0, what further padding adds: it decides the sign of a sum of -0.
    """
    wait()
    chunk = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = (chunk * ROWS + tl.arange(0, ROWS // OWN) * OWN)[:, None]
    at, inside = parts + first * N + columns[None, :], columns[None, :] < N
    own = ()
    for i in tl.static_range(OWN):
        own += (tl.load(at + i * N, mask=(first + i < rows) & inside, other=0.0),)
    for level in tl.static_range(_levels(OWN)):
        pairs = ()
        for i in tl.static_range(OWN >> level + 1):
            pairs += (own[2 * i] + own[2 * i + 1],)
        own = pairs
    v = own[0]
    for _ in tl.static_range(_levels(ROWS // OWN)):
        v = tl.sum(v.reshape([v.shape[0] // 2, 2, COLUMNS]), 1)
    total = v.reshape([COLUMNS])
    if LAST:
        total = total + 0.0
    tl.store(sums + chunk * N + columns, total, mask=columns < N)


def _is_power_of_64(rows: int) -> bool:
    return rows & (rows - 1) == 0 and (rows.bit_length() - 1) % 6 == 0


def column_sums(parts: torch.Tensor) -> torch.Tensor:
    """parts fp32 [R, N], contiguous -> [N], added as `columns` says.

    Chunks of 64 are subtrees of one tree over neighbours, so that a program may take more. What is left of the chunks
    is their padding: where R is no power of 64 the sum has been added to +0.
    """
    assert parts.is_contiguous(), parts.stride()
    rows, n = parts.shape
    if rows == 0:
        return parts.new_zeros(n)
    padded = not _is_power_of_64(rows)
    while rows > 1:
        chunk = min(triton.next_power_of_2(rows), CHUNK)
        sums = parts.new_empty(triton.cdiv(rows, chunk), n)
        column_tree_kernel[(len(sums), triton.cdiv(n, COLUMNS))](
            parts, sums, rows, n, chunk, min(chunk, OWN), COLUMNS, padded and len(sums) == 1, num_warps=4, **EARLY
        )
        parts, rows = sums, len(sums)
    return parts[0]
