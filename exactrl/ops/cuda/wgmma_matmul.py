"""y = x Wᵀ for few rows and long K in CUDA C++: the kernel of wgmma_matmul.cu, how it is cut, and where it is offered.

One accumulator per output leaves only as many blocks as there are output tiles, and one multiprocessor takes in at most
64 bytes per cycle. What helps: output tiles that are no power of two, so that one wave of them fills the machine, and
loading no row of x that is not there. Triton can do neither.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from exactrl.contract import LinearShape
from exactrl.ops.cuda import nvrtc

AT_ONCE = {1: 132, 2: 132, 3: 126, 4: 128}
"""Blocks that run at once on an H100 or H200 by the size of their clusters, each inside 16 or 18 multiprocessors."""
CLUSTERS = {1: ((1, 1),), 2: ((1, 1), (2, 1)), 3: ((1, 1), (1, 2), (3, 1)), 4: ((1, 1), (2, 1), (2, 2), (4, 1))}
"""Row tiles -> clusters that are offered: row tiles x column tiles."""
CHUNK = 64  # inputs: 128 bytes, one span of the swizzle
ROWS = 64  # of x, which one warpgroup multiplies
MOST_COLUMNS = 256  # of one instruction
MOST_ROWS = 256  # above, tiles are large enough without this
MOST_STAGES = 64
RESERVED = 1024 + 1024  # bytes: alignment and barriers


@dataclass(frozen=True, slots=True)
class Cut:
    """`columns` outputs per block, `chunks` of K per stage, `warpgroups` of 64 rows; clusters of `tall` blocks that
    share weights by `wide` blocks that share rows of x."""

    columns: int
    chunks: int = 1
    warpgroups: int = 1
    tall: int = 1
    wide: int = 1

    @property
    def cluster(self) -> int:
        return self.tall * self.wide

    @property
    def rows(self) -> int:
        return ROWS * self.warpgroups

    def __str__(self) -> str:
        cluster = f"-c{self.tall}x{self.wide}" if self.cluster > 1 else ""
        return f"{self.rows}x{self.columns}x{self.chunks * CHUNK}{cluster}"


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def tiles(cut: Cut, m: int, n: int) -> tuple[int, int]:
    """(row tiles, column tiles), whole clusters of them."""
    return _up(-(-m // cut.rows), cut.tall), _up(-(-n // cut.columns), cut.wide)


def one_wave(n: int, row_tiles: int, tall: int = 1, wide: int = 1) -> int | None:
    """The fewest columns per block with which all blocks run at once; None if one instruction has fewer."""
    clusters = AT_ONCE[tall * wide] // (tall * wide)
    columns = _up(-(-n // (clusters // (row_tiles // tall) * wide)), 8)
    return columns if columns <= MOST_COLUMNS else None


@functools.lru_cache(maxsize=4096)
def cuts(shape: LinearShape) -> frozenset[Cut]:
    """What is offered for one shape, for each number of row tiles: blocks alone and in clusters."""
    if shape.leaves != 1 or shape.n % 8 or shape.k % CHUNK:
        return frozenset()
    found = set()
    for row_tiles, clusters in CLUSTERS.items():
        for tall, wide in clusters:
            columns = one_wave(shape.n, row_tiles, tall, wide)
            if columns and columns <= shape.n:
                found.add(Cut(columns, _chunks(columns), 1, tall, wide))
    return frozenset(cut for cut in found if shape.k % (CHUNK * cut.chunks) == 0)


def _chunks(columns: int) -> int:
    return 2 if columns <= 80 else 1  # wider tiles leave room for few stages


def every_cut() -> list[Cut]:
    """Those that are offered for one shape or another."""
    clusters = dict.fromkeys(cluster for each in CLUSTERS.values() for cluster in each)
    return [Cut(n, _chunks(n), 1, *cluster) for n in range(8, MOST_COLUMNS + 1, 8) for cluster in clusters]


def fits(cut: Cut, shape: LinearShape, m: int) -> bool:
    """Whether the cut is offered for this shape and all blocks run at once."""
    if m > MOST_ROWS or cut not in cuts(shape):
        return False
    row_tiles, column_tiles = tiles(cut, m, shape.n)
    return row_tiles * column_tiles <= AT_ONCE[cut.cluster]


def source(cut: Cut, out: str) -> str:
    """CUDA C++ of one variant; `out` is float or bfloat16."""
    count = cut.columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(acc[{i}])' for i in range(count))
    instruction = (
        f'asm volatile("{{\\n.reg .pred accumulate;\\nsetp.ne.b32 accumulate, 1, 0;\\n'
        f"wgmma.mma_async.sync.aligned.m64n{cut.columns}k16.f32.bf16.bf16 {{{registers}}}, %{count}, %{count + 1}, "
        f'accumulate, 1, 1, 0, 0;\\n}}" : {outputs} : "l"(a), "l"(b))'
    )
    defined = {
        "BN": cut.columns, "CHUNKS": cut.chunks, "WARPGROUPS": cut.warpgroups, "TALL": cut.tall, "WIDE": cut.wide,
        "TOut": out, "WGMMA(acc, a, b)": instruction,
    }  # fmt: skip
    head = "".join(f"#define {name} {value}\n" for name, value in defined.items())
    return head + (Path(__file__).parent / "wgmma_matmul.cu").read_text()


@functools.cache
def _kernel(cut: Cut, out: str) -> nvrtc.Kernel:
    return nvrtc.Kernel(source(cut, out), "wgmma_matmul", shared=nvrtc.MAX_SHARED - 1024)


def stages(cut: Cut, rows: int) -> int:
    """As many as fit into shared memory with `rows` of x per tile, and what is read beyond a short tile."""
    beyond = cut.rows * 128
    return min(MOST_STAGES, (nvrtc.MAX_SHARED - RESERVED - beyond) // (cut.chunks * 128 * (_up(rows, 8) + cut.columns)))


def matmul(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype, leaves: int, cut: Cut) -> torch.Tensor:
    """x [M, K], w [N, K], inner stride 1, K a multiple of a stage's inputs -> [M, N]."""
    (m, k), n = x.shape, w.shape[0]
    assert leaves == 1, leaves
    row_tiles, column_tiles = tiles(cut, m, n)
    rows = -(-m // row_tiles)
    y = torch.empty(m, n, dtype=out_dtype, device=x.device)
    x_map = nvrtc.tensor_map(x, (CHUNK, m, k // CHUNK), (1, x.stride(0), CHUNK), (CHUNK, rows, 1))
    w_map = nvrtc.tensor_map(w, (CHUNK, n, k // CHUNK), (1, w.stride(0), CHUNK), (CHUNK, cut.columns, 1))
    kernel = _kernel(cut, "float" if out_dtype == torch.float32 else "bfloat16")
    kernel.launch(
        (row_tiles * column_tiles, 1, 1), 128 * cut.warpgroups + 32,
        [x_map, w_map, y, m, n, k // (CHUNK * cut.chunks), rows, _up(rows, 8) * 128, row_tiles, stages(cut, rows)],
        cluster=cut.cluster,
    )  # fmt: skip
    return y
