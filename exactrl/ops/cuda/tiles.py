"""How Triton kernels may cut a product, and which cuts are offered for certification. A tile changes no bit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, outputs and inputs of one program's block. `swap` puts the weight on the wide side of the matrix unit.
    `tma` names what is loaded through the bulk copy engine: "", "w" or "xw" (x has too few rows for a tile: "w" is
    faster). Offered for at most `max_rows` rows of x."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    swap: bool = False
    tma: str = ""
    max_rows: int = 1 << 30

    def __str__(self) -> str:
        flags = ("-swap" if self.swap else "") + (f"-tma_{self.tma}" if self.tma else "")
        return f"{self.bm}x{self.bn}x{self.bk}-w{self.warps}-s{self.stages}{flags}"


REFERENCE = Tile(128, 128, 64, 8, 3)
"""The bit reference: pointers and masks only, one tile for every M."""
LEAF_REFERENCE = Tile(64, 64, 64, 4, 3)
"""The same with more than one leaf: smaller, because four accumulators of the other would spill registers."""

# Most were chosen greedily from 94 on one H200, for the best mean over o, qkv and down projections of Qwen3-0.6B to 32B
# at 1 to 256 rows, weights cold (docs/log.md). Above 256 rows the libraries are faster.
TUNED = (
    Tile(16, 64, 128, 4, 8, swap=True, max_rows=32),
    Tile(16, 64, 128, 4, 8, swap=True, tma="w", max_rows=32),
    Tile(16, 64, 128, 4, 8, swap=True, tma="xw", max_rows=32),
    Tile(16, 64, 256, 4, 4, swap=True, tma="w", max_rows=32),
    Tile(16, 64, 256, 4, 4, swap=True, tma="xw", max_rows=32),
    Tile(32, 64, 128, 4, 8, swap=True, tma="w", max_rows=32),
    Tile(32, 64, 128, 4, 8, swap=True, tma="xw", max_rows=64),
    Tile(32, 64, 256, 4, 4, swap=True, tma="xw", max_rows=64),
    Tile(64, 32, 256, 4, 4, tma="xw", max_rows=256),
    Tile(64, 64, 128, 4, 6, tma="w", max_rows=64),
    Tile(64, 64, 128, 4, 6, tma="xw", max_rows=256),
    Tile(64, 64, 64, 4, 4, tma="xw", max_rows=256),
    Tile(64, 128, 64, 4, 8, tma="xw", max_rows=256),
)

# One program per leaf: the leaves run in parallel, which at few rows hides what the tree costs.
LEAF_PARALLEL = (
    Tile(16, 64, 64, 4, 8, swap=True, tma="xw", max_rows=32),
    Tile(16, 64, 128, 4, 8, swap=True, tma="xw", max_rows=32),
    Tile(32, 64, 64, 4, 8, swap=True, tma="xw", max_rows=64),
    Tile(64, 32, 64, 4, 8, tma="xw", max_rows=128),
    Tile(64, 64, 64, 4, 8, tma="xw", max_rows=512),
    Tile(64, 128, 64, 4, 6, tma="xw", max_rows=2048),
    Tile(128, 128, 64, 8, 4, tma="xw"),
)

# Two leaves in one program, an accumulator each: more than two spill registers at a tile that is fast for many rows.
LEAF_PAIRS = (Tile(64, 64, 64, 4, 6, tma="xw", max_rows=512), Tile(128, 128, 64, 8, 4, tma="xw"))
