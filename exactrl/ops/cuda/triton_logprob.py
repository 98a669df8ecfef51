"""Logits -> log-probability, entropy, sampled token in Triton: the bit reference of `sm90`. Definition in head.py.

Two kernels share the work. `_blocks` reads the logits once and leaves, for every block of 128 entries, its maximum and
its sums; `_merge` walks a row's blocks in order. Legend: V entries of the vocabulary, blocks = V / 128 rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from exactrl.ops.cuda.triton_exact import EXACT, LOG2E
from exactrl.ops.cuda.triton_noise import gumbel

BLOCK = 128  # Contract.vocab_block
GROUP = 16  # blocks of one program of `_blocks`; changes no bit
NEG_INF = tl.constexpr(float("-inf"))  # NaN is no global: it differs from itself, so each launch would refuse it
CHAIN = tl.constexpr(32)  # loads issued ahead of their additions; changes no bit
LAUNCH: dict[str, Any] = {"num_warps": 4, **EXACT}


@triton.jit
def _halved(x, N: tl.constexpr, WIDTH: tl.constexpr):
    """x [N, WIDTH] -> [N, WIDTH / 2]: element 2 i plus element 2 i + 1."""
    left, right = tl.split(tl.reshape(x, (N, WIDTH // 2, 2)))
    return left + right


@triton.jit
def tree(x, N: tl.constexpr):
    """x [N, 128] -> [N]: balanced binary tree over neighbours. tl.sum would follow the register layout."""
    x = _halved(x, N, 128)
    x = _halved(x, N, 64)
    x = _halved(x, N, 32)
    x = _halved(x, N, 16)
    x = _halved(x, N, 8)
    x = _halved(x, N, 4)
    x = _halved(x, N, 2)
    return tl.reshape(x, (N,))


@triton.jit
def scaled(logits, row, stride, i, V, temperature):
    """Entries i of a row over its temperature; -inf from V on."""
    x = tl.load(logits + row.to(tl.int64) * stride + i, mask=i < V, other=NEG_INF)
    if temperature != 1.0:  # x / 1 is x
        x = tl.div_rn(x, temperature)
    return x


@triton.jit
def _best(z, i):
    """(maximum, its lowest i) of z above -inf; (-inf, 2^31 - 1) where there is none. NaN never wins."""
    z = tl.where(z > NEG_INF, z, NEG_INF)
    best = tl.max(z, 0)
    return best, tl.min(tl.where((z == best) & (z > NEG_INF), i, 0x7FFFFFFF), 0)


@triton.jit(do_not_specialize=["rows", "blocks"])
def _blocks(
    logits, temperatures, keys, positions, sums, best, token, V, rows, blocks, stride,
    N: tl.constexpr, SAMPLE: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """sums [2 or 3, rows, blocks] = (m, s[, q]) of N blocks; best, token [rows, groups] of the perturbed logits."""
    row, group = tl.program_id(0), tl.program_id(1)
    i = group * N * 128 + tl.arange(0, N * 128)
    temperature = tl.load(temperatures + row)
    greedy = temperature == 0.0
    if SAMPLE:
        temperature = tl.where(greedy, 1.0, temperature)
    x = scaled(logits, row, stride, i, V, temperature)
    if SAMPLE:
        z = x
        if not greedy:
            z = x + gumbel(tl.load(keys + row), tl.load(positions + row), group * N * 128, N * 128)
        top, index = _best(z, i)
        at = row.to(tl.int64) * tl.num_programs(1) + group
        tl.store(best + at, top)
        tl.store(token + at, index)
    x = tl.reshape(x, (N, 128))
    m = tl.max(x, 1)
    base = tl.where(m == NEG_INF, 0.0, m)
    d = x - base[:, None]
    e = tl.exp2(d * LOG2E)
    b = group * N + tl.arange(0, N)
    at_sums = sums + row.to(tl.int64) * blocks + b
    plane = rows.to(tl.int64) * blocks
    tl.store(at_sums, m, mask=b < blocks)
    tl.store(at_sums + plane, tree(e, N), mask=b < blocks)
    if ENTROPY:
        tl.store(at_sums + 2 * plane, tree(e * tl.where(x == NEG_INF, 0.0, d), N), mask=b < blocks)


@triton.jit
def _best_of_row(best, token, row, groups, WIDTH: tl.constexpr):
    """Token of the row: the lowest index of the largest entry, -1 where no entry is above -inf."""
    top, found = NEG_INF, -1
    for first in range(0, groups, WIDTH):
        g = first + tl.arange(0, WIDTH)
        z = tl.load(best + row.to(tl.int64) * groups + g, mask=g < groups, other=NEG_INF)
        i = tl.load(token + row.to(tl.int64) * groups + g, mask=g < groups, other=0x7FFFFFFF)
        part, index = _best(z, i)
        found = tl.where(part > top, index, found)  # later groups hold larger indices: a tie changes nothing
        top = tl.maximum(top, part)
    return found


@triton.jit
def _ascending(parts, blocks, UNROLL: tl.constexpr):
    """Sum of parts [blocks], one chain."""
    total = 0.0
    for first in range(0, blocks, UNROLL):
        for j in tl.static_range(UNROLL):
            total += tl.load(parts + first + j, mask=first + j < blocks, other=0.0)
    return total


@triton.jit(do_not_specialize=["V", "rows", "blocks", "groups"])
def _merge(
    sums, scratch, best, token, logits, temperatures, targets, logprobs, lse, entropy, V, rows, blocks, groups, stride,
    SAMPLE: tl.constexpr, ENTROPY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A row: logprob of its target (written to `targets` when SAMPLE), lse [rows, 2], entropy."""
    row = tl.program_id(0)
    plane, at = rows.to(tl.int64) * blocks, row.to(tl.int64) * blocks
    M = NEG_INF
    for first in range(0, blocks, WIDTH):
        b = first + tl.arange(0, WIDTH)
        M = tl.maximum(M, tl.max(tl.load(sums + at + b, mask=b < blocks, other=NEG_INF), 0))
    M = tl.where(M == NEG_INF, 0.0, M)
    for first in range(0, blocks, WIDTH):
        b = first + tl.arange(0, WIDTH)
        m = tl.load(sums + at + b, mask=b < blocks, other=NEG_INF)
        s = tl.load(sums + plane + at + b, mask=b < blocks, other=0.0)
        weight = tl.exp2((m - M) * LOG2E)
        tl.store(scratch + at + b, weight * s, mask=b < blocks)
        if ENTROPY:
            q = tl.load(sums + 2 * plane + at + b, mask=b < blocks, other=0.0)
            shifted = tl.where(m == NEG_INF, 0.0, s * (m - M))
            tl.store(scratch + plane + at + b, weight * (q + shifted), mask=b < blocks)
    tl.debug_barrier()  # the chain below reads what other threads of this program have stored
    total = _ascending(scratch + at, blocks, CHAIN)
    ln = tl.log(total)
    tl.store(lse + 2 * row, M)
    tl.store(lse + 2 * row + 1, ln)
    if ENTROPY:
        tl.store(entropy + row, ln - tl.div_rn(_ascending(scratch + plane + at, blocks, CHAIN), total))
    temperature = tl.load(temperatures + row)
    if SAMPLE:
        temperature = tl.where(temperature == 0.0, 1.0, temperature)
        target = _best_of_row(best, token, row, groups, WIDTH).to(tl.int64)
        tl.store(targets + row, target)
    else:
        target = tl.load(targets + row)
    known = (target >= 0) & (target < V)
    x = tl.load(logits + row.to(tl.int64) * stride + target, mask=known, other=float("nan"))
    tl.store(logprobs + row, (tl.div_rn(x, temperature) - M) - ln)


