"""The kernels against the contract written a second time (definition.py), bit for bit; and their arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from exactrl.ops import attention, head, linear, norm, qkv, swiglu
from exactrl.ops.attention import Rows
from exactrl.ops.cpu import jit, logprob, simd
from exactrl.ops.qkv import HeadShape, RopeTable
from exactrl.ops.transfer import key_bits

from . import definition
from .helpers import CONTRACT, DTYPES, make_weight, packed_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
ids = ["float32", "bfloat16"]
exp2, exp, log, fma, vload, vstore = simd.vexp2, simd.vexp, simd.vlog, simd.vfma, simd.vload, simd.vstore
vload_n, vstore_n, vsum, load, store, exp_1, exp2_1, log_1, fma_1 = (
    simd.vload_n, simd.vstore_n, simd.vsum, simd.load, simd.store, simd.exp, simd.exp2, simd.log, simd.fma,
)  # fmt: skip
max_and_sum = logprob.max_and_sum


@pytest.fixture
def g():
    return torch.Generator().manual_seed(0)


def randn(*shape, g, dtype, scale=1.0):
    return (torch.randn(shape, generator=g) * scale).to(dtype)


def numbers(t: torch.Tensor) -> np.ndarray:
    return t.detach().float().numpy()


def equal(actual, expected, dtype: torch.dtype = torch.float32) -> None:
    """Same bits after rounding the expected values to dtype; NaN equals NaN."""
    a = numbers(actual) if isinstance(actual, torch.Tensor) else actual
    e = definition.rounded(np.asarray(expected, np.float32), str(dtype)[6:])
    different = (a.view(np.int32) != e.view(np.int32)) & ~(np.isnan(a) & np.isnan(e))
    assert a.shape == e.shape
    assert not different.any(), f"{different.sum()} of {a.size}: first {a[different][0]!r}, defined {e[different][0]!r}"


# --- arithmetic ---


def nearest(x: Fraction) -> np.float32:
    """float32 nearest to an exact value, ties to even: compared as fractions, no floating-point rounding involved."""
    f = np.float32(float(x))
    candidates = [f, np.nextafter(f, np.float32(np.inf)), np.nextafter(f, np.float32(-np.inf))]
    return min(candidates, key=lambda c: (abs(Fraction(float(c)) - x), int(c.view(np.int32)) & 1))


def adversarial(rng, n: int) -> np.ndarray:
    """float32 of all magnitudes, many with few significant bits, so that sums cancel and fall on ties."""
    x = rng.integers(-(1 << 24), 1 << 24, n) * 2.0 ** rng.integers(-60, 30, n)
    few = rng.integers(-8, 9, n) * 2.0 ** rng.integers(-30, 3, n)
    return np.where(rng.random(n) < 0.5, x, few).astype(np.float32)


def test_fma_of_the_definition_is_exact():
    rng = np.random.default_rng(0)
    a, b = adversarial(rng, 4000), adversarial(rng, 4000)
    c = np.where(rng.random(4000) < 0.5, adversarial(rng, 4000), -(a * b) * rng.choice([1, 2, 2**24, 2**-24], 4000))
    c = c.astype(np.float32)
    tie = np.float32(1 + 2**-12), np.float32(1 + 2**-12), np.float32(2**-60)  # double rounding would lose 2**-60
    a, b, c = (np.append(x, t) for x, t in zip((a, b, c), tie, strict=True))
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    got, want = definition.fma(a, b, c), np.array([nearest(x) for x in exact])
    nonzero = want != 0  # the sign of an exact zero follows other rules
    assert (got[nonzero].view(np.int32) == want[nonzero].view(np.int32)).all()
    assert (got[~nonzero] == 0).all()


@jit.kernel
def unary(which, x, out):
    for i in range(0, x.size, 16):
        v = vload(x, i)
        if which == 0:
            vstore(out, i, exp2(v))
        elif which == 1:
            vstore(out, i, exp(v))
        else:
            vstore(out, i, log(v))


@jit.kernel
def unary_scalar(which, x, out):
    for i in range(x.size):
        out[i] = exp2_1(x[i]) if which == 0 else (exp_1(x[i]) if which == 1 else log_1(x[i]))


@jit.kernel
def fused(a, b, c, out, scalar):
    for i in range(0, a.size, 16):
        vstore(out, i, fma(vload(a, i), vload(b, i), vload(c, i)))
    for i in range(a.size):
        scalar[i] = fma_1(a[i], b[i], c[i])


@jit.kernel
def copy(x, out, step):
    """Through vectors of 16, the last `step` elements through the partial load and store."""
    stop = x.size - step
    for i in range(0, stop, 16):
        vstore(out, i, vload(x, i))
    vstore_n(out, stop, vload_n(x, stop, step), step)


@jit.kernel
def copy_scalar(x, out):
    for i in range(x.size):
        store(out, i, load(x, i))


def test_kernel_fma_rounds_once():
    rng = np.random.default_rng(1)
    a, b = adversarial(rng, 1 << 14), adversarial(rng, 1 << 14)
    c = np.where(rng.random(a.size) < 0.5, adversarial(rng, a.size), -(a * b)).astype(np.float32)
    special = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3e38, 1.0])
    a[:512], b[:512], c[:512] = (x.reshape(-1) for x in np.meshgrid(special, special, special))
    out, scalar = np.empty_like(a), np.empty_like(a)
    fused(a, b, c, out, scalar)
    equal(out, definition.fma(a, b, c))
    equal(scalar, out)


@pytest.mark.parametrize(
    ("which", "defined", "true", "low", "high"),
    [
        (0, definition.exp2, np.exp2, -126, 128),
        (1, definition.exp, np.exp, -87.3, 88.7),
        (2, definition.log, np.log, 0, 0),
    ],
    ids=["exp2", "exp", "log"],
)
def test_functions(which, defined, true, low, high):
    patterns = np.arange(0, 1 << 32, 65521, dtype=np.uint64).astype(np.uint32).view(np.float32)
    dense = np.random.default_rng(0).uniform(-130, 130, 40000).astype(np.float32)
    edges = [low, high, 0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 0.70710677, 0.70710683, 126.5, 127.5, 127.99999]
    edges = np.float32(edges)
    edges = np.concatenate([edges, np.nextafter(edges, np.float32(np.inf)), np.nextafter(edges, np.float32(-np.inf))])
    x = np.concatenate([patterns, dense, edges, 1 - dense**2 / 2**20])
    if which == 2:
        x = x[(x >= np.finfo(np.float32).tiny) | np.isnan(x)]
    x = np.ascontiguousarray(np.resize(x, -(-x.size // 16) * 16))
    out, scalar = np.empty_like(x), np.empty_like(x)
    unary(which, x, out)
    unary_scalar(which, x, scalar)
    equal(out, defined(x))
    equal(scalar, out)
    with np.errstate(all="ignore"):
        exact = true(x.astype(np.float64))
    judged = np.isfinite(out) & np.isfinite(exact) & (out != 0)
    if which == 0:
        judged &= x < 127.5  # the exponent stops at 127; no op raises 2 to more than about 0
    error = np.abs(out[judged] - exact[judged]) / np.abs(exact[judged]).clip(1e-38)
    assert error.max() < 2.5e-7, f"relative error {error.max():.2e} at {x[judged][error.argmax()]!r}"
    assert np.isnan(out[np.isnan(x)]).all()


def test_bfloat16_rounding():
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    low = np.uint32([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x = (high[:, None] | low).reshape(-1).view(np.float32)
    expected = torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(x)
    for step in (0, 5):
        out, scalar, tail = np.empty(x.size, np.uint16), np.empty(x.size, np.uint16), x[: x.size - 16 + step]
        copy(tail, out, step)
        copy_scalar(x, scalar)
        out = np.where(np.arange(x.size) < tail.size, out, scalar)
        for got in (out, scalar):
            assert (got[~nan] == expected[~nan]).all()
            assert np.isnan((got[nan].astype(np.uint32) << 16).view(np.float32)).all()
    assert (definition.to_bf16(x)[~nan].view(np.uint32) >> 16 == expected[~nan]).all()
    wide = np.empty(1 << 16, np.float32)
    copy_scalar(np.arange(1 << 16, dtype=np.uint16), wide)
    assert (wide.view(np.uint32) == high).all()


def test_partial_stores_touch_nothing_beyond():
    for dtype in (np.float32, np.uint16):
        for n in range(16):
            out = np.full(n + 16, 7, dtype)
            copy(np.zeros(n, np.float32), out, n)
            assert (out[:n] == 0).all()
            assert (out[n:] == 7).all()


# --- ops ---


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize(
    ("m", "k", "n", "leaves"), [(9, 700, 35, 1), (3, 66, 5, 2), (2, 2080, 7, 4), (67, 5, 33, 1), (1, 1, 1, 1)]
)
def test_linear(dtype, m, k, n, leaves, g):
    x, w = randn(m, k, g=g, dtype=dtype), make_weight((n, k), dtype, g)
    expected = definition.linear(numbers(x), numbers(w.rows()), leaves)
    equal(linear.linear_exact(x, w, leaves), expected, dtype)
    equal(linear.product(x, w, torch.float32, leaves), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_linear_on_extreme_values(dtype, g):
    """Cancellation, denormals, overflow, infinities and NaN."""
    x = torch.from_numpy(adversarial(np.random.default_rng(0), 16 * 40).reshape(16, 40)).to(dtype)
    x[3] *= 2.0**-126
    x[4, 7], x[5, 7], x[6, 7], x[7] = torch.inf, torch.nan, 3e38, 0.0
    w = make_weight((20, 40), dtype, g)
    w.assign(torch.from_numpy(adversarial(np.random.default_rng(1), 20 * 40).reshape(20, 40)))
    equal(linear.linear_exact(x, w), definition.linear(numbers(x), numbers(w.rows())), dtype)


def test_leaves_must_cut_k_evenly(g):
    w = make_weight((4, 12), torch.float32, g)
    for leaves in (3, 8, 0):
        with pytest.raises(AssertionError, match="leaves cannot cut K = 12"):
            linear.linear_exact(torch.zeros(1, 12), w, leaves)


def test_empty_sums_are_zero():
    """No rows: the gradient of a weight is zero, not what the memory held."""
    assert (linear.grad_weight(torch.empty(0, 70), torch.empty(0, 33)) == 0).all()
    kept = torch.ones(70, 33)
    linear.grad_weight(torch.empty(0, 70), torch.empty(0, 33), into=kept)
    assert (kept == 1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize(("n", "scale"), [(1, 1.0), (16, 1.0), (97, 1e-3), (1000, 1.0), (33, 1e-22), (40, 1e18)])
def test_norms(dtype, n, scale, g):
    w = make_weight((n,), dtype, g, packed=False)
    for residual in DTYPES:
        h, x = randn(50, n, g=g, dtype=residual, scale=scale), randn(50, n, g=g, dtype=dtype, scale=scale)
        equal(norm.rms_norm_exact(h, w, 1e-6), definition.rms_norm(numbers(h), numbers(w.rows()), 1e-6), dtype)
        total, y = norm.add_rms_norm_exact(h, x, w, 1e-6)
        equal(total, numbers(h) + numbers(x), residual)
        equal(y, definition.rms_norm(numbers(total), numbers(w.rows()), 1e-6), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("shape", [HeadShape(4, 2, 24), HeadShape(3, 1, 6), HeadShape(2, 2, 64)], ids=str)
def test_qkv(dtype, shape, g):
    t, d = 20, shape.dim
    x = randn(t, (shape.heads + 2 * shape.kv_heads) * d, g=g, dtype=dtype)
    wq, wk = (make_weight((d,), dtype, g, packed=False) for _ in range(2))
    rope, positions = RopeTable.build(1e6, d, 40000), torch.randint(0, 40000, (t,), generator=g)
    frequency = np.array([1e6 ** (-i / d) for i in range(0, d, 2)])
    angle = positions.numpy()[:, None] * frequency
    cos, sin = rope.cos.numpy()[positions], rope.sin.numpy()[positions]
    assert np.abs(cos - np.cos(angle)).max() < 1e-7
    assert np.abs(sin - np.sin(angle)).max() < 1e-7
    parts = np.split(numbers(x).reshape(t, -1, d), [shape.heads, shape.heads + shape.kv_heads], 1)
    q, k, v = qkv.qkv_exact(x, wq, wk, rope, positions, shape, 1e-6)
    for out, part, w in ((q, parts[0], wq), (k, parts[1], wk)):
        normed = definition.rounded(definition.rms_norm(part, numbers(w.rows()), 1e-6), str(dtype)[6:])
        equal(out, definition.rotate(normed, cos, sin), dtype)
    equal(v, parts[2], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_swiglu(dtype, g):
    x = randn(60, 2 * 53, g=g, dtype=dtype, scale=30.0)
    x[0, :8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -88.0, 3e38])
    equal(swiglu.swiglu_exact(x), definition.swiglu(numbers(x)), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize(("vocab", "scale"), [(1, 1.0), (5, 1.0), (128, 1.0), (129, 5.0), (700, 1.0), (700, 30.0)])
def test_logprobs(dtype, vocab, scale, g):
    x, w = randn(24, 20, g=g, dtype=dtype, scale=scale), make_weight((vocab, 20), dtype, g)
    targets, temperatures = torch.randint(0, vocab, (24,), generator=g), torch.rand(24, generator=g) + 0.2
    logits = definition.linear(numbers(x), numbers(w.rows()))
    for contract in (CONTRACT, replace(CONTRACT, vocab_block=64)):
        expected = definition.logprobs(logits, targets.numpy(), temperatures.numpy(), contract.vocab_block)
        equal(head.logprobs_exact(x, w, targets, temperatures, contract)[0], expected)


@jit.kernel
def sums(logits, n, temperature, block, top, total):
    for row in range(top.size):
        top[row], total[row] = max_and_sum(logits, row * n, n, temperature, block)


@pytest.mark.parametrize("n", [1, 128, 300, 1000])
def test_max_and_sum(n, g):
    """Before the logarithm, which would hide most one-ulp differences."""
    x = numbers(randn(500, n, g=g, dtype=torch.float32, scale=3.0))
    top, total = np.empty(500, np.float32), np.empty(500, np.float32)
    for block in (64, 128):
        sums(x.reshape(-1), n, np.float32(0.7), block, top, total)
        expected = definition.max_and_sum(x / np.float32(0.7), block)
        equal(top, expected[0])
        equal(total, expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("vocab", [5, 97, 300])
def test_sample(dtype, vocab, g):
    rows = 40
    x, w = randn(rows, 20, g=g, dtype=dtype), make_weight((vocab, 20), dtype, g)
    temperatures = torch.rand(rows, generator=g) + 0.3
    temperatures[::4] = 0
    positions = torch.randint(0, 1 << 20, (rows,), generator=g)
    keys = np.random.default_rng(0).integers(0, 1 << 64, rows, np.uint64)
    tokens, logprobs = head.sample_exact(x, w, temperatures, key_bits(keys), positions, CONTRACT)
    t = np.where(temperatures.numpy() == 0, np.float32(1), temperatures.numpy())
    logits = definition.linear(numbers(x), numbers(w.rows()))
    u = np.stack([definition.uniforms(int(k), int(p), vocab) for k, p in zip(keys, positions, strict=True)])
    noisy = logits / t[:, None] + -definition.log(-definition.log(u))
    expected = np.where(temperatures.numpy() == 0, logits.argmax(1), noisy.argmax(1))
    assert (tokens.numpy() == expected).all()
    equal(logprobs, definition.logprobs(logits, expected, t, CONTRACT.vocab_block))


def attend(q, k, v, rows_wanted, split, dtype, shape):
    """(kernel out, kernel lse, defined out, defined lse) of some rows of one sequence."""
    contract, n, name = replace(CONTRACT, kv_split=split), len(q), str(dtype)[6:]
    rows: Rows = packed_rows([n], shape)
    k_pages, v_pages = attention.new_pages(-(-n // attention.PAGE), shape, dtype)
    attention.write_kv(k, v, rows, k_pages, v_pages)
    lse = torch.empty(n, shape.heads)
    out = attention.paged_attention(q, rows, k_pages, v_pages, contract, lse)
    group = shape.heads // shape.kv_heads
    q, k, v = numbers(q), np.repeat(numbers(k), group, 1), np.repeat(numbers(v), group, 1)
    scale = np.float32(math.log2(math.e) / math.sqrt(shape.dim))
    defined = [definition.attention_row(q[i], k[: i + 1], v[: i + 1], scale, split, name) for i in rows_wanted]
    return out[rows_wanted], lse[rows_wanted], *(np.stack(x) for x in zip(*defined, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize(
    ("shape", "split", "scale", "rows"),
    [
        (HeadShape(4, 2, 8), 512, 1.0, [0, 1, 14, 15, 16, 62, 63, 64, 65, 127, 128, 149]),
        (HeadShape(4, 2, 8), 64, 1.0, [63, 64, 65, 127, 128, 149]),
        (HeadShape(9, 1, 5), 64, 20.0, [0, 17, 64, 131]),
        (HeadShape(2, 2, 80), 128, 5.0, [130, 257]),
        (HeadShape(1, 1, 8), 512, 3.0, [511, 512, 513, 1030]),
        (HeadShape(8, 4, 8), 64, 0.3, [100, 150, 191, 230, 255, 319]),  # flat scores: every split matters
        (HeadShape(8, 8, 8), 512, 0.3, [800, 1100, 1300]),
    ],
    ids=str,
)
def test_attention(dtype, shape, split, scale, rows, g):
    n = rows[-1] + 1
    q = randn(n, shape.heads, shape.dim, g=g, dtype=dtype, scale=scale)
    k, v = (randn(n, shape.kv_heads, shape.dim, g=g, dtype=dtype) for _ in range(2))
    out, lse, defined, defined_lse = attend(q, k, v, rows, split, dtype, shape)
    equal(out, defined, dtype)
    equal(lse, defined_lse)


def test_attention_keeps_nan():
    """A NaN among the visible keys or values reaches the row; the rows before it stay clean."""
    shape, g = HeadShape(1, 1, 8), torch.Generator().manual_seed(0)
    for which in range(2):
        q, *kv = (randn(100, 1, 8, g=g, dtype=torch.float32) for _ in range(3))
        kv[which][70] = torch.nan
        out = attention.packed_attention(q, *kv, packed_rows([100], shape), CONTRACT)
        assert bool(out[:70].isfinite().all())
        assert bool(out[70:].isnan().all())


def test_kernels_are_given_only_what_they_can_index(g):
    """Kernels check no bounds, so their callers do."""
    w = make_weight((7, 4), torch.float32, g)
    for target in (-1, 7):
        with pytest.raises(AssertionError, match="in a vocabulary of 7"):
            head.logprobs_exact(torch.zeros(2, 4), w, torch.tensor([0, target]), torch.ones(2), CONTRACT)
    none = torch.zeros(2, dtype=torch.int64)
    for call in (
        lambda t: head.logprobs_exact(torch.zeros(2, 4), w, none, t, CONTRACT),
        lambda t: head.sample_exact(torch.zeros(2, 4), w, t, none, none, CONTRACT),
    ):
        with pytest.raises(AssertionError, match="temperatures must be float32"):
            call(torch.ones(2, dtype=torch.float64))
    shape, small = HeadShape(1, 1, 4), make_weight((4,), torch.float32, g, packed=False)
    with pytest.raises(AssertionError, match="position 10 is beyond the rotary table of 10"):
        qkv.qkv_exact(torch.zeros(1, 12), small, small, RopeTable.build(1e4, 4, 10), torch.tensor([10]), shape, 1e-6)
    x = torch.zeros(3, 1, 4)
    for contract in (replace(CONTRACT, kv_split=100), replace(CONTRACT, kv_block=32)):
        with pytest.raises(AssertionError, match="no kernel for Contract"):
            attention.packed_attention(x, x, x, packed_rows([3], shape), contract)


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_no_rows(dtype, g):
    w, n = make_weight((7, 4), dtype, g), make_weight((4,), dtype, g, packed=False)
    x, none = torch.zeros(0, 4, dtype=dtype), torch.zeros(0, dtype=torch.int64)
    assert linear.linear_exact(x, w).shape == (0, 7)
    assert norm.add_rms_norm_exact(x, x, n, 1e-6)[1].shape == (0, 4)
    assert swiglu.swiglu_exact(x).shape == (0, 2)
    assert head.logprobs_exact(x, w, none, torch.zeros(0), CONTRACT)[0].shape == (0,)
    assert head.sample_exact(x, w, torch.zeros(0), none, none, CONTRACT)[0].shape == (0,)
    rope, shape = RopeTable.build(1e4, 4, 10), HeadShape(1, 1, 4)
    assert qkv.qkv_exact(torch.zeros(0, 12, dtype=dtype), n, n, rope, none, shape, 1e-6)[0].shape == (0, 1, 4)
