"""y = x Wᵀ in Triton: the bit reference of the device class `sm90`, and the tuned kernels.

Definition: per output element one fp32 accumulator in the matrix unit, K ascending. With leaves > 1 K is cut into equal
leaves, each accumulated so from zero, and the leaves are added as a balanced binary tree in fp32. Rounded once.

Legend: M rows of x, N outputs, K inputs; BM, BN, BK the tile of one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from exactrl.ops.cuda.tiles import REFERENCE, Tile

GROUP = 8  # neighbouring programs share GROUP row tiles, so that they find each other's weights in the L2


@triton.jit
def _accumulate(
    x, w, rows, columns, row0, column0, M, N, first, stop, stride_x, stride_w,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, SWAP: tl.constexpr,
    TMA_X: tl.constexpr, TMA_W: tl.constexpr,
):  # fmt: skip
    """x[rows, first:stop] w[columns, first:stop]ᵀ from zero, K ascending; transposed when SWAP."""
    if SWAP:
        acc = tl.zeros((BN, BM), tl.float32)
    else:
        acc = tl.zeros((BM, BN), tl.float32)
    for k in range(first, stop, BK):
        ks = k + tl.arange(0, BK)
        a_mask, b_mask = rows[:, None] < M, columns[:, None] < N
        if not EVEN:
            a_mask, b_mask = a_mask & (ks[None, :] < stop), b_mask & (ks[None, :] < stop)
        if TMA_X:
            a = x.load([row0, k])
        else:
            a = tl.load(x + rows[:, None] * stride_x + ks[None, :], mask=a_mask, other=0.0)
        if TMA_W:
            b = w.load([column0, k])
        else:
            b = tl.load(w + columns[:, None] * stride_w + ks[None, :], mask=b_mask, other=0.0)
        if SWAP:
            acc = tl.dot(b, a.T, acc)
        else:
            acc = tl.dot(a, b.T, acc)
    return acc


@triton.jit(do_not_specialize=["M"])
def _matmul(
    x, w, y, M, N, length, stride_x, stride_w,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SHARE: tl.constexpr, SHARED: tl.constexpr, EVEN: tl.constexpr, SWAP: tl.constexpr,
    TMA_X: tl.constexpr, TMA_W: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = program // (GROUP * column_tiles)
    height = tl.minimum(row_tiles - group * GROUP, GROUP)
    inside = program % (GROUP * column_tiles)
    # The last tile is moved back to end with the matrix: rows beyond the end are slow to load through the copy engine.
    # Two programs then store some elements, with the same bits.
    row0 = tl.maximum(tl.minimum((group * GROUP + inside % height) * BM, M - BM), 0)
    column0 = tl.maximum(tl.minimum((inside // height) * BN, N - BN), 0)
    rows, columns = row0 + tl.arange(0, BM), column0 + tl.arange(0, BN)
    # Program p of axis 1 adds its share of the leaves (each `length` long), a subtree; `_tree` adds these parts.
    first = tl.program_id(1) * SHARE * length
    if SHARED:
        y += tl.program_id(1).to(tl.int64) * M * N
    for leaf in tl.static_range(SHARE):
        acc = _accumulate(
            x, w, rows, columns, row0, column0, M, N, first + leaf * length, first + (leaf + 1) * length,
            stride_x, stride_w, BM, BN, BK, EVEN, SWAP, TMA_X, TMA_W,
        )  # fmt: skip
        # The balanced tree as a binary counter: `pair`, `four`, `eight` hold the left halves still waiting.
        if SHARE >= 2:
            if leaf % 2 == 0:
                pair = acc
            else:
                acc = pair + acc
                if SHARE >= 4:
                    if leaf % 4 == 1:
                        four = acc
                    else:
                        acc = four + acc
                        if SHARE >= 8:
                            if leaf % 8 == 3:
                                eight = acc
                            else:
                                acc = eight + acc
    if SWAP:
        acc = acc.T
    at = y + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(at, acc.to(y.dtype.element_ty), mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit(do_not_specialize=["size"])
def _tree(parts, y, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """y = balanced binary tree over parts [PARTS, size]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    size = size.to(tl.int64)
    a = tl.load(parts + at, mask=inside, other=0.0)
    total = a + tl.load(parts + size + at, mask=inside, other=0.0)
    if PARTS >= 4:
        a = tl.load(parts + 2 * size + at, mask=inside, other=0.0)
        total = total + (a + tl.load(parts + 3 * size + at, mask=inside, other=0.0))
    if PARTS >= 8:
        a = tl.load(parts + 4 * size + at, mask=inside, other=0.0)
        right = a + tl.load(parts + 5 * size + at, mask=inside, other=0.0)
        a = tl.load(parts + 6 * size + at, mask=inside, other=0.0)
        right = right + (a + tl.load(parts + 7 * size + at, mask=inside, other=0.0))
        total = total + right
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _repeat_last_row(x, y, M, K, stride_x, BLOCK: tl.constexpr):
    """y [grid, K] = the rows of x, the last one again and again."""
    row, ks = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + tl.minimum(row, M - 1) * stride_x + ks, mask=ks < K)
    tl.store(y + row * K + ks, value, mask=ks < K)


def padded(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """x [M, K] followed by copies of its last row, up to a multiple of so many rows; in one kernel."""
    m, k = x.shape
    y = torch.empty(m + -m % multiple, k, dtype=x.dtype, device=x.device)
    _repeat_last_row[(len(y), triton.cdiv(k, 4096))](x, y, m, k, x.stride(0), 4096)
    return y


def tree_sum(parts: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """parts fp32 [2, 4 or 8, M, N] -> their balanced tree sum [M, N]."""
    count, size = parts.shape[0], parts[0].numel()
    assert count in (2, 4, 8), count
    y = torch.empty(parts.shape[1:], dtype=out_dtype, device=parts.device)
    _tree[(triton.cdiv(size, 1024),)](parts, y, size, count, 1024)
    return y


def matmul(
    x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype, leaves: int = 1, tile: Tile = REFERENCE, parts: int = 1
) -> torch.Tensor:
    """x [M, K], w [N, K], inner stride 1 -> [M, N]. `leaves` is 1, 2, 4 or 8 and divides K; `parts` divides `leaves`:
    so many programs share the leaves of one output tile."""
    (m, k), n = x.shape, w.shape[0]
    assert leaves in (1, 2, 4, 8), leaves
    assert leaves % parts == 0, (leaves, parts)
    assert k % leaves == 0, (k, leaves)
    assert x.stride(1) == w.stride(1) == 1, (x.stride(), w.stride())
    even = (k // leaves) % tile.bk == 0
    assert even or not tile.tma, f"a bulk copy of {tile.bk} would run into the next leaf of {k // leaves}"
    shape = (m, n) if parts == 1 else (parts, m, n)
    y = torch.empty(shape, dtype=out_dtype if parts == 1 else torch.float32, device=x.device)
    a = _describe(x, tile.bm, tile.bk) if "x" in tile.tma else x
    b = _describe(w, tile.bn, tile.bk) if "w" in tile.tma else w
    grid = (triton.cdiv(m, tile.bm) * triton.cdiv(n, tile.bn), parts)
    _matmul[grid](
        a, b, y, m, n, k // leaves, x.stride(0), w.stride(0), tile.bm, tile.bn, tile.bk, GROUP, leaves // parts,
        parts > 1, even, tile.swap, "x" in tile.tma, "w" in tile.tma, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y if parts == 1 else tree_sum(y, out_dtype)


def _describe(t: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, columns])
