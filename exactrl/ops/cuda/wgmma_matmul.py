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

MULTIPROCESSORS = 132
CHUNK = 64  # inputs: 128 bytes, one span of the swizzle
ROWS = 64  # of x, which one warpgroup multiplies
MOST_COLUMNS = 256  # of one instruction
MOST_ROWS = 256  # above, tiles are large enough without this
MOST_STAGES = 64
RESERVED = 1024 + 1024  # bytes: alignment and barriers


@dataclass(frozen=True, slots=True)
class Cut:
    """`columns` outputs per block, `chunks` of K per stage, a cluster of `across` x `down` blocks that share the rows of
    x (across) and of w (down); `groups` warpgroups of 64 rows each."""

    columns: int
    chunks: int = 2
    across: int = 1
    down: int = 1
    groups: int = 1

    def __str__(self) -> str:
        cluster = f"-c{self.across}x{self.down}" if self.across * self.down > 1 else ""
        return f"{ROWS * self.groups}x{self.columns}-k{self.chunks * CHUNK}{cluster}"


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def tiles(cut: Cut, m: int, n: int) -> tuple[int, int]:
    """(row tiles, column tiles), multiples of the cluster's sides."""
    return _up(-(-m // (ROWS * cut.groups)), cut.down), _up(-(-n // cut.columns), cut.across)


def one_wave(n: int, row_tiles: int) -> int | None:
    """The least multiple of 8 columns per block with which all blocks run at once."""
    columns = _up(-(-n // (MULTIPROCESSORS // row_tiles)), 8)
    return columns if columns <= MOST_COLUMNS else None


def serves(cut: Cut, shape: LinearShape, m: int) -> bool:
    """Where the cut fills one wave at some number of row tiles that is not less than that of m."""
    if shape.leaves != 1 or shape.k % (CHUNK * cut.chunks) or shape.n % 8 or shape.n < cut.columns or m > MOST_ROWS:
        return False
    row_tiles, column_tiles = tiles(cut, m, shape.n)
    possible = range(-(-m // ROWS), MOST_ROWS // ROWS + 1)
    return row_tiles * column_tiles <= MULTIPROCESSORS and cut.columns in {one_wave(shape.n, t) for t in possible}


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
        "BN": cut.columns, "CHUNKS": cut.chunks, "CX": cut.across, "CY": cut.down, "GROUPS": cut.groups, "TOut": out,
        "WGMMA(acc, a, b)": instruction,
    }  # fmt: skip
    head = "".join(f"#define {name} {value}\n" for name, value in defined.items())
    return head + (Path(__file__).parent / "wgmma_matmul.cu").read_text()


@functools.cache
def _kernel(cut: Cut, out: str) -> nvrtc.Kernel:
    return nvrtc.Kernel(source(cut, out), "wgmma_matmul", shared=nvrtc.MAX_SHARED - 1024)


def stages(cut: Cut, rows: int) -> int:
    """As many as fit into shared memory with `rows` of x per tile, and what is read beyond a short tile."""
    beyond = ROWS * cut.groups * 128
    return min(MOST_STAGES, (nvrtc.MAX_SHARED - RESERVED - beyond) // (cut.chunks * 128 * (_up(rows, 8) + cut.columns)))


def matmul(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype, leaves: int, cut: Cut) -> torch.Tensor:
    """x [M, K], w [N, K], inner stride 1, K a multiple of a stage's inputs -> [M, N]."""
    (m, k), n = x.shape, w.shape[0]
    assert leaves == 1, leaves
    row_tiles, column_tiles = tiles(cut, m, n)
    rows = -(-m // row_tiles)
    y = torch.empty(m, n, dtype=out_dtype, device=x.device)
    x_map = nvrtc.tensor_map(x, (CHUNK, m, k // CHUNK), (1, x.stride(0), CHUNK), (CHUNK, rows, 1))
    part = cut.chunks // cut.down
    w_map = nvrtc.tensor_map(w, (CHUNK, n, k // CHUNK), (1, w.stride(0), CHUNK), (CHUNK, cut.columns, part))
    kernel = _kernel(cut, "float" if out_dtype == torch.float32 else "bfloat16")
    kernel.launch(
        (row_tiles * column_tiles, 1, 1), cut.groups * 128 + 32,
        [x_map, w_map, y, m, n, k // (CHUNK * cut.chunks), rows, _up(rows, 8) * 128, row_tiles, stages(cut, rows)],
        cluster=cut.across * cut.down,
    )  # fmt: skip
    return y
