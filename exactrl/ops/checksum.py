"""A checksum of a tensor's bytes that its own device computes: 8 GB of weights take milliseconds, not seconds.

128 bits: two sums modulo 2^64 over 8-byte words, each word mixed with its index first. Integer sums do not depend on
their order, so it is the same on every device. It finds mistakes; it does not keep out forgers.
"""

from __future__ import annotations

import struct

import torch

WORDS = 1 << 24  # mixed at once


def _signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


# The multipliers of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): odd, with well-spread bits.
GOLDEN, FIRST, SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def checksum(tensor: torch.Tensor) -> bytes:
    """16 bytes; of contiguous content, dtype and shape play no part."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if rest := -data.numel() % 8:
        data = torch.cat([data, data.new_zeros(rest)])
    words = data.view(torch.int64) if data.data_ptr() % 8 == 0 else data.clone().view(torch.int64)
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for a in range(0, words.numel(), WORDS):
        part = words[a : a + WORDS]
        index = torch.arange(a + 1, a + 1 + part.numel(), device=tensor.device)
        mixed = part ^ (index * GOLDEN)
        for multiplier in (FIRST, SECOND):
            mixed ^= mixed >> 31
            mixed *= multiplier
        total += torch.stack([mixed.sum(), (mixed * index).sum()])
    return struct.pack("<qq", *total.tolist())
