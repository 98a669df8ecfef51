"""Inputs on which attention of another order shows: a sum taken otherwise, a rescale left out, a flushed denormal."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exactrl.contract import AttentionShape
from exactrl.parity.adversarial import MAKERS, Make, mixed


def attention_inputs(
    shape: AttentionShape, lengths: Sequence[int], kind: str, device: str, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [T, H, D], k, v [T, HK, D] in bf16 of whole sequences side by side; scores stay finite in fp32.

    The same values for one (shape, lengths, kind, seed) on one device class, whatever the page size.
    """
    g = torch.Generator(device).manual_seed(seed * 1_000_003 + shape.heads * 31 + shape.dim)
    rows, dim = sum(lengths), shape.dim
    if kind in SLOPES:
        q, k = _sloped(shape, lengths, SLOPES[kind], g)
    else:
        q, k = (DATA[kind](rows * heads, dim, g).view(rows, heads, dim) for heads in (shape.heads, shape.kv_heads))
    flat = kind in ("flat", "peaked")
    v = torch.randn(rows, shape.kv_heads, dim, generator=g, device=device) if flat else None
    if v is None:
        v = mixed(rows * shape.kv_heads, dim, g).view(rows, shape.kv_heads, dim)
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def _scaled(factor: float) -> Make:
    return lambda n, k, g: torch.randn(n, k, generator=g, device=g.device) * factor


DATA: dict[str, Make] = {
    "flat": _scaled(1.0),
    "peaked": _scaled(4.0),
    **{name: make for name, make in MAKERS.items() if name != "random"},
}
# What a score (times log2 e) grows by from key to key: the maximum changes in every block, and blocks and splits are
# rescaled by every power of two down to where exp2 is denormal (below 2^-126) and 0.
SLOPES: dict[str, tuple[float, ...]] = {
    "ascending": (0.01, 0.25, 0.27, 2.0, 2.2, 9.0),
    "descending": (-0.01, -0.25, -0.27, -2.0, -2.2, -9.0),
}
KINDS = (*DATA, *SLOPES)


def _sloped(
    shape: AttentionShape, lengths: Sequence[int], slopes: Sequence[float], g: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of key j near slope * j, another slope for each kv head; a tenth of noise on q."""
    dim, rows = shape.dim, sum(lengths)
    ramp = torch.cat([torch.arange(n, device=g.device) for n in lengths]).float()
    of_head = torch.tensor([slopes[i % len(slopes)] for i in range(shape.kv_heads)], device=g.device)
    unit = dim**-0.5 / 1.4426950408889634  # of k when q is 1 everywhere: score * log2 e = slope * j
    k = ramp[:, None, None] * (of_head * unit)[None, :, None] + torch.zeros(dim, device=g.device)
    q = 1 + 0.1 * torch.randn(rows, shape.heads, dim, generator=g, device=g.device)
    return q, k
