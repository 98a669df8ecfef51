"""The CPU contract written a second time, in plain numpy float32, from docs/numerics.md alone: slow and obvious.

Arrays of float32 stand for independent elements; every `+ - * /` below is one IEEE operation per element, and `fma`
rounds once. Nothing is shared with the kernels.
"""

from __future__ import annotations

import numpy as np

F = np.float32
INF = F(np.inf)


def fma(a, b, c) -> np.ndarray:
    """a * b + c rounded once. The product of two float32 is exact in float64; the sum is rounded to odd there, with 29
    bits to spare, so that the cast rounds the exact value (Boldo and Melquiond, 2008)."""
    a, b, c = (np.asarray(x, F).astype(np.float64) for x in (a, b, c))
    with np.errstate(all="ignore"):
        p = a * b
        s = p + c
        t = s - p
        error = (p - (s - t)) + (c - t)
        toward_zero = (error < 0) == (s > 0)
        odd = (s.view(np.int64) & 1).astype(bool)
        truncated = np.where(toward_zero, np.nextafter(s, 0), s)
        sticky = (np.where((error != 0) & ~odd, truncated.view(np.int64) | 1, s.view(np.int64))).view(np.float64)
        return np.where(np.isfinite(s) & (error != 0), sticky, s).astype(F)


