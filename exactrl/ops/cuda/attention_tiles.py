"""How Triton attention kernels may cut their work, and which cuts are offered for certification. A tile changes no bit."""

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
    AttentionTile(16, 4, 3, ctas=2),
    AttentionTile(16, 4, 2, ctas=3),
    AttentionTile(32, 4, 3, ctas=2),
    AttentionTile(64, 4, 3, ctas=2),
)
