"""Logits -> log-probability, entropy and sampled token on the CPU.

x = logit / temperature (IEEE fp32). Per block of `vocab_block` entries: maximum, and sum of exp(x - maximum) with entry
i in lane i % 16, ascending, lanes added as a balanced tree. Blocks are merged ascending. logprob of t is
(x_t - max) - ln(sum).
"""

from __future__ import annotations

import numba
import numpy as np

from exactrl.ops.cpu.jit import inline, kernel, parallel_kernel
from exactrl.ops.cpu.simd import (
    exp,
    fma,
    load_lanes,
    log,
    store_lanes,
    vadd,
    vdiv,
    vexp,
    vfirst,
    vfma,
    vload,
    vload_n,
    vlog,
    vmax,
    vmaximum,
    vmul,
    vneg,
    vsplat,
    vstore,
    vstore_n,
    vsub,
    vsum,
)

ZERO = np.float32(0)
NEG_INF = np.float32(-np.inf)


@inline
def _scaled(logits, at, lanes, temperature):
    """16 logits over the temperature; lanes from `lanes` on are -inf."""
    if lanes >= 16:
        return vdiv(vload(logits, at), vsplat(temperature))
    return vfirst(vdiv(vload_n(logits, at, lanes), vsplat(temperature)), lanes, NEG_INF)


@inline
def max_and_sum(logits, at, n, temperature, block):
    """(maximum, sum of exp(x - maximum)) of row logits[at : at + n]."""
    top, total = NEG_INF, ZERO
    for b in range(0, n, block):
        stop = min(n, b + block)
        peak = vsplat(NEG_INF)
        for i in range(b, stop, 16):
            peak = vmax(peak, _scaled(logits, at + i, stop - i, temperature))
        m = vmaximum(peak)
        acc = vsplat(ZERO)
        for i in range(b, stop, 16):
            acc = vadd(acc, vexp(vsub(_scaled(logits, at + i, stop - i, temperature), vsplat(m))))
        s = vsum(acc)
        new = m if m > top else top
        total = fma(total, exp(top - new), s * exp(m - new))
        top = new
    return top, total


@kernel
def logprob_range(first, stop, stride, logits, targets, temperatures, logprobs, lse, entropy, n, block):
    """Job = row. Writes logprob of the target, (max, ln sum) as lse [rows, 2], and the entropy (a metric)."""
    for row in range(first, stop, stride):
        at = row * n
        temperature = temperatures[row]
        top, total = max_and_sum(logits, at, n, temperature, block)
        ln = log(total)
        logprobs[row] = (logits[at + targets[row]] / temperature - top) - ln
        lse[2 * row], lse[2 * row + 1] = top, ln
        acc = vsplat(ZERO)
        for i in range(0, n, 16):
            x = vsub(_scaled(logits, at + i, n - i, temperature), vsplat(top))
            p = vexp(vsub(x, vsplat(ln)))
            # p is 0 where x is -inf, and 0 * -inf would be NaN
            x = vfirst(x, n - i, ZERO)
            acc = vfma(p, x, acc)
        entropy[row] = ln - vsum(acc)


@parallel_kernel
def logprob_parallel(threads, jobs, logits, targets, temperatures, logprobs, lse, entropy, n, block):
    for t in numba.prange(threads):
        logprob_range(np.int64(t), jobs, threads, logits, targets, temperatures, logprobs, lse, entropy, n, block)


@kernel
def logprob_backward_range(
    first, stop, stride, logits, targets, temperatures, lse, entropy, d_logprob, d_entropy, d_logits, n
):
    """d_logits = (d_logprob (1[target] - p) - d_entropy p (ln p + H)) / temperature; d_logits may alias logits."""
    for row in range(first, stop, stride):
        at = row * n
        temperature = temperatures[row]
        top, ln = vsplat(lse[2 * row]), vsplat(lse[2 * row + 1])
        g, ge = d_logprob[row] / temperature, d_entropy[row] / temperature
        h = vsplat(entropy[row])
        for i in range(0, n, 16):
            lp = vsub(vsub(_scaled(logits, at + i, n - i, temperature), top), ln)
            p = vexp(lp)
            d = vneg(vmul(p, vsplat(g)))
            if ge != ZERO:
                d = vsub(d, vmul(vmul(p, vsplat(ge)), vadd(vfirst(lp, n - i, ZERO), h)))
            vstore_n(d_logits, at + i, d, min(16, n - i))
        d_logits[at + targets[row]] += g


