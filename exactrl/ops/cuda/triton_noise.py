"""Gumbel noise in Triton: the uniform numbers of numerics.md, "sampling", with the CPU's bits.

u of entry i is ((r >> 9) + 0.5) 2^-23, r word i % 4 of Philox4x32-10 with counter (i // 4, position, 0, 0) and the
row's 64-bit key (low word first). Every step is exact, so u depends on no device. The noise is -ln(-ln u), ln as
libdevice computes it: the device's own bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from exactrl.ops.cuda.triton_early import EARLY, wait

LN2 = 0.6931471805599453
LN2_ULP = tl.constexpr(LN2 * 2.0**-23)
BOUND = tl.constexpr(LN2 * (127 + 23) + 2.0**-14)
"""The last term is three times what roundings here and libdevice's logarithm may amount to."""


@triton.jit
def _philox(key, counter, position):
    """The four words of Philox4x32-10; counter uint32 [n] or a scalar. tl.philox multiplies twice for a product's
    halves."""
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    c0, c1 = counter, tl.zeros_like(counter) + position.to(tl.uint32)
    c2, c3 = tl.zeros_like(counter), tl.zeros_like(counter)
    for _ in tl.static_range(10):
        first, second = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (second >> 32).to(tl.uint32) ^ c1 ^ k0, second.to(tl.uint32)
        c2, c3 = (first >> 32).to(tl.uint32) ^ c3 ^ k1, first.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def random_words(key, position, first, COUNT: tl.constexpr):
    """r >> 9 [COUNT] of the entries from `first` (a multiple of 4) on: 23 bits of each word."""
    counter = (first // 4 + tl.arange(0, COUNT // 4)).to(tl.uint32)
    r0, r1, r2, r3 = _philox(key, counter, position)
    return tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3)) >> 9


@triton.jit
def random_word(key, position, i):
    """r >> 9 of entry i."""
    r0, r1, r2, r3 = _philox(key, (i // 4).to(tl.uint32), position)
    word = i % 4
    return tl.where(word < 2, tl.where(word == 0, r0, r1), tl.where(word == 2, r2, r3)) >> 9


@triton.jit
def uniform(words):
    return (words.to(tl.float32) + 0.5) * (2.0**-23)


@triton.jit
def gumbel(words):
    """-ln(-ln u): at least -2.82 and at most 16.64, never infinite."""
    return -tl.log(-tl.log(uniform(words)))


@triton.jit
def gumbel_bound(words):
    """At least gumbel(words), for a fifth of its instructions; close to it where u is close to 1.

    -ln u >= 1 - u, so that the noise is at most -ln(1 - u). (1 - u) 2^23 is exact. A number 2^e (1 + f) has a log2 of
    at least e + f, which its bits show when they are read as an integer: 2^23 (127 + e + f).
    """
    rest = 8388607.5 - words.to(tl.float32)
    return BOUND - rest.to(tl.int32, bitcast=True).to(tl.float32) * LN2_ULP


@triton.jit(do_not_specialize=["V"])
def _uniform_rows(keys, positions, out, V, COUNT: tl.constexpr):
    wait()
    row, first = tl.program_id(0), tl.program_id(1) * COUNT
    i = first + tl.arange(0, COUNT)
    words = random_words(tl.load(keys + row), tl.load(positions + row), first, COUNT)
    tl.store(out + row.to(tl.int64) * V + i, uniform(words), mask=i < V)


def uniform_rows(keys: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """u fp32 [R, vocab] behind the noise of R draws; keys from `transfer.key_bits`, positions int64 [R]."""
    out = torch.empty(len(keys), vocab, dtype=torch.float32, device=keys.device)
    if len(keys):
        _uniform_rows[(len(keys), triton.cdiv(vocab, 1024))](keys, positions, out, vocab, 1024, num_warps=4, **EARLY)
    return out
