"""linear on a GPU: y = x Wᵀ, forward in the contract's order, backward through ordinary library GEMMs.

The forward runs the implementation that the machine's certificate names for this shape and number of rows. Gradients
are deterministic under determinism.apply(), not batch-invariant.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from exactrl.contract import Certificate, LinearShape
from exactrl.errors import CertificationError
from exactrl.ops.cuda.matmul import Implementation, Product, cublas

NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def linear_reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """fp64, for correctness within a tolerance."""
    return x.double() @ w.double().T


def linear_plain(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype, leaves: int = 1) -> torch.Tensor:
    """What runs when exactness is off: cuBLAS as it comes, K in one piece whatever `leaves` says. Sums of a split K may
    be rounded to bfloat16, as torch allows by default and determinism.apply() does not."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = True
    try:
        return cublas(x, w, out_dtype)
    finally:
        settings.allow_bf16_reduced_precision_reduction = before


def certified_product(certificate: Certificate, available: Mapping[str, Implementation]) -> Product:
    """The product that runs only what `certificate` names. Rows beyond the largest certified number are cut into slices
    of that size: a row's bits do not depend on its neighbours.

    The returned function raises CertificationError for a shape without certificate or a named implementation that is
    not available here.
    """

    def product(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype, leaves: int = 1) -> torch.Tensor:
        m = x.shape[0]
        assert x.dtype == w.dtype == torch.bfloat16, f"the GPU contract takes bfloat16, not {x.dtype} and {w.dtype}"
        if m == 0:
            return torch.empty(0, w.shape[0], dtype=out_dtype, device=x.device)
        shape = LinearShape(w.shape[0], w.shape[1], NAMES[out_dtype], leaves)
        limit = certificate.max_rows(shape)
        if m <= limit:
            return one(shape, x, w, out_dtype, leaves)
        y = torch.empty(m, shape.n, dtype=out_dtype, device=x.device)
        for start in range(0, m, limit):
            y[start : start + limit] = one(shape, x[start : start + limit], w, out_dtype, leaves)
        return y

    def one(shape: LinearShape, x, w, out_dtype: torch.dtype, leaves: int) -> torch.Tensor:
        name = certificate.implementation(shape, x.shape[0])
        if name not in available:
            raise CertificationError(f"the certificate names {name!r} for {shape}, which is not installed here")
        return available[name].product(x, w, out_dtype, leaves)

    return product


def grad_input(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """dy [M, N] W [N, K] -> [M, K]."""
    return torch.mm(dy, w)


def grad_weight(dy: torch.Tensor, x: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """dyᵀ [N, M] x [M, K] -> float32 [N, K], added to `into` when given."""
    if dy.dtype == torch.float32:
        return torch.mm(dy.T, x) if into is None else into.addmm_(dy.T, x)
    if into is None:
        return torch.mm(dy.T, x, out_dtype=torch.float32)
    return into.copy_(torch.addmm(into, dy.T, x, out_dtype=torch.float32))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, master, w, product, out_dtype, leaves):
        ctx.save_for_backward(x, w)
        return product(x, w, out_dtype, leaves)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = dy.to(x.dtype).contiguous()
        dx = grad_input(dy, w) if ctx.needs_input_grad[0] else None
        dw = grad_weight(dy, x) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None, None, None


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    product: Product,
    *,
    master: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    leaves: int = 1,
) -> torch.Tensor:
    """x [M, K], w [N, K] -> [M, N] in `out_dtype` (x's by default). The fp32 gradient of w goes to `master` when given.

    A float32 dy (the head's) is rounded to x's dtype before the two gradient GEMMs.
    """
    if torch.is_grad_enabled() and (x.requires_grad or (master is not None and master.requires_grad)):
        return _Linear.apply(x, master, w, product, out_dtype or x.dtype, leaves)
    return product(x, w, out_dtype or x.dtype, leaves)
