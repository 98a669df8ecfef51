"""Which attention kernels run: those that the machine's certificate names, and no others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from exactrl.contract import AttentionShape, Certificate
from exactrl.errors import CertificationError
from exactrl.ops.cuda.attention import AttentionChoice, AttentionImplementation


def certified_attention(
    certificate: Certificate, available: Mapping[str, AttentionImplementation]
) -> Callable[[AttentionShape], AttentionChoice]:
    """The choice for a shape. Where no kernel with parallel splits is exact, all rows go to the one that walks them in
    order.

    The returned function raises CertificationError for a shape without certificate or a named implementation that is
    not available here.
    """

    @functools.cache  # asked in every layer of every step
    def choice(shape: AttentionShape) -> AttentionChoice:
        in_order = named(shape, certificate.attends(shape, "in_order"))
        if "split" not in certificate.attention[shape]:
            return AttentionChoice(in_order, in_order, 0)
        split = named(shape, certificate.attends(shape, "split"))
        assert split.most_rows is not None, f"{split.name} says nothing about its most rows"
        return AttentionChoice(split, in_order, split.most_rows)

    def named(shape: AttentionShape, name: str) -> AttentionImplementation:
        if name not in available:
            raise CertificationError(f"the certificate names {name!r} for {shape}, which is not installed here")
        return available[name]

    return choice