@triton.jit
def _all(logits, temperatures, lse, out, digests, V, stride, COUNT: tl.constexpr, DIGEST: tl.constexpr):
    """out [rows, V] = log-probabilities, or digests int64 [rows, groups] = a sum mod 2^64 of hashed (index, bits)."""
    row, group = tl.program_id(0), tl.program_id(1)
    i = group * COUNT + tl.arange(0, COUNT)
    x = scaled(logits, row, stride, i, V, tl.load(temperatures + row))
    lp = (x - tl.load(lse + 2 * row)) - tl.load(lse + 2 * row + 1)
    if DIGEST:
        h = lp.to(tl.uint32, bitcast=True).to(tl.uint64) | (i.to(tl.uint64) << 32)
        h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9  # the finaliser of SplitMix64: one to one, so that no bit is lost
        h = (h ^ (h >> 27)) * 0x94D049BB133111EB
        h = tl.where(i < V, h ^ (h >> 31), 0)
        total = tl.sum(h.to(tl.int64, bitcast=True), 0)  # integers: no order
        tl.store(digests + row.to(tl.int64) * tl.num_programs(1) + group, total)
    else:
        tl.store(out + row.to(tl.int64) * V + i, lp, mask=i < V)


@triton.jit
def _backward(
    logits, temperatures, targets, lse, entropy, d_logprobs, d_entropy, d_logits, V, stride, COUNT: tl.constexpr
):
    row = tl.program_id(0)
    i = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    temperature = tl.load(temperatures + row)
    x = scaled(logits, row, stride, i, V, temperature)
    lp = (x - tl.load(lse + 2 * row)) - tl.load(lse + 2 * row + 1)
    p = tl.exp2(lp * LOG2E)
    g = tl.div_rn(tl.load(d_logprobs + row), temperature)
    ge = tl.div_rn(tl.load(d_entropy + row), temperature)
    d = -(p * g)
    if ge != 0.0:
        # p is 0 where lp is -inf, and 0 * -inf would be NaN
        d -= (p * ge) * (tl.where(x == NEG_INF, 0.0, lp) + tl.load(entropy + row))
    d = tl.where(i == tl.load(targets + row), d + g, d)
    tl.store(d_logits + row.to(tl.int64) * V + i, d.to(d_logits.dtype.element_ty), mask=i < V)


