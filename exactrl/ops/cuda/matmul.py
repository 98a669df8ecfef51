"""Implementations of the canonical product x Wᵀ on a GPU. Each claims the reference's bits; certify tells whose.

Name -> function of (x [M, K], w [N, K], out_dtype, leaves) -> [M, N], for the shapes and M that `serves` names. A claim
is never believed: parity/certify.py compares it with the reference on this machine, for every M up to the decode
maximum, and contract.Certificate lists what may run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch

from exactrl.contract import LinearShape
from exactrl.ops.cuda import nvrtc, wgmma_matmul
from exactrl.ops.cuda.tiles import LEAF_PAIRS, LEAF_PARALLEL, LEAF_REFERENCE, REFERENCE, TUNED, Tile

Product = Callable[[torch.Tensor, torch.Tensor, torch.dtype, int], torch.Tensor]
F32 = torch.float32
PADDING = 64
ALIGNMENT = 8  # elements: the bulk copy engine wants strides in multiples of 16 bytes


@dataclass(frozen=True, slots=True)
class Implementation:
    """`serves(shape, m)` says where the implementation is offered; it must be true for every smaller m, too."""

    name: str
    product: Product
    serves: Callable[[LinearShape, int], bool]


def _tree(leaf: Callable[[int, torch.Tensor | None], torch.Tensor], first: int, count: int) -> torch.Tensor:
    """Balanced tree over leaves; `leaf(i, into)` is leaf i in fp32, added to `into` in place when given."""
    if count == 1:
        return leaf(first, None)
    if count == 2:
        return leaf(first + 1, leaf(first, None))
    half = count // 2
    return _tree(leaf, first, half).add_(_tree(leaf, first + half, half))


def cublas(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype, leaves: int = 1) -> torch.Tensor:
    """Whatever cuBLAS picks, split-K included."""
    if leaves == 1:
        return torch.mm(x, w.T) if out_dtype == x.dtype else torch.mm(x, w.T, out_dtype=out_dtype)
    k = x.shape[1] // leaves

    def leaf(i: int, into: torch.Tensor | None) -> torch.Tensor:
        a, b = x[:, i * k : (i + 1) * k], w[:, i * k : (i + 1) * k].T
        return torch.mm(a, b, out_dtype=F32) if into is None else torch.addmm(into, a, b, out_dtype=F32)

    return _tree(leaf, 0, leaves).to(out_dtype)


def deepgemm(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype, leaves: int = 1) -> torch.Tensor:
    """DeepGEMM's bf16 NT kernel; leaves accumulate into fp32 buffers."""
    import deep_gemm

    m, n, k = x.shape[0], w.shape[0], x.shape[1] // leaves
    if leaves == 1:
        y = torch.empty(m, n, dtype=out_dtype, device=x.device)
        deep_gemm.bf16_gemm_nt(x, w, y)
        return y

    def leaf(i: int, into: torch.Tensor | None) -> torch.Tensor:
        y = torch.empty(m, n, dtype=F32, device=x.device) if into is None else into
        deep_gemm.bf16_gemm_nt(x[:, i * k : (i + 1) * k], w[:, i * k : (i + 1) * k], y, into)
        return y

    return _tree(leaf, 0, leaves).to(out_dtype)


def deepgemm_padded(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype, leaves: int = 1) -> torch.Tensor:
    """DeepGEMM on x with further rows up to a multiple of 64: it is up to 1.6 times slower at a partly filled tile."""
    from exactrl.ops.cuda.triton_matmul import padded

    return deepgemm(padded(x, PADDING), w, out_dtype, leaves)[: x.shape[0]]


def _triton(x, w, out_dtype, leaves, tile: Tile, share: int = 0) -> torch.Tensor:
    """`share` leaves per program; 0 = all of them."""
    from exactrl.ops.cuda.triton_matmul import matmul

    return matmul(x, w, out_dtype, leaves, tile, leaves // share if share else 1)


def reference(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype, leaves: int = 1) -> torch.Tensor:
    """The bit reference of `sm90`: any shape, any number of rows, slow."""
    return _triton(x, w, out_dtype, leaves, REFERENCE if leaves == 1 else LEAF_REFERENCE)


def _fits(tile: Tile, shape: LinearShape, m: int) -> bool:
    length = shape.k // shape.leaves
    return m <= tile.max_rows and (not tile.tma or (length % tile.bk == 0 and shape.k % ALIGNMENT == 0))


def _offered(name: str, tile: Tile, share: int, leaves: Callable[[int], bool]) -> Implementation:
    return Implementation(
        f"{name}:{tile}",
        partial(_triton, tile=tile, share=share),
        lambda shape, m: leaves(shape.leaves) and _fits(tile, shape, m),
    )


def _deepgemm_serves(shape: LinearShape, m: int) -> bool:
    return shape.k // shape.leaves % 64 == 0 and shape.n % ALIGNMENT == 0


def implementations() -> dict[str, Implementation]:
    """Everything that can run here; the reference is always among them, DeepGEMM where it is installed."""
    found = [
        Implementation("reference", reference, lambda shape, m: True),
        Implementation("cublas", cublas, lambda shape, m: True),
        *(_offered("triton", tile, 0, lambda leaves: leaves == 1) for tile in TUNED),
        *(_offered("triton-leaf", tile, 1, lambda leaves: leaves > 1) for tile in LEAF_PARALLEL),
        *(_offered("triton-pair", tile, 2, lambda leaves: leaves > 1) for tile in LEAF_PAIRS),
    ]
    if nvrtc.available():
        found += [
            Implementation(f"cuda:{cut}", partial(wgmma_matmul.matmul, cut=cut), partial(wgmma_matmul.fits, cut))
            for cut in wgmma_matmul.every_cut()
        ]
    if find_spec("deep_gemm") is not None:
        found += [
            Implementation("deepgemm", deepgemm, _deepgemm_serves),
            Implementation(
                "deepgemm-padded",
                deepgemm_padded,
                lambda shape, m: shape.leaves == 1 and m <= 512 and _deepgemm_serves(shape, m),
            ),
        ]
    return {implementation.name: implementation for implementation in found}