@parallel_kernel
def logprob_backward_parallel(
    threads, jobs, logits, targets, temperatures, lse, entropy, d_logprob, d_entropy, d_logits, n
):
    for t in numba.prange(threads):
        logprob_backward_range(
            np.int64(t), jobs, threads, logits, targets, temperatures, lse, entropy, d_logprob, d_entropy, d_logits, n
        )


@inline
def philox(key, c0, c1):
    """Philox4x32-10 of counter (c0, c1, 0, 0) under a 64-bit key (Salmon et al., 2011): four uint32."""
    k0, k1 = np.uint64(key & np.uint64(0xFFFFFFFF)), np.uint64(key >> np.uint64(32))
    mask = np.uint64(0xFFFFFFFF)
    x0, x1, x2, x3 = np.uint64(c0), np.uint64(c1), np.uint64(0), np.uint64(0)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * x0, np.uint64(0xCD9E8D57) * x2
        x0, x1, x2, x3 = (p1 >> np.uint64(32)) ^ x1 ^ k0, p1 & mask, (p0 >> np.uint64(32)) ^ x3 ^ k1, p0 & mask
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    return x0, x1, x2, x3


@inline
def _uniform(r):
    """((r >> 9) + 0.5) * 2**-23: strictly between 0 and 1, exact in fp32."""
    return (np.float32(r >> np.uint64(9)) + np.float32(0.5)) * np.float32(2.0**-23)


@inline
def _gumbel_argmax(logits, at, n, temperature, key, position, u):
    """Lowest index of the maximum of x + Gumbel noise; noise of entry i is word i % 4 of counter (i // 4, position)."""
    best, token = NEG_INF, -1
    for i in range(0, n, 16):
        for j in range(0, 16, 4):
            r0, r1, r2, r3 = philox(key, (i + j) // 4, position)
            u[j], u[j + 1], u[j + 2], u[j + 3] = _uniform(r0), _uniform(r1), _uniform(r2), _uniform(r3)
        noise = vneg(vlog(vneg(vlog(vload(u, 0)))))
        vstore(u, 0, vadd(_scaled(logits, at + i, n - i, temperature), noise))
        for j in range(min(16, n - i)):
            if u[j] > best:
                best, token = u[j], i + j
    return token


@inline
def _argmax(logits, at, n):
    best, token = NEG_INF, -1
    for i in range(n):
        if logits[at + i] > best:
            best, token = logits[at + i], i
    return token


@kernel
def sample_range(first, stop, stride, logits, temperatures, keys, positions, tokens, logprobs, n, block):
    """Job = row. Temperature 0: greedy, logprob at temperature 1. Token -1: no logit above -inf (all NaN or -inf)."""
    u = np.empty(16, np.float32)
    for row in range(first, stop, stride):
        at = row * n
        temperature = temperatures[row]
        if temperature == ZERO:
            token = _argmax(logits, at, n)
            temperature = np.float32(1)
        else:
            token = _gumbel_argmax(logits, at, n, temperature, keys[row], positions[row], u)
        tokens[row] = token
        if token >= 0:
            top, total = max_and_sum(logits, at, n, temperature, block)
            logprobs[row] = (logits[at + token] / temperature - top) - log(total)
        else:
            logprobs[row] = np.float32(np.nan)


@parallel_kernel
def sample_parallel(threads, jobs, logits, temperatures, keys, positions, tokens, logprobs, n, block):
    for t in numba.prange(threads):
        sample_range(np.int64(t), jobs, threads, logits, temperatures, keys, positions, tokens, logprobs, n, block)


@kernel
def uniform_row(key, position, out):
    """u of every vocabulary entry of one draw."""
    for i in range(0, out.size, 4):
        words = philox(key, i // 4, position)
        for j in range(min(4, out.size - i)):
            out[i + j] = _uniform(words[j])


@kernel
def noise_range(first, stop, stride, keys, positions, out, n):
    """Job = row: Gumbel noise -ln(-ln u), out [rows, n]."""
    for row in range(first, stop, stride):
        at = row * n
        uniform_row(keys[row], positions[row], out[at : at + n])
        for i in range(at, at + n, 16):
            lanes = at + n - i
            store_lanes(out, i, vneg(vlog(vneg(vlog(load_lanes(out, i, lanes))))), lanes)


@parallel_kernel
def noise_parallel(threads, jobs, keys, positions, out, n):
    for t in numba.prange(threads):
        noise_range(np.int64(t), jobs, threads, keys, positions, out, n)
