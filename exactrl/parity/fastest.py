"""Linears of a run with exactness off: at each number of rows the fastest of the libraries' and our own kernels.

What is offered: cuBLAS as it comes, DeepGEMM where it is installed, and what this machine's certificate names, if there
is one. Timed when a number of rows is first met (rounded up as certificates do), so two runs may choose differently.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch

from exactrl.contract import Certificate, LinearShape, read_certificate
from exactrl.errors import CertificationError
from exactrl.ops.cuda.linear import NAMES, linear_plain
from exactrl.ops.cuda.matmul import Implementation, Product
from exactrl.parity.certify import Rows, Times

LIBRARIES = ("deepgemm", "deepgemm-padded")
Offered = Callable[[LinearShape, int], Mapping[str, Product]]
"""Products for a shape at a number of rows, by name; each serves fewer rows, too."""


class FastestProduct:
    """A Product. `chosen`: (shape, largest number of rows) -> name. K is summed in one piece whatever `leaves` says."""

    def __init__(
        self, offered: Offered, times: Times, capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing
    ) -> None:
        self.offered, self.times, self.capturing = offered, times, capturing
        self.chosen: dict[tuple[LinearShape, int], str] = {}
        self._products: dict[tuple[LinearShape, int], Product] = {}
        self._ends = Rows().ends()

    def __call__(self, x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype, leaves: int = 1) -> torch.Tensor:
        if not 0 < len(x) <= self._ends[-1]:
            return linear_plain(x, w, out_dtype)
        key = LinearShape(w.shape[0], w.shape[1], NAMES[out_dtype]), self._ends[bisect_left(self._ends, len(x))]
        product = self._products.get(key)
        if product is None:
            if self.capturing():  # nothing can be timed now
                return linear_plain(x, w, out_dtype)
            product = self._products[key] = self._fastest(*key)
        return product(x, w, out_dtype, 1)

    def _fastest(self, shape: LinearShape, rows: int) -> Product:
        products = self.offered(shape, rows)
        try:
            seconds = self.times(shape, products, rows)
        except torch.OutOfMemoryError:  # beside a full KV cache: what needs no further memory
            seconds = {"cublas": 0.0}
        name = self.chosen[shape, rows] = min(seconds, key=seconds.__getitem__)
        return products[name]


def offered_here(implementations: Mapping[str, Implementation], certificate: Certificate | None) -> Offered:
    def offered(shape: LinearShape, rows: int) -> dict[str, Product]:
        found: dict[str, Product] = {"cublas": linear_plain}
        names = [name for name in LIBRARIES if name in implementations and implementations[name].serves(shape, rows)]
        if certificate is not None:
            with suppress(CertificationError):  # of other shapes, or fewer rows
                names.append(certificate.implementation(shape, rows))
        return found | {name: implementations[name].product for name in names if name in implementations}

    return offered


def fastest_product() -> FastestProduct:
    """For this machine. Needs no certificate, and uses what it names."""
    from exactrl.ops.cuda.machine import machine
    from exactrl.ops.cuda.matmul import implementations
    from exactrl.parity.gpu_timing import linear_times

    try:
        certificate = read_certificate(machine())
    except CertificationError:
        certificate = None
    return FastestProduct(offered_here(implementations(), certificate), linear_times)
