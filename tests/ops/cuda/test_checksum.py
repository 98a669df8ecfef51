"""The GPU's checksum kernel in the interpreter: the sums that torch makes, word for word."""

from __future__ import annotations

from tests.ops.cuda import interpreter  # isort: skip  # noqa: F401 - sets up Triton before it is imported

import pytest
import torch

from exactrl.ops import checksum
from exactrl.ops.cuda import triton_checksum

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy names every overflow


def sums(words: torch.Tensor) -> list[int]:
    return triton_checksum.sums(words, checksum.GOLDEN, checksum.FIRST, checksum.SECOND).tolist()


def drawn(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=generator)
    words[: count // 5] = -1
    words[count // 2 : count // 2 + 3] = 0
    return words


@pytest.mark.parametrize("count", [0, 1, 2047, 2048, 2049, 3 * 2048 + 5, 9 * 2048])
@pytest.mark.parametrize("programs", [1, 3, 1024])
def test_the_kernel_gives_torch_s_sums(monkeypatch, count: int, programs: int) -> None:
    monkeypatch.setattr(triton_checksum, "PROGRAMS", programs)
    words = drawn(count)
    assert sums(words) == checksum._sums(words).tolist()


def test_each_word_and_its_place_count() -> None:
    words = drawn(5000)
    found = sums(words)
    for i in (0, 2047, 2048, 4999):
        other = words.clone()
        other[i] ^= 1 << 40
        assert sums(other) != found
    assert sums(words.roll(1)) != found
