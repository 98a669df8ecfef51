"""Builders shared by the op tests."""

from __future__ import annotations

import numpy as np
import torch

from exactrl.contract import get_contract
from exactrl.ops.attention import PAGE, Rows
from exactrl.ops.qkv import HeadShape
from exactrl.ops.weight import Weight

CONTRACT = get_contract("exact-v1")
DTYPES = [torch.float32, torch.bfloat16]


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bit patterns: equality of these is the only equality these tests accept (-0 is not +0)."""
    t = t.detach().contiguous()
    return t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((bits(a) == bits(b)).all())


def make_weight(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    trainable: bool = True,
    packed: bool = True,
) -> Weight:
    weight = Weight(shape, dtype, trainable=trainable, packed=packed)
    weight.assign(torch.randn(shape, generator=generator))
    return weight


def packed_rows(lengths: list[int], shape: HeadShape) -> Rows:
    """Whole sequences side by side, pages in order."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    pages = [-(-n // PAGE) for n in lengths]
    tables = np.zeros((len(lengths), max(pages)), np.int32)
    first = 0
    for i, n in enumerate(pages):
        tables[i, :n] = np.arange(first, first + n)
        first += n
    return Rows.build(starts, np.zeros(len(lengths), np.int64), tables, shape)
