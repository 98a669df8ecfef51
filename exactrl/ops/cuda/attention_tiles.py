"""How Triton attention kernels may cut their work, and which cuts are offered. A tile changes no bit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """`rows` query rows (positions x grouped heads) of one program; `ctas` programs on each multiprocessor share the
    list of splits; `tma` loads blocks without mask through the bulk copy engine."""

    rows: int
    warps: int
    stages: int
    ctas: int = 0
    tma: bool = False

    @property
    def least_dim(self) -> int:
        return 16

    def shared_bytes(self, dim: int) -> int:
        """Of a program with splits in parallel, at least: blocks of K and V in flight, q, P and what Triton adds (seen
        when compiled for sm_90a)."""
        beside = self.rows * (6 * dim + 64) if self.rows >= 64 else self.rows * (2 * dim + 192)
        return (self.stages - 1) // 2 * 2 * 64 * dim * 2 + beside + 256 * self.stages

    def __str__(self) -> str:
        return (
            f"{self.rows}-w{self.warps}-s{self.stages}"
            + (f"-c{self.ctas}" if self.ctas else "")
            + ("-tma" if self.tma else "")
        )


IN_ORDER = (
    AttentionTile(64, 4, 3),
    AttentionTile(128, 8, 3),
    AttentionTile(128, 8, 3, tma=True),
)
SPLIT = (
    AttentionTile(16, 4, 3, ctas=4),
    AttentionTile(16, 4, 5, ctas=3),
    AttentionTile(16, 4, 7, ctas=2),
    AttentionTile(16, 8, 5, ctas=1),
    AttentionTile(32, 4, 5, ctas=2),
    AttentionTile(64, 4, 3, ctas=2),
    AttentionTile(64, 8, 3, ctas=1),
)
"""A page number is loaded two stages before its keys and these two before their use: s3, s5, s7 keep 1, 2, 3 blocks."""


@dataclass(frozen=True, slots=True)
class WarpTile:
    """The CUDA C++ kernel in which a warp takes a split: `keys` (16 or 32) of one chunk, `ring` chunks that a warp
    holds, `ctas` blocks of WARPS warps on each multiprocessor; `tma`: chunks come through the bulk copy engine."""

    keys: int
    ring: int
    ctas: int
    tma: bool = False

    @property
    def rows(self) -> int:
        return WARP_ROWS

    @property
    def least_dim(self) -> int:
        return 64  # elements that one copy takes

    def __str__(self) -> str:
        return f"{self.keys}x{self.ring}-c{self.ctas}"

    def shared_bytes(self, dim: int) -> int:
        """Of a block."""
        return 1024 + WARPS * self.ring * self.keys * dim * 2


WARPS = 4
WARP_ROWS = 8
"""Rows x grouped heads of one sequence that the CUDA C++ kernel takes: the narrow side of the matrix unit."""
WARP_SPLIT = tuple(
    WarpTile(keys, ring, ctas, tma)
    for keys, ring, ctas in ((16, 6, 2), (16, 4, 3), (32, 3, 2), (32, 3, 4), (16, 6, 1))
    for tma in (False, True)
)
FEW_OR_MANY = (WarpTile(16, 4, 3), WarpTile(32, 3, 2, True), WarpTile(16, 6, 1))
"""For many splits; few go to clusters."""


@dataclass(frozen=True, slots=True)
class ClusterTile:
    """The CUDA C++ kernel in which a cluster of `blocks` blocks takes a split, each with at least 16 columns of V: one
    tile of the matrix unit."""

    blocks: int

    @classmethod
    def of(cls, dim: int) -> ClusterTile:
        """With 128 KiB of K and V in each block: larger shares and smaller ones are slower from 128 splits on."""
        return cls(dim // 64)

    @property
    def rows(self) -> int:
        return WARP_ROWS

    @property
    def ctas(self) -> int:
        return 1

    @property
    def least_dim(self) -> int:
        return 64

    def __str__(self) -> str:
        return str(self.blocks)

    def shared_bytes(self, dim: int) -> int:
        """Of a block: its share of a split's K and V, rows of q, scores, weights, maxima and factors, a flag."""
        return 512 * dim * 4 // self.blocks + 8 * (2 * dim + 16) + 8 * (512 + 8) * 4 + 512 * 16 + 2 * 8 * 8 * 4 + 16

    def resident(self, dim: int) -> int:
        """Blocks that a multiprocessor shall hold at least."""
        return min(2, 228 * 1024 // (self.shared_bytes(dim) + 1024))


@dataclass(frozen=True, slots=True)
class StreamTile:
    """The CUDA C++ kernel in which a warp copies for eight others: `ring` blocks of 64 keys, K or V, in shared memory,
    `ctas` blocks on each multiprocessor."""

    ring: int
    ctas: int

    @property
    def rows(self) -> int:
        return WARP_ROWS

    @property
    def least_dim(self) -> int:
        return 64

    def __str__(self) -> str:
        return f"{self.ring}-c{self.ctas}"

    def shared_bytes(self, dim: int) -> int:
        """Of a block: the ring, weights, maxima and factors, barriers."""
        return self.ring * 64 * dim * 2 + 512 * 16 + 2 * 8 * 8 * 4 + 16 * self.ring


STREAM_SPLIT = (StreamTile(5, 2), StreamTile(6, 1))
