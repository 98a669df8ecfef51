"""Gumbel noise in Triton: the uniform numbers of numerics.md, "sampling", with the CPU's bits.

u of entry i is ((r >> 9) + 0.5) 2^-23, r word i % 4 of Philox4x32-10 with counter (i // 4, position, 0, 0) and the
row's 64-bit key (low word first). Every step is exact, so u depends on no device. The noise is -ln(-ln u), ln as
libdevice computes it: the device's own bits.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from exactrl.ops.cuda.triton_exact import EXACT


@triton.jit
def uniforms(key, position, first, COUNT: tl.constexpr):
    """u [COUNT] of the entries from `first` (a multiple of 4) on."""
    counter = (first // 4 + tl.arange(0, COUNT // 4)).to(tl.uint32)
    r0, r1, r2, r3 = tl.philox(key, counter, position.to(tl.uint32), 0, 0)
    r = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
    return ((r >> 9).to(tl.float32) + 0.5) * (2.0**-23)


@triton.jit
def gumbel(key, position, first, COUNT: tl.constexpr):
    """-ln(-ln u) [COUNT]: at least -2.82 and at most 16.64, never infinite."""
    return -tl.log(-tl.log(uniforms(key, position, first, COUNT)))


@triton.jit(do_not_specialize=["V"])
def _uniform_rows(keys, positions, out, V, COUNT: tl.constexpr):
    row, first = tl.program_id(0), tl.program_id(1) * COUNT
    i = first + tl.arange(0, COUNT)
    u = uniforms(tl.load(keys + row), tl.load(positions + row), first, COUNT)
    tl.store(out + row.to(tl.int64) * V + i, u, mask=i < V)


def key_tensor(keys: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """Keys uint64 [R] as the int64 tensor of the same bits that the kernels read."""
    assert keys.dtype == np.uint64, keys.dtype
    return torch.from_numpy(keys.view(np.int64)).to(device)


def uniform_rows(keys: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """u fp32 [R, vocab] behind the noise of R draws; keys from `key_tensor`, positions int64 [R]."""
    out = torch.empty(len(keys), vocab, dtype=torch.float32, device=keys.device)
    if len(keys):
        _uniform_rows[(len(keys), triton.cdiv(vocab, 1024))](keys, positions, out, vocab, 1024, num_warps=4, **EXACT)
    return out
