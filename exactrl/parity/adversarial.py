"""Inputs on which a wrong order of summation, a flushed denormal or a lost sign of zero shows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from exactrl.contract import LinearShape

KINDS = ("random", "adversarial")
Make = Callable[[int, int, torch.Generator], torch.Tensor]


def linear_inputs(
    shape: LinearShape, m: int, kind: str, device: str, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, k] and w [n, k] in bf16. The same values for one (shape, m, kind, seed) on one device class."""
    g = torch.Generator(device).manual_seed(seed * 1_000_003 + shape.n * 31 + shape.k)
    if kind == "random":
        x = torch.randn(m, shape.k, generator=g, device=device)
        w = torch.randn(shape.n, shape.k, generator=g, device=device).mul_(shape.k**-0.5)
        return x.bfloat16(), w.bfloat16()
    return mixed(m, shape.k, g), mixed(shape.n, shape.k, g)


def _large_exponents(n: int, k: int, g: torch.Generator) -> torch.Tensor:
    """Magnitudes from 2^-40 to 2^40: products stay finite, sums cancel, small terms vanish or survive by order."""
    exponents = torch.randint(-40, 41, (n, k), generator=g, device=g.device)
    return torch.ldexp(torch.randn(n, k, generator=g, device=g.device), exponents)


def _denormals(n: int, k: int, g: torch.Generator) -> torch.Tensor:
    """bf16 denormals of both signs, a few normal numbers between."""
    small = torch.randn(n, k, generator=g, device=g.device) * 2.0**-130
    keep = torch.rand(n, k, generator=g, device=g.device) < 0.1
    return torch.where(keep, torch.randn(n, k, generator=g, device=g.device), small)


def _zeros(n: int, k: int, g: torch.Generator) -> torch.Tensor:
    """+0 and -0, one value in sixteen not zero."""
    value = torch.randn(n, k, generator=g, device=g.device)
    return torch.where(torch.rand(n, k, generator=g, device=g.device) < 1 / 16, value, torch.copysign(value * 0, value))


def _equal(n: int, k: int, g: torch.Generator) -> torch.Tensor:
    """Every row the same."""
    return torch.randn(1, k, generator=g, device=g.device).expand(n, k)


def _one_hot(n: int, k: int, g: torch.Generator) -> torch.Tensor:
    at = torch.randint(0, k, (n, 1), generator=g, device=g.device)
    return torch.zeros(n, k, device=g.device).scatter_(1, at, 1.0)


def _plain(n: int, k: int, g: torch.Generator) -> torch.Tensor:
    return torch.randn(n, k, generator=g, device=g.device)


MAKERS: dict[str, Make] = {
    "large exponents": _large_exponents,
    "random": _plain,
    "denormals": _denormals,
    "zeros": _zeros,
    "equal rows": _equal,
    "one-hot": _one_hot,
}


def mixed(n: int, k: int, g: torch.Generator) -> torch.Tensor:
    """[n, k] bf16 whose rows are of each kind in turn, the first with large exponents."""
    out = torch.empty(n, k, dtype=torch.bfloat16, device=g.device)
    for i, make in enumerate(MAKERS.values()):
        rows = len(range(i, n, len(MAKERS)))
        if rows:
            out[i :: len(MAKERS)] = make(rows, k, g).bfloat16()
    return out
