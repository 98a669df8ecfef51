"""Logits -> log-probability, entropy, sampled token in Triton: the bit reference of `sm90`. Definition in head.py.

Two kernels share the work. `_blocks` reads the logits once and leaves, for every block of 128 entries, its maximum and
its sums; `_merge` walks a row's blocks in order. Legend: V entries of the vocabulary, blocks = V / 128 rounded up.
"""

# tuples grow while a kernel is compiled
# mypy: disable-error-code="assignment, var-annotated, misc"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from exactrl.ops.cuda.triton_early import EARLY, wait
from exactrl.ops.cuda.triton_exact import LOG2E
from exactrl.ops.cuda.triton_noise import gumbel, gumbel_bound, random_word, random_words

BLOCK = 128  # Contract.vocab_block
GROUP = 4  # blocks that a program of `_blocks` takes at once; changes no bit
SPANS = ((8, 1), (1 << 31, 4))  # (most rows, groups of such a program, one after the other); changes no bit
NEG_INF = tl.constexpr(float("-inf"))  # NaN is no global: it differs from itself, so each launch would refuse it
CHAIN = 64  # terms loaded while as many are added; changes no bit, as the last are zeros
MERGE_WIDTH = 256  # blocks that `_merge` loads at once; changes no bit
LAUNCH: dict[str, Any] = {"num_warps": 4, **EARLY}
ALONE: dict[str, Any] = {"num_warps": 1, **EARLY}  # no waiting for other warps


