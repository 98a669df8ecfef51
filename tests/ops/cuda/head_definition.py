"""The head of `sm90` a second time, in plain numpy float32, from the definition in exactrl/ops/cuda/head.py alone.

exp2 and ln are numpy's, as in Triton's interpreter: the test is about order, rounding and masks.
"""

from __future__ import annotations

import numpy as np

F = np.float32
INF = F(np.inf)
C = F(np.log2(np.e))


def exp(a: np.ndarray) -> np.ndarray:
    return np.exp2(a * C)


def tree(x: np.ndarray) -> np.ndarray:
    """Over the last axis, neighbours first."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def chain(x: np.ndarray) -> np.ndarray:
    total = np.zeros(x.shape[:-1], F)
    for i in range(x.shape[-1]):
        total = total + x[..., i]
    return total


def scaled(logits: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    return logits / temperatures[:, None]


def sums(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [R, V] -> m, s, q, each [R, blocks]."""
    rows, vocab = x.shape
    filled = np.full((rows, -(-vocab // 128) * 128), -INF, F)
    filled[:, :vocab] = x
    b = filled.reshape(rows, -1, 128)
    m = b.max(2)
    d = b - np.where(m == -INF, F(0), m)[:, :, None]
    return m, tree(exp(d)), tree(exp(d) * np.where(b == -INF, F(0), d))


def lse(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [R, V] -> M, ln S, entropy, each [R]."""
    m, s, q = sums(x)
    top = m.max(1)
    top = np.where(top == -INF, F(0), top)
    d = m - top[:, None]
    w = exp(d)
    total = chain(w * s)
    products = chain(w * (q + np.where(m == -INF, F(0), s * np.where(m == -INF, F(0), d))))
    return top, np.log(total), np.log(total) - products / total


def all_logprobs(x: np.ndarray) -> np.ndarray:
    top, ln, _ = lse(x)
    return (x - top[:, None]) - ln[:, None]


def tokens(x: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Lowest index of the largest x + noise."""
    return (x - np.log(-np.log(u))).argmax(1)


def digest(logprobs: np.ndarray) -> int:
    """Of one row: the sum modulo 2^64 of SplitMix64's finaliser of index and bits."""
    total, mask = 0, 2**64 - 1
    for i, bits in enumerate(logprobs.view(np.uint32).tolist()):
        h = bits | i << 32
        h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 & mask
        h = (h ^ h >> 27) * 0x94D049BB133111EB & mask
        total += h ^ h >> 31
    return total & mask