@dataclass(frozen=True, slots=True)
class Blocks:
    """What `_blocks` leaves of R rows: all that a shard of the vocabulary has to send.

    sums   fp32 [2 or 3, R, blocks]: maximum, sum, and for the entropy the sum of products
    best   fp32 [R, groups], token int32 [R, groups]: largest perturbed logits; None without sampling
    """

    sums: torch.Tensor
    best: torch.Tensor | None = None
    token: torch.Tensor | None = None


def _check(logits: torch.Tensor, temperatures: torch.Tensor) -> None:
    assert logits.dtype == torch.float32, f"logits must be float32, not {logits.dtype}"
    assert temperatures.dtype == torch.float32, f"temperatures must be float32, not {temperatures.dtype}"
    assert logits.stride(1) == 1 or logits.shape[1] == 1, logits.stride()
    assert temperatures.is_contiguous()
    assert len(temperatures) == len(logits), (len(temperatures), len(logits))


def blocks(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    entropy: bool = False,
    noise: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Blocks:
    """logits fp32 [R, V], R > 0. `noise`: (keys, positions) of a draw; temperature 0 is then greedy."""
    _check(logits, temperatures)
    (rows, vocab), device = logits.shape, logits.device
    count = triton.cdiv(vocab, BLOCK)
    groups = triton.cdiv(count, GROUP)
    sums = torch.empty(3 if entropy else 2, rows, count, dtype=torch.float32, device=device)
    best = token = None
    if noise is not None:
        best = torch.empty(rows, groups, dtype=torch.float32, device=device)
        token = torch.empty(rows, groups, dtype=torch.int32, device=device)
    _blocks[(rows, groups)](
        logits, temperatures, *(noise or (None, None)), sums, best, token, vocab, rows, count, logits.stride(0),
        GROUP, noise is not None, entropy, **LAUNCH,
    )  # fmt: skip
    return Blocks(sums, best, token)


def merge(
    parts: Blocks, logits: torch.Tensor, temperatures: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprobs fp32 [R], lse fp32 [R, 2] = (maximum, ln sum), entropy fp32 [R], or [0] where `parts` lacks its sums).

    targets int64 [R] are read, or written when `parts` holds a draw. A target outside the vocabulary has logprob NaN.
    """
    planes, rows, count = parts.sums.shape
    logprobs, lse = torch.empty_like(temperatures), temperatures.new_empty(rows, 2)
    entropy = temperatures.new_empty(rows if planes == 3 else 0)
    groups = 0 if parts.best is None else parts.best.shape[1]
    _merge[(rows,)](
        parts.sums, torch.empty_like(parts.sums[1:]), parts.best, parts.token, logits, temperatures, targets, logprobs,
        lse, entropy, logits.shape[1], rows, count, groups, logits.stride(0), parts.best is not None, planes == 3,
        1024, **LAUNCH,
    )  # fmt: skip
    return logprobs, lse, entropy


def all_logprobs(logits: torch.Tensor, temperatures: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """fp32 [R, V]; the entry of a token has the bits of its logprob. Temperatures > 0."""
    _check(logits, temperatures)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    grid = (len(logits), triton.cdiv(logits.shape[1], 2048))
    _all[grid](logits, temperatures, lse, out, None, logits.shape[1], logits.stride(0), 2048, False, **LAUNCH)
    return out


def logprob_digests(logits: torch.Tensor, temperatures: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """int64 [R]: a digest of each row's log-probabilities, without ever storing them. Temperatures > 0."""
    _check(logits, temperatures)
    grid = (len(logits), triton.cdiv(logits.shape[1], 2048))
    parts = torch.empty(grid, dtype=torch.int64, device=logits.device)
    _all[grid](logits, temperatures, lse, None, parts, logits.shape[1], logits.stride(0), 2048, True, **LAUNCH)
    return parts.sum(1)


def logits_gradient(
    logits: torch.Tensor, temperatures: torch.Tensor, targets: torch.Tensor, lse: torch.Tensor, entropy: torch.Tensor,
    d_logprobs: torch.Tensor, d_entropy: torch.Tensor, out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """[R, V] in `out_dtype`, rounded once from fp32: gradient with regard to the logits, 1 / T included."""
    _check(logits, temperatures)
    out = torch.empty(logits.shape, dtype=out_dtype, device=logits.device)
    _backward[(len(logits), triton.cdiv(logits.shape[1], 2048))](
        logits, temperatures, targets, lse, entropy, d_logprobs, d_entropy, out, logits.shape[1], logits.stride(0),
        2048, **LAUNCH,
    )  # fmt: skip
    return out
