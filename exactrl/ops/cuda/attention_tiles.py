"""How attention kernels may cut their work, and which cuts are offered. A tile changes no bit."""

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


WARP_ROWS = 8
"""Rows x grouped heads of one sequence that the CUDA C++ kernels take: the narrow side of the matrix unit."""
WARPS = 4


@dataclass(frozen=True, slots=True)
class WarpTile:
    """The CUDA C++ kernel in which a warp takes a split: `ring` chunks of 16 keys, K or V, that a warp holds, `ctas`
    blocks of WARPS warps on each multiprocessor."""

    ring: int
    ctas: int

    @classmethod
    def of(cls, dim: int) -> WarpTile:
        """As much as fits."""
        return cls(6, 1) if dim > 128 else cls(4, 3)

    def shared_bytes(self, dim: int) -> int:
        """Of a block."""
        return WARPS * self.ring * 16 * dim * 2


@dataclass(frozen=True, slots=True)
class StreamTile:
    """The CUDA C++ kernel in which a warp copies for eight others: `ring` blocks of 64 keys, K or V, in shared memory,
    `ctas` blocks on each multiprocessor."""

    ring: int
    ctas: int

    @classmethod
    def of(cls, dim: int) -> StreamTile:
        """As much as fits. At head dim 128 (6, 1) is 0.3 to 0.5 us faster for one sequence of up to 4k, and slower for
        eight."""
        return cls(6, 1) if dim > 128 else cls(5, 2)

    def shared_bytes(self, dim: int) -> int:
        """Of a block: the ring, weights, maxima and factors, barriers."""
        return self.ring * 64 * dim * 2 + 512 * 16 + 2 * 8 * 8 * 4 + 16 * self.ring
