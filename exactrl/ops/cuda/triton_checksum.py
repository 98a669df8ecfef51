"""The sums of checksum.py on a GPU, in one pass over the words."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, PROGRAMS, WARPS = 2048, 1024, 8


@triton.jit(do_not_specialize=["N"])
def _partial_sums(
    words, partial, N, GOLDEN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr
):
    """partial int64 [programs, 2]: of every programs-th block."""
    plain, weighted = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    for start in range(tl.program_id(0) * BLOCK, N, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside, index = i < N, i.to(tl.int64) + 1
        mixed = tl.load(words + i, mask=inside, other=0) ^ (index * GOLDEN)
        mixed = (mixed ^ (mixed >> 31)) * FIRST
        mixed = (mixed ^ (mixed >> 31)) * SECOND
        mixed = tl.where(inside, mixed, 0)
        plain += mixed
        weighted += mixed * index
    tl.store(partial + 2 * tl.program_id(0), tl.sum(plain, 0))
    tl.store(partial + 2 * tl.program_id(0) + 1, tl.sum(weighted, 0))


def sums(words: torch.Tensor, golden: int, first: int, second: int) -> torch.Tensor:
    """words int64 [N], contiguous, and the multipliers as signed numbers -> int64 [2] on their device."""
    count = words.numel()
    assert count + PROGRAMS * BLOCK < 1 << 31, f"{8 * count:,} bytes in one tensor"
    programs = max(1, min(PROGRAMS, triton.cdiv(count, BLOCK)))
    partial = torch.empty(programs, 2, dtype=torch.int64, device=words.device)
    _partial_sums[(programs,)](words, partial, count, golden, first, second, BLOCK, num_warps=WARPS)
    return partial.sum(0)
