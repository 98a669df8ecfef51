"""A checksum of a tensor's bytes that its own device computes: 8 GB of weights take milliseconds, not seconds.

128 bits: two sums modulo 2^64 over 8-byte words, each word mixed with its index first. Integer sums do not depend on
their order, so it is the same on every device. It finds mistakes; it does not keep out forgers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

WORDS = 1 << 24  # mixed at once


def _signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


# The multipliers of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): odd, with well-spread bits.
GOLDEN, FIRST, SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def checksum(tensor: torch.Tensor) -> bytes:
    """16 bytes; of contiguous content, dtype and shape play no part."""
    return checksums([tensor])[0]


def checksums(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """The checksum of each; all of them come from the device together."""
    if not tensors:
        return []
    found = torch.stack([_sums(_words(tensor)) for tensor in tensors]).tolist()
    return [struct.pack("<qq", *pair) for pair in found]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """int64 [N]: the tensor's bytes, filled up with zeros."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if rest := -data.numel() % 8:
        data = torch.cat([data, data.new_zeros(rest)])
    aligned = data.data_ptr() % 8 == data.storage_offset() % 8 == 0  # nothing at all has the address 0
    return (data if aligned else data.clone()).view(torch.int64)


def _sums(words: torch.Tensor) -> torch.Tensor:
    """int64 [2] on the device of `words`."""
    if words.is_cuda:
        from exactrl.ops.cuda.triton_checksum import sums

        return sums(words, GOLDEN, FIRST, SECOND)
    total = torch.zeros(2, dtype=torch.int64)
    for a in range(0, words.numel(), WORDS):
        part = words[a : a + WORDS]
        index = torch.arange(a + 1, a + 1 + part.numel())
        mixed = part ^ (index * GOLDEN)
        for multiplier in (FIRST, SECOND):
            mixed ^= mixed >> 31
            mixed *= multiplier
        total += torch.stack([mixed.sum(), (mixed * index).sum()])
    return total
