"""y = x Wᵀ for few rows and long K in CUDA C++: the kernel of wgmma_matmul.cu, how it is cut, and where it is offered.

One accumulator per output leaves only as many blocks as there are output tiles. What helps: output tiles that are no
power of two, so that one wave of them fills the machine; loading hardly a row of x that is not there; from about 130
rows, where power bounds the clock, multiplying no such row either; and at few rows, where a product waits for the one
before it longer than it needs to, long stages and weights that are on their way by then. Triton can do none of it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from exactrl.contract import LinearShape
from exactrl.ops.cuda import nvrtc

AT_ONCE = 132
"""Blocks that run at once on an H100 or H200, alone or in pairs (in clusters of three 117, in clusters of four 120)."""
CHUNK = 64  # inputs: 128 bytes, one span of the swizzle
TALL_SIDE = 64  # rows of one operand of a warpgroup's instruction
WIDEST = 256  # rows of the other
NARROW = 80  # columns; wider tiles leave room for few stages of two chunks
NARROWEST_SWAPPED = 40  # fewer rows of x are left to the other cuts
MOST_ROWS = 256  # above, tiles are large enough without this
MOST_STAGES = 64
RESERVED = 1024 + 1024  # bytes: alignment and barriers


@dataclass(frozen=True, slots=True)
class Cut:
    """`columns` outputs per block, `chunks` of K per stage; 64 rows of x, or, with `swap`, as many as one wave leaves
    to a block. With `pair` two blocks with different rows of x share their weights."""

    columns: int
    chunks: int = 1
    swap: bool = False
    pair: bool = False

    @property
    def warpgroups(self) -> int:
        return -(-self.columns // TALL_SIDE) if self.swap else 1

    @property
    def tall(self) -> int:
        return 2 if self.pair else 1

    def wide(self, rows: int) -> int:
        """Width of the instruction for tiles of `rows` of x."""
        return max(_up(rows, 8), NARROWEST_SWAPPED) if self.swap else self.columns

    def padded(self, rows: int, row_tiles: int) -> int:
        """Rows that a tile of `rows`, one of `row_tiles`, takes in shared memory. Those that are not there are zeros,
        or, where several chunks are copied at once, up to seven of the next tile, whose results nobody stores. Narrow
        tiles and single ones are bound by memory, not by power, and rather have more stages than all 64 rows that are
        multiplied."""
        if self.swap:
            return self.wide(rows)
        return TALL_SIDE if self.columns > NARROW and row_tiles > 1 else _up(rows, 8)

    def __str__(self) -> str:
        rows = "swap" if self.swap else TALL_SIDE
        return f"{rows}x{self.columns}x{self.chunks * CHUNK}{'-pair' if self.pair else ''}"


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def tiles(cut: Cut, m: int, n: int) -> tuple[int, int]:
    """(row tiles, column tiles), whole pairs of them."""
    column_tiles = -(-n // cut.columns)
    if cut.swap:
        return min(AT_ONCE // column_tiles, -(-m // 8)), column_tiles
    return _up(-(-m // TALL_SIDE), cut.tall), column_tiles


def one_wave(n: int, row_tiles: int) -> int | None:
    """The fewest columns per block with which all blocks run at once; None if one instruction has fewer."""
    columns = _up(-(-n // (AT_ONCE // row_tiles)), 8)
    return columns if columns <= WIDEST else None


@functools.lru_cache(maxsize=4096)
def cuts(shape: LinearShape) -> frozenset[Cut]:
    """What is offered for one shape, for each number of row tiles."""
    if shape.leaves != 1 or shape.n % 8 or shape.k % CHUNK:
        return frozenset()
    found = set()
    for row_tiles in range(1, MOST_ROWS // TALL_SIDE + 1):
        columns = one_wave(shape.n, row_tiles)
        if columns and columns <= shape.n:
            found |= {Cut(columns, chunks) for chunks in _chunks(columns, row_tiles == 1)}
            if row_tiles == 2:
                found.add(Cut(columns, min(_chunks(columns)), pair=True))
            found |= {Cut(width, swap=True) for width in _swapped(columns, row_tiles) if width <= shape.n}
    return frozenset(cut for cut in found if shape.k % (CHUNK * cut.chunks) == 0)


def _chunks(columns: int, single: bool = False) -> set[int]:
    """Of one row tile at few rows, how long the chain of products is counts: few, long stages make it shorter."""
    if columns > NARROW:
        return {1}
    return {2, 4} if single else {2}


def _swapped(columns: int, row_tiles: int) -> set[int]:
    """Widths at which swapping pays, in whole or nearly whole 64s of one or two warpgroups."""
    if row_tiles < 3 or not TALL_SIDE <= columns <= 2 * TALL_SIDE:
        return set()
    whole = _up(columns, TALL_SIDE)
    return {columns, whole} if row_tiles == 3 else {columns} & {whole}


def every_cut() -> list[Cut]:
    """Those that are offered for one shape or another."""
    columns = range(8, WIDEST + 1, 8)
    unpaired = [Cut(n, chunks) for n in columns for chunks in sorted(_chunks(n, single=True))]
    paired = [Cut(n, min(_chunks(n)), pair=True) for n in columns]
    return unpaired + paired + [Cut(n, swap=True) for n in columns if TALL_SIDE <= n <= 2 * TALL_SIDE]


def fits(cut: Cut, shape: LinearShape, m: int) -> bool:
    """Whether the cut is offered for this shape and all blocks run at once."""
    if m > MOST_ROWS or cut not in cuts(shape):
        return False
    row_tiles, column_tiles = tiles(cut, m, shape.n)
    return row_tiles * column_tiles <= AT_ONCE


def source(cut: Cut, wide: int, out: str) -> str:
    """CUDA C++ of one variant; `out` is float or bfloat16."""
    count = wide // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(acc[{i}])' for i in range(count))
    instruction = (
        f'asm volatile("{{\\n.reg .pred accumulate;\\nsetp.ne.b32 accumulate, 1, 0;\\n'
        f"wgmma.mma_async.sync.aligned.m64n{wide}k16.f32.bf16.bf16 {{{registers}}}, %{count}, %{count + 1}, "
        f'accumulate, 1, 1, 0, 0;\\n}}" : {outputs} : "l"(a), "l"(b))'
    )
    defined = {
        "COLUMNS": cut.columns, "SWAP": int(cut.swap), "WIDE": wide, "CHUNKS": cut.chunks,
        "WARPGROUPS": cut.warpgroups, "TALL": cut.tall, "TOut": out, "WGMMA(acc, a, b)": instruction,
    }  # fmt: skip
    head = "".join(f"#define {name} {value}\n" for name, value in defined.items())
    return head + (Path(__file__).parent / "wgmma_matmul.cu").read_text()


@functools.cache
def _kernel(cut: Cut, wide: int, out: str) -> nvrtc.Kernel:
    return nvrtc.Kernel(source(cut, wide, out), "wgmma_matmul", shared=nvrtc.MAX_SHARED - 1024)


def stages(cut: Cut, padded: int) -> int:
    """As many as fit into shared memory with `padded` rows of x, and what is read beyond a tile of under 64 rows."""
    beyond = TALL_SIDE * 128
    stage = cut.chunks * 128 * (padded + cut.columns)
    return min(MOST_STAGES, (nvrtc.MAX_SHARED - RESERVED - beyond) // stage)


def matmul(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype, leaves: int, cut: Cut) -> torch.Tensor:
    """x [M, K], w [N, K], inner stride 1, K a multiple of a stage's inputs -> [M, N].

    In a CUDA graph the kernel starts early, with one row tile or two, and with one it fetches the first of w while the
    kernels before it still run: what is captured must not write weights. (Row tiles that share w would no longer read
    it together; three and more take up to a fifth longer when they start early, docs/log.md, 2026-11-30.)
    """
    (m, k), n = x.shape, w.shape[0]
    assert leaves == 1, leaves
    row_tiles, column_tiles = tiles(cut, m, n)
    rows = -(-m // row_tiles)
    padded = cut.padded(rows, row_tiles)
    copied = padded if cut.chunks > 1 else rows  # of several chunks, copied at once, each begins at a multiple of 8
    y = torch.empty(m, n, dtype=out_dtype, device=x.device)
    x_map = nvrtc.tensor_map(x, (CHUNK, m, k // CHUNK), (1, x.stride(0), CHUNK), (CHUNK, copied, cut.chunks))
    w_map = nvrtc.tensor_map(w, (CHUNK, n, k // CHUNK), (1, w.stride(0), CHUNK), (CHUNK, cut.columns, cut.chunks))
    kernel = _kernel(cut, cut.wide(rows), "float" if out_dtype == torch.float32 else "bfloat16")
    early = row_tiles <= 2 and torch.cuda.is_current_stream_capturing()
    sizes = (m, n, k // (CHUNK * cut.chunks), rows, copied, padded, row_tiles, stages(cut, padded))
    kernel.launch(
        (row_tiles * column_tiles, 1, 1), 128 * cut.warpgroups + 32,
        [x_map, w_map, y, *sizes, int(early and row_tiles == 1)], cluster=cut.tall, early=early,
    )  # fmt: skip
    return y
