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

    def shared_bytes(self, dim: int) -> int:
        """Of a program with splits in parallel: blocks of K and V in flight, and about 20 KB for q and P."""
        return (self.stages - 1) // 2 * 2 * 64 * dim * 2 + 300 * self.rows + 4 * self.rows * dim

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