@triton.jit
def tree(x, N: tl.constexpr):
    """x [N, 128] -> [N]: balanced binary tree over neighbours. tl.sum of more than two would follow the layout."""
    for _ in tl.static_range(7):
        x = tl.sum(x.reshape([N, x.shape[1] // 2, 2]), 2)
    return x.reshape([N])


@triton.jit
def scaled(logits, row, stride, i, V, temperature):
    """Entries i of a row over its temperature; -inf from V on."""
    x = tl.load(logits + row.to(tl.int64) * stride + i, mask=i < V, other=NEG_INF)
    if temperature != 1.0:  # x / 1 is x
        x = tl.where(i < V, tl.div_rn(x, temperature), NEG_INF)  # rows of padding may hold a temperature below 0
    return x


@triton.jit
def _best(z, i):
    """(maximum of z, its lowest i). NaN never wins, so that the maximum is NaN or -inf only where there is no best."""
    best = tl.max(z, 0)
    return best, tl.min(tl.where(z == best, i, 0x7FFFFFFF), 0)


@triton.jit
def _best_perturbed(x, i, logits, row, stride, V, temperature, key, position, first, COUNT: tl.constexpr):
    """_best of z = x + noise, x being entries i = first ... first + COUNT - 1 of a row.

    Logarithms are slow. A bound of each z costs little, and the entry of the largest bound is the best one where its z
    is above all other bounds. Elsewhere, which is rare, all z are computed.
    """
    words = random_words(key, position, first, COUNT)
    bounds = x + gumbel_bound(words)
    _, at = _best(bounds, i)
    top = scaled(logits, row, stride, at, V, temperature) + gumbel(random_word(key, position, at))
    if tl.sum((bounds >= top).to(tl.int32), 0) != 1:
        top, at = _best(x + gumbel(words), i)
    return top, at


@triton.jit(do_not_specialize=["rows"])
def _blocks(
    logits, temperatures, keys, positions, sums, best, token, rows, stride,
    V: tl.constexpr, N: tl.constexpr, SPAN: tl.constexpr, SAMPLE: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """sums [2 or 3, rows, blocks] = (m, s[, q]) of SPAN groups of N blocks; best, token [rows, groups] of the perturbed
    logits."""
    wait()
    blocks: tl.constexpr = (V + 127) // 128
    groups: tl.constexpr = (blocks + N - 1) // N
    spans: tl.constexpr = (groups + SPAN - 1) // SPAN
    row, start = tl.program_id(0) // spans, tl.program_id(0) % spans * SPAN
    temperature = tl.load(temperatures + row)
    greedy = temperature == 0.0
    if SAMPLE:
        temperature = tl.where(greedy, 1.0, temperature)
        key, position = tl.load(keys + row), tl.load(positions + row)
    for group in range(start, tl.minimum(start + SPAN, groups)):
        i = group * N * 128 + tl.arange(0, N * 128)
        x = scaled(logits, row, stride, i, V, temperature)
        if SAMPLE:
            if greedy:
                top, index = _best(x, i)
            else:
                top, index = _best_perturbed(
                    x, i, logits, row, stride, V, temperature, key, position, group * N * 128, N * 128
                )  # fmt: skip
            at = row.to(tl.int64) * groups + group
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
def _weighted(
    sums, scratch, row, rows, blocks: tl.constexpr, padded: tl.constexpr, ENTROPY: tl.constexpr, WIDTH: tl.constexpr
):
    """Maximum M of a row (0 for -inf); scratch [1 or 2, rows, padded] gets the terms of S and Q, 0 from `blocks` on."""
    plane, at = rows.to(tl.int64) * blocks, row.to(tl.int64) * blocks
    plane_out, at_out = rows.to(tl.int64) * padded, row.to(tl.int64) * padded
    maxima, s, q = (), (), ()
    for c in tl.static_range((padded + WIDTH - 1) // WIDTH):
        b = c * WIDTH + tl.arange(0, WIDTH)
        maxima += (tl.load(sums + at + b, mask=b < blocks, other=NEG_INF),)
        s += (tl.load(sums + plane + at + b, mask=b < blocks, other=0.0),)
        if ENTROPY:
            q += (tl.load(sums + 2 * plane + at + b, mask=b < blocks, other=0.0),)
    most = maxima[0]
    for c in tl.static_range(1, len(maxima)):
        most = tl.maximum(most, maxima[c])
    M = tl.max(most, 0)
    M = tl.where(M == NEG_INF, 0.0, M)
    for c in tl.static_range(len(maxima)):
        b, m = c * WIDTH + tl.arange(0, WIDTH), maxima[c]
        weight = tl.exp2((m - M) * LOG2E)
        tl.store(scratch + at_out + b, weight * s[c], mask=b < padded)
        if ENTROPY:
            shifted = tl.where(m == NEG_INF, 0.0, s[c] * (m - M))
            tl.store(scratch + plane_out + at_out + b, weight * (q[c] + shifted), mask=b < padded)
    return M


@triton.jit
def _pairs(terms, plane, ENTROPY: tl.constexpr, CHAIN: tl.constexpr):
    """CHAIN fp32 terms of S, then those of Q, two to an int64: half as many loads as terms."""
    pointer = terms.to(tl.pointer_type(tl.int64), bitcast=True)
    found = ()
    for j in tl.static_range(CHAIN // 2):
        found += (tl.load(pointer + j),)
    if ENTROPY:
        for j in tl.static_range(CHAIN // 2):
            found += (tl.load(pointer + plane // 2 + j),)
    return found


@triton.jit
def _low(pair):
    return pair.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _high(pair):
    return (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["V", "rows", "groups"])
def _merge(
    sums, scratch, best, token, logits, temperatures, targets, logprobs, lse, entropy, V, rows, groups, stride,
    BLOCKS: tl.constexpr, SAMPLE: tl.constexpr, ENTROPY: tl.constexpr, WIDTH: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """A row: logprob of its target (written to `targets` when SAMPLE), lse [rows, 2], entropy."""
    wait()
    padded: tl.constexpr = (BLOCKS + CHAIN - 1) // CHAIN * CHAIN
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    if SAMPLE:
        temperature = tl.where(temperature == 0.0, 1.0, temperature)
        target = _best_of_row(best, token, row, groups, WIDTH).to(tl.int64)
        tl.store(targets + row, target)
    else:
        target = tl.load(targets + row)
    known = (target >= 0) & (target < V)
    x = tl.load(logits + row.to(tl.int64) * stride + target, mask=known, other=float("nan"))
    M = _weighted(sums, scratch, row, rows, BLOCKS, padded, ENTROPY, WIDTH)
    tl.debug_barrier()  # the chains below read what other threads of this program have stored
    terms, plane = scratch + row.to(tl.int64) * padded, rows.to(tl.int64) * padded
    total, products = 0.0, 0.0
    ahead = _pairs(terms, plane, ENTROPY, CHAIN)
    for first in range(CHAIN, padded + CHAIN, CHAIN):
        pairs, ahead = ahead, _pairs(terms + tl.minimum(first, padded - CHAIN), plane, ENTROPY, CHAIN)
        for j in tl.static_range(CHAIN // 2):
            total = (total + _low(pairs[j])) + _high(pairs[j])
            if ENTROPY:
                products = (products + _low(pairs[CHAIN // 2 + j])) + _high(pairs[CHAIN // 2 + j])
    ln = tl.log(total)
    tl.store(lse + 2 * row, M)
    tl.store(lse + 2 * row + 1, ln)
    if ENTROPY:
        tl.store(entropy + row, ln - tl.div_rn(products, total))
    tl.store(logprobs + row, (tl.div_rn(x, temperature) - M) - ln)


@triton.jit
def _all(logits, temperatures, lse, out, digests, stride, V: tl.constexpr, COUNT: tl.constexpr, DIGEST: tl.constexpr):
    """out [rows, V] = log-probabilities, or digests int64 [rows, groups] = a sum mod 2^64 of hashed (index, bits)."""
    wait()
    groups: tl.constexpr = (V + COUNT - 1) // COUNT
    row, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    i = group * COUNT + tl.arange(0, COUNT)
    x = scaled(logits, row, stride, i, V, tl.load(temperatures + row))
    lp = (x - tl.load(lse + 2 * row)) - tl.load(lse + 2 * row + 1)
    if DIGEST:
        h = lp.to(tl.uint32, bitcast=True).to(tl.uint64) | (i.to(tl.uint64) << 32)
        h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9  # the finaliser of SplitMix64: one to one, so that no bit is lost
        h = (h ^ (h >> 27)) * 0x94D049BB133111EB
        h = tl.where(i < V, h ^ (h >> 31), 0)
        total = tl.sum(h.to(tl.int64, bitcast=True), 0)  # integers: no order
        tl.store(digests + row.to(tl.int64) * groups + group, total)
    else:
        tl.store(out + row.to(tl.int64) * V + i, lp, mask=i < V)


@triton.jit
def _backward(
    logits,
    temperatures,
    targets,
    lse,
    entropy,
    d_logprobs,
    d_entropy,
    d_logits,
    stride,
    V: tl.constexpr,
    COUNT: tl.constexpr,
):
    wait()
    groups: tl.constexpr = (V + COUNT - 1) // COUNT
    row, i = tl.program_id(0) // groups, tl.program_id(0) % groups * COUNT + tl.arange(0, COUNT)
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
    target, first = tl.load(targets + row), tl.program_id(0) % groups * COUNT
    if (target >= first) & (target < first + COUNT):
        d = tl.where(i == target, d + g, d)
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
    span = next(span for most, span in SPANS if rows <= most)
    _blocks[(rows * triton.cdiv(groups, span),)](
        logits, temperatures, *(noise or (None, None)), sums, best, token, rows, logits.stride(0), vocab, GROUP, span,
        noise is not None, entropy, **ALONE,
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
    padded = -(-count // CHAIN) * CHAIN
    scratch = torch.empty(planes - 1, rows, padded, dtype=torch.float32, device=logits.device)
    _merge[(rows,)](
        parts.sums, scratch, parts.best, parts.token, logits, temperatures, targets, logprobs,
        lse, entropy, logits.shape[1], rows, groups, logits.stride(0), count, parts.best is not None, planes == 3,
        MERGE_WIDTH, CHAIN, **ALONE,
    )  # fmt: skip
    return logprobs, lse, entropy


def all_logprobs(logits: torch.Tensor, temperatures: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """fp32 [R, V]; the entry of a token has the bits of its logprob. Temperatures > 0."""
    _check(logits, temperatures)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    grid = (len(logits) * triton.cdiv(logits.shape[1], 2048),)
    _all[grid](logits, temperatures, lse, out, None, logits.stride(0), logits.shape[1], 2048, False, **LAUNCH)
    return out


def logprob_digests(logits: torch.Tensor, temperatures: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """int64 [R]: a digest of each row's log-probabilities, without ever storing them. Temperatures > 0."""
    _check(logits, temperatures)
    groups = triton.cdiv(logits.shape[1], 2048)
    parts = torch.empty(len(logits), groups, dtype=torch.int64, device=logits.device)
    _all[(parts.numel(),)](
        logits, temperatures, lse, None, parts, logits.stride(0), logits.shape[1], 2048, True, **LAUNCH
    )
    return parts.sum(1)


def logits_gradient(
    logits: torch.Tensor, temperatures: torch.Tensor, targets: torch.Tensor, lse: torch.Tensor, entropy: torch.Tensor,
    d_logprobs: torch.Tensor, d_entropy: torch.Tensor, out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """[R, V] in `out_dtype`, rounded once from fp32: gradient with regard to the logits, 1 / T included."""
    _check(logits, temperatures)
    out = torch.empty(logits.shape, dtype=out_dtype, device=logits.device)
    _backward[(len(logits) * triton.cdiv(logits.shape[1], 2048),)](
        logits, temperatures, targets, lse, entropy, d_logprobs, d_entropy, out, logits.stride(0), logits.shape[1],
        2048, **LAUNCH,
    )  # fmt: skip
    return out