def to_bf16(x) -> np.ndarray:
    """float32 rounded to bfloat16, nearest even, and back."""
    i = np.asarray(x, F).view(np.uint32).astype(np.uint64)
    rounded = ((i + 0x7FFF + ((i >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(F)
    return np.where(np.isnan(x), F(np.nan), rounded)


def rounded(x, dtype: str) -> np.ndarray:
    return to_bf16(x) if dtype == "bfloat16" else np.asarray(x, F)


def tree(lanes: np.ndarray) -> np.ndarray:
    """Sum over the last axis of 16: (i, i + 8), (i, i + 4), (i, i + 2), (i, i + 1)."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def lanes_of(x: np.ndarray, fill: float) -> np.ndarray:
    """[..., n] -> [..., steps, 16], the last step filled up."""
    pad = -x.shape[-1] % 16
    x = np.concatenate([x, np.full((*x.shape[:-1], pad), fill, F)], -1)
    return x.reshape(*x.shape[:-1], -1, 16)


def dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Chain over the last axis."""
    acc = np.zeros(np.broadcast_shapes(a.shape, b.shape)[:-1], F)
    for k in range(a.shape[-1]):
        acc = fma(a[..., k], b[..., k], acc)
    return acc


def linear(x: np.ndarray, w: np.ndarray, leaves: int = 1) -> np.ndarray:
    parts = [dot(a[:, None], b[None]) for a, b in zip(np.split(x, leaves, 1), np.split(w, leaves, 1), strict=True)]
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    return parts[0]


def rms_norm(x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
    acc = np.zeros((*x.shape[:-1], 16), F)
    for step in np.moveaxis(lanes_of(x, 0), -2, 0):
        acc = fma(step, step, acc)
    inverse = F(1) / np.sqrt(tree(acc) / F(x.shape[-1]) + F(eps))
    return x * inverse[..., None] * w


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x [T, heads, D]; cos, sin [T, D / 2]."""
    a, b = np.split(x, 2, -1)
    c, s = cos[:, None], sin[:, None]
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def _power(p: np.ndarray, n: np.ndarray) -> np.ndarray:
    return p * ((n.astype(np.int32) + 127) << 23).view(F)


def _horner(x: np.ndarray, coefficients) -> np.ndarray:
    p = np.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        p = fma(p, x, F(c))
    return p


def exp2(x) -> np.ndarray:
    """0 below -126, inf from 128."""
    x = np.asarray(x, F)
    c = np.clip(np.nan_to_num(x, nan=-126, posinf=127.99999, neginf=-126), F(-126), F(127.99999))
    n = np.minimum(np.rint(c), F(127))
    y = _power(
        _horner(
            c - n,
            (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2,
             2.402264791363012e-1, 6.931472028550421e-1, 1.0),
        ),
        n,
    )  # fmt: skip
    return np.where(np.isnan(x), x, np.where(x < -126, F(0), np.where(x >= 128, INF, y))).astype(F)


def exp(x) -> np.ndarray:
    """0 below -87.3, inf above 88.7."""
    x = np.asarray(x, F)
    low, high = F(-87.3), F(88.7)
    c = np.clip(np.nan_to_num(x, nan=low, posinf=high, neginf=low), low, high)
    n = np.minimum(np.rint(c * F(1.44269504)), F(127))
    r = fma(n, F(2.12194440e-4), fma(n, F(-0.693359375), c))
    p = _horner(
        r, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
    )
    y = _power(fma(p, r * r, r) + F(1), n)
    return np.where(np.isnan(x), x, np.where(x < low, F(0), np.where(x > high, INF, y))).astype(F)


def log(x) -> np.ndarray:
    """Normal x > 0, inf or NaN."""
    x = np.asarray(x, F)
    finite = np.where(np.isfinite(x), x, F(1))
    m, e = np.frexp(finite)
    small = m < F(0.707106781186547524)
    m, e = np.where(small, m + m, m), np.where(small, e - 1, e).astype(F)
    f = m - F(1)
    z = f * f
    p = _horner(
        f,
        (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
         2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
    )  # fmt: skip
    y = fma(z, F(-0.5), fma(e, F(-2.12194440e-4), p * f * z))
    return np.where(np.isfinite(x), fma(e, F(0.693359375), f + y), x).astype(F)


def swiglu(gate_up: np.ndarray) -> np.ndarray:
    g, u = np.split(gate_up, 2, -1)
    return g / (F(1) + exp(-g)) * u


def max_and_sum(x: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """x [rows, n] -> maximum, sum of exp(x - maximum), per block and merged ascending."""
    top, total = np.full(len(x), -INF), np.zeros(len(x), F)
    for b in range(0, x.shape[1], block):
        part = x[:, b : b + block]
        m = part.max(1)
        acc = np.zeros((len(x), 16), F)
        for step in np.moveaxis(lanes_of(part, -np.inf), -2, 0):
            acc = acc + exp(step - m[:, None])
        new = np.maximum(m, top)
        total = fma(total, exp(top - new), tree(acc) * exp(m - new))
        top = new
    return top, total


def logprobs(logits: np.ndarray, targets: np.ndarray, temperatures: np.ndarray, block: int) -> np.ndarray:
    x = logits / temperatures[:, None]
    top, total = max_and_sum(x, block)
    return (x[np.arange(len(x)), targets] - top) - log(total)


def philox(counter, key) -> list[np.ndarray]:
    """Philox4x32-10 (Salmon et al., 2011): four counter words (ints or arrays), two key words."""
    mask = np.uint64(0xFFFFFFFF)
    x = [np.asarray(c, np.uint64) for c in counter]
    k0, k1 = (np.asarray(k, np.uint64) for k in key)
    for i in range(10):
        if i:
            k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
        p0, p1 = np.uint64(0xD2511F53) * x[0], np.uint64(0xCD9E8D57) * x[2]
        x = [(p1 >> np.uint64(32)) ^ x[1] ^ k0, p1 & mask, (p0 >> np.uint64(32)) ^ x[3] ^ k1, p0 & mask]
    return x


def uniforms(key: int, position: int, vocab: int) -> np.ndarray:
    """u of entry i: word i % 4 of counter (i // 4, position, 0, 0)."""
    words = philox((np.arange(-(-vocab // 4)), position, 0, 0), (key & 0xFFFFFFFF, key >> 32))
    r = np.stack(np.broadcast_arrays(*words), 1).reshape(-1)[:vocab]
    return ((r >> np.uint64(9)).astype(F) + F(0.5)) * F(2.0**-23)


def attention_row(q, k, v, scale: np.float32, split: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """One query row: q [H, D] against its visible keys k, v [n, H, D] -> (out [H, D] unrounded, base-2 lse)."""
    n, heads, dim = k.shape
    whole = None
    for s0 in range(0, n, split):
        top, total, acc = np.full(heads, -INF), np.zeros(heads, F), np.zeros((heads, dim), F)
        for b in range(s0, min(n, s0 + split), 64):
            stop = min(n, s0 + split, b + 64)
            scores = dot(q[:, None], k[b:stop].transpose(1, 0, 2)) * scale
            new = np.maximum(scores.max(1), top)
            p = rounded(exp2(scores - new[:, None]), dtype)
            lanes = np.zeros((heads, 16), F)
            for step in np.moveaxis(lanes_of(p, 0), -2, 0):
                lanes = lanes + step
            alpha = exp2(top - new)
            top, total = new, fma(total, alpha, tree(lanes))
            acc = acc * alpha[:, None]
            for j in range(stop - b):
                acc = fma(p[:, j, None], v[b + j], acc)
        if whole is None:
            whole = top, total, acc
        else:
            top0, total0, acc0 = whole
            new = np.maximum(top, top0)
            old, weight = exp2(top0 - new), exp2(top - new)
            whole = new, fma(total, weight, total0 * old), fma(acc, weight[:, None], acc0 * old[:, None])
    top, total, acc = whole
    return acc / total[:, None], top + log(total) * F(1.4426950408889634)
