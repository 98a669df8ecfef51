"""The device's own digest of weights: any changed bit changes it, and so does an exchange of elements."""

from __future__ import annotations

import pytest
import torch

from exactrl.ops import checksum as module
from exactrl.ops.checksum import checksum


@pytest.fixture(params=[1 << 24, 7])
def words(request, monkeypatch) -> None:
    """How many words are mixed at once plays no part."""
    monkeypatch.setattr(module, "WORDS", request.param)


@pytest.mark.parametrize("count", [0, 1, 3, 8, 1001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("words")
def test_content_decides(count: int, dtype: torch.dtype) -> None:
    x = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = checksum(x)
    assert len(found) == 16
    assert checksum(x.clone()) == found
    assert checksum(torch.cat([x, x])[:count]) == found
    integers = torch.int16 if dtype == torch.bfloat16 else torch.int32
    for i in range(0, count, 17):
        for bit in (0, 7, 15):
            y = x.clone()
            y.view(integers)[i] ^= 1 << bit if bit < 15 else -(1 << 15)
            assert checksum(y) != found


def test_order_decides() -> None:
    x = torch.arange(64.0)
    seen = {checksum(x.roll(i)) for i in range(64)}
    swapped = x.clone()
    swapped[[0, 2]] = swapped[[2, 0]]
    assert len(seen | {checksum(swapped)}) == 65


def test_several_at_once_are_each_their_own() -> None:
    tensors = [torch.arange(n, dtype=torch.float32) for n in (5, 0, 8)]
    assert module.checksums(tensors) == [checksum(x) for x in tensors]
    assert module.checksums([]) == []


def test_chunks_change_nothing(monkeypatch) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    found = checksum(x)
    monkeypatch.setattr(module, "WORDS", 13)
    assert checksum(x) == found


def test_zeros_of_other_lengths_differ_only_with_their_sizes() -> None:
    """Padding is zeros: weights.digest_of adds name, dtype and shape."""
    assert checksum(torch.zeros(2)) == checksum(torch.zeros(2))
    assert checksum(torch.zeros(2)) != checksum(torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_of_views_at_any_offset_empty_ones_too(dtype: torch.dtype) -> None:
    x = torch.arange(20).to(dtype)
    for start in range(21):
        for stop in (start, 20):
            assert checksum(x[start:stop]) == checksum(x[start:stop].clone()), (start, stop)
