"""Batch invariance (P2): the bits of a row depend on the row alone.

Every claim compares bit patterns. The reference is one call on all rows, serial; the other side runs the same rows in
other company: fewer, shifted, beside NaN and inf, on several threads, and for attention in other chunks and pages.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exactrl.ops import attention, embedding, head, linear, norm, qkv, swiglu
from exactrl.ops.attention import PAGE, Rows
from exactrl.ops.cpu import jit
from exactrl.ops.qkv import HeadShape, RopeTable

from .helpers import CONTRACT, DTYPES, bits, make_weight, packed_rows, same_bits

F32, BF16 = DTYPES
ROWS = 260
COUNTS = (1, 2, 3, 7, 8, 9, 63, 64, 65, 127, 128, 129, 130, 255, 256, 257)
POISON = (float("nan"), float("inf"), float("-inf"), 3e38, -1e-40)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def force_threads(monkeypatch, n: int) -> None:
    """n = 1 takes the serial kernels, more the parallel ones, at any size and on any machine."""
    monkeypatch.setattr(jit, "threads_for", lambda work: n)


# --- ops whose rows are tokens: (row inputs, function of them -> outputs with the same rows) ---


def _linear(dtype, k, n, leaves=1, **weight):
    g = generator()
    w = make_weight((n, k), dtype, g, **weight)
    return [torch.randn(ROWS, k, generator=g).to(dtype)], lambda x: (linear.linear_exact(x, w, leaves),)


def _rms_norm(dtype, n, residual=None):
    g = generator()
    w = make_weight((n,), dtype, g, packed=False)
    return [torch.randn(ROWS, n, generator=g).to(residual or dtype)], lambda h: (norm.rms_norm_exact(h, w, 1e-6),)


def _add_rms_norm(dtype, n, residual=None):
    g = generator()
    w = make_weight((n,), dtype, g, packed=False)
    h, x = torch.randn(ROWS, n, generator=g).to(residual or dtype), torch.randn(ROWS, n, generator=g).to(dtype)
    return [h, x], lambda h, x: norm.add_rms_norm_exact(h, x, w, 1e-6)


def _qkv(dtype, shape):
    g = generator()
    wq, wk = (make_weight((shape.dim,), dtype, g, packed=False) for _ in range(2))
    x = torch.randn(ROWS, (shape.heads + 2 * shape.kv_heads) * shape.dim, generator=g).to(dtype)
    rope = RopeTable.build(1e4, shape.dim, 4000)
    positions = torch.randint(0, 4000, (ROWS,), generator=g)
    return [x, positions], lambda x, p: qkv.qkv_exact(x, wq, wk, rope, p, shape, 1e-6)


def _swiglu(dtype, n):
    return [(torch.randn(ROWS, 2 * n, generator=generator()) * 20).to(dtype)], lambda x: (swiglu.swiglu_exact(x),)


def _embedding(dtype):
    w = make_weight((50, 24), dtype, generator())
    return [torch.randint(0, 50, (ROWS,), generator=generator())], lambda i: (embedding.embedding_exact(i, w, F32),)


def _logprobs(dtype, vocab):
    g = generator()
    w = make_weight((vocab, 40), dtype, g)
    inputs = [
        torch.randn(ROWS, 40, generator=g).to(dtype),
        torch.randint(0, vocab, (ROWS,), generator=g),
        torch.rand(ROWS, generator=g) + 0.3,
    ]
    return inputs, lambda x, targets, t: head.logprobs_exact(x, w, targets, t, CONTRACT)


def _sample(dtype, vocab):
    g = generator()
    w = make_weight((vocab, 40), dtype, g)
    temperatures = torch.rand(ROWS, generator=g) + 0.3
    temperatures[::5] = 0
    inputs = [
        torch.randn(ROWS, 40, generator=g).to(dtype),
        temperatures,
        torch.randint(-(2**63), 2**63 - 1, (ROWS,), generator=g),
        torch.randint(0, 1 << 20, (ROWS,), generator=g),
    ]

    def run(x, t, keys, positions):
        return head.sample_exact(x, w, t, keys, positions, CONTRACT)

    return inputs, run


OPS = {
    "linear": lambda d: _linear(d, 100, 70),
    "linear K > 512, N < 32": lambda d: _linear(d, 1101, 5),
    "linear 17 panels, panels only": lambda d: _linear(d, 33, 530, trainable=False),
    "linear 2 leaves": lambda d: _linear(d, 66, 33, 2),
    "linear 4 leaves > 512": lambda d: _linear(d, 2084, 40, 4),
    "rms_norm 97": lambda d: _rms_norm(d, 97),
    "rms_norm 1024 fp32 residual": lambda d: _rms_norm(d, 1024, F32),
    "add_rms_norm 40": lambda d: _add_rms_norm(d, 40),
    "add_rms_norm 7 fp32 residual": lambda d: _add_rms_norm(d, 7, F32),
    "qkv 4/2/24": lambda d: _qkv(d, HeadShape(4, 2, 24)),
    "qkv 3/1/6": lambda d: _qkv(d, HeadShape(3, 1, 6)),
    "swiglu 37": lambda d: _swiglu(d, 37),
    "swiglu 64": lambda d: _swiglu(d, 64),
    "embedding": _embedding,
    "logprobs 300": lambda d: _logprobs(d, 300),
    "logprobs 5": lambda d: _logprobs(d, 5),
    "sample 300": lambda d: _sample(d, 300),
    "sample 5": lambda d: _sample(d, 5),
}


def check(op, inputs, expected, index: torch.Tensor, what: str, rows=slice(None)) -> None:
    """op on inputs[index] must give expected[index]; `rows`: which of the rows are compared."""
    for i, (out, ref) in enumerate(zip(op(*(x[index] for x in inputs)), expected, strict=True)):
        assert same_bits(out[rows], ref[index][rows]), f"{what}, output {i}"


@pytest.fixture(params=OPS)
def name(request):
    return request.param


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def case(request, name, monkeypatch):
    force_threads(monkeypatch, 1)
    inputs, op = OPS[name](request.param)
    return inputs, op, op(*inputs)


def test_number_offset_and_order_of_rows(case):
    inputs, op, expected = case
    for i, count in enumerate(COUNTS):
        for offset in {0, ROWS - count, (37 * i) % (ROWS - count + 1)}:
            check(op, inputs, expected, torch.arange(offset, offset + count), f"{count} rows from {offset}")
    for row in range(0, ROWS, 13):
        check(op, inputs, expected, torch.tensor([row]), f"row {row} alone")
    check(op, inputs, expected, torch.randperm(ROWS, generator=generator(1)), "rows shuffled")
    check(op, inputs, expected, torch.full((70,), 3), "one row 70 times")


def test_neighbours(case):
    """Rows 5, 64 and 259 among neighbours that hold anything."""
    inputs, op, expected = case
    kept = torch.tensor([5, 64, 259])
    g = generator(2)
    for poison in (*POISON, None):
        others = []
        for x in inputs:
            y = torch.randn(x.shape, generator=g).to(x.dtype) if x.is_floating_point() and x.ndim > 1 else x.clone()
            if poison is not None and x.ndim > 1:
                y.fill_(poison)
            y[kept] = x[kept]
            others.append(y)
        for i, (out, ref) in enumerate(zip(op(*others), expected, strict=True)):
            assert same_bits(out[kept], ref[kept]), f"output {i} beside {poison}"


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads(case, threads, monkeypatch):
    inputs, op, expected = case
    force_threads(monkeypatch, threads)
    for count in (1, 2, 65, ROWS):
        check(op, inputs, expected, torch.arange(count), f"{threads} threads, {count} rows")


def test_with_and_without_gradient(case):
    inputs, op, expected = case
    with torch.no_grad():
        check(op, inputs, expected, torch.arange(ROWS), "no_grad")


@pytest.mark.parametrize("dtype", DTYPES)
def test_thread_setting_of_the_process(dtype):
    """The real switch, on work that is above the threshold."""
    before = torch.get_num_threads()
    inputs, op = _linear(dtype, 300, 200)
    assert ROWS * 300 * 200 > jit.MIN_PARALLEL_WORK
    try:
        jit.set_num_threads(1)
        assert jit.threads_for(1e9) == 1
        one = op(*inputs)[0]
        jit.set_num_threads(2)
        assert same_bits(op(*inputs)[0], one)
    finally:
        jit.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_in_chunks(dtype, monkeypatch):
    for build in (_logprobs, _sample):
        inputs, op = build(dtype, 300)
        expected = op(*inputs)
        monkeypatch.setattr(head, "CHUNK_BYTES", 4 * 300 * 9)
        check(op, inputs, expected, torch.arange(ROWS), "9 rows of logits at a time")
        monkeypatch.undo()


# --- attention ---

LENGTHS = (15, 16, 17, 63, 64, 65, 511, 512, 513, 1030)
GROUPS = [HeadShape(g, 1, 24) for g in range(1, 9)]
DIMS = [HeadShape(4, 2, d) for d in (5, 16, 31, 80, 112, 128)]
SHAPES = [*GROUPS, *DIMS, HeadShape(6, 2, 40), HeadShape(9, 1, 8), HeadShape(22, 2, 16)]


def qkv_rows(length: int, shape: HeadShape, dtype: torch.dtype, scale: float = 1.0):
    g = generator(length)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (torch.randn(length, n, shape.dim, generator=g) for n in heads)
    return (q * scale).to(dtype), k.to(dtype), v.to(dtype)


def packed(q, k, v, lengths, shape):
    return attention.packed_attention(q, k, v, packed_rows(lengths, shape), CONTRACT)


class Pool:
    """Pages of NaN and, for each sequence, the shuffled pages it owns: what an engine has."""

    def __init__(self, lengths, shape: HeadShape, dtype, seed: int = 0) -> None:
        self.shape, self.rng = shape, np.random.default_rng(seed)
        most = -(-max(lengths) // PAGE)
        pages = self.rng.permutation(most * len(lengths) + 5)
        self.tables = pages[: most * len(lengths)].reshape(len(lengths), most).astype(np.int32)
        self.k, self.v = attention.new_pages(len(pages), shape, dtype)
        self.k.fill_(torch.nan)
        self.v.fill_(torch.nan)

    def rows(self, sequences, first, counts) -> Rows:
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return Rows.build(starts, np.asarray(first, np.int64), self.tables[list(sequences)], self.shape)

    def step(self, data, chunks):
        """chunks: (sequence, first, count) -> (out, lse) of all rows, K and V of just these rows written before."""
        rows = self.rows(*zip(*chunks, strict=True))
        q, k, v = (torch.cat([data[s][i][a : a + n] for s, a, n in chunks]) for i in range(3))
        attention.write_kv(k, v, rows, self.k, self.v)
        lse = torch.empty(q.shape[:2])
        return attention.paged_attention(q, rows, self.k, self.v, CONTRACT, lse), lse


def reference(length, shape, dtype, scale=1.0):
    """(q, k, v), (out, lse) of one sequence prefilled alone in one call."""
    data = qkv_rows(length, shape, dtype, scale)
    return data, Pool([length], shape, dtype).step([data], [(0, 0, length)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_decode_rows_equal_prefill_rows(dtype, shape, scale, monkeypatch):
    """Every position of 1,030 as a lone decode row, all in one batch over shared, shuffled pages; and as training."""
    force_threads(monkeypatch, 1)
    n = 1030
    (q, k, v), (out, lse) = reference(n, shape, dtype, scale)
    assert bool(out.isfinite().all())
    pool = Pool([n], shape, dtype, seed=1)
    pool.step([(q, k, v)], [(0, 0, n)])
    positions = np.random.default_rng(0).permutation(n)
    rows = pool.rows([0] * n, positions, [1] * n)
    mine = torch.empty(q.shape[:2])
    decoded = attention.paged_attention(q[positions], rows, pool.k, pool.v, CONTRACT, mine)
    assert same_bits(decoded, out[positions])
    assert same_bits(mine, lse[positions])
    force_threads(monkeypatch, 3)
    assert same_bits(packed(q, k, v, [n], shape), out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [GROUPS[0], GROUPS[1], GROUPS[2], GROUPS[7], HeadShape(4, 2, 80), HeadShape(9, 1, 8)], ids=str
)
@pytest.mark.parametrize(("scale", "threads"), [(1.0, 1), (10.0, 2), (30.0, 1)])
def test_continuous_batching(dtype, shape, scale, threads, monkeypatch):
    """Chunks of random sizes of several sequences in random company, nothing but NaN beyond what was written."""
    force_threads(monkeypatch, threads)
    lengths = [1030, 65, 130, 517]
    data, expected = zip(*(reference(n, shape, dtype, scale) for n in lengths), strict=True)
    pool, rng, done = Pool(lengths, shape, dtype, seed=2), np.random.default_rng(int(scale)), [0] * len(lengths)
    while done != lengths:
        chosen = [s for s in rng.permutation(len(lengths)) if done[s] < lengths[s] and rng.random() < 0.8]
        sizes = [int(rng.choice([1, 1, 2, 5, 16, 63, 64, 65, 250])) for _ in chosen]
        chunks = [(int(s), done[s], min(n, lengths[s] - done[s])) for s, n in zip(chosen, sizes, strict=True)]
        if not chunks:
            continue
        at, (out, lse) = 0, pool.step(data, chunks)
        for s, a, n in chunks:
            assert same_bits(out[at : at + n], expected[s][0][a : a + n]), f"sequence {s}, rows {a} to {a + n}"
            assert same_bits(lse[at : at + n], expected[s][1][a : a + n]), f"lse of sequence {s}, rows {a} to {a + n}"
            done[s], at = a + n, at + n


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [GROUPS[2], HeadShape(2, 2, 16)], ids=str)
def test_last_row_as_decode_step(dtype, shape):
    """Prefill of n - 1, then one decode row, with NaN in every slot the row must not see."""
    for n in LENGTHS:
        data, (out, _) = reference(n, shape, dtype, 10.0)
        pool = Pool([n], shape, dtype, seed=n)
        pool.step([data], [(0, 0, n - 1)])
        assert same_bits(pool.step([data], [(0, n - 1, 1)])[0], out[-1:]), f"length {n}"
        assert same_bits(pool.step([data], [(0, n // 2, n - n // 2)])[0], out[n // 2 :]), f"length {n}, second half"


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_beyond_a_row_does_not_matter(dtype):
    """Later keys may hold anything, in the row's last page and in pages after it."""
    shape, n, seen = HeadShape(4, 2, 24), 600, 530
    (q, k, v), (out, lse) = reference(n, shape, dtype)
    for poison in (*POISON, 1e4):
        k2, v2 = k.clone(), v.clone()
        k2[seen:], v2[seen:] = poison, poison
        got, mine = Pool([n], shape, dtype, seed=3).step([(q, k2, v2)], [(0, 0, n)])
        assert same_bits(got[:seen], out[:seen]), f"beside {poison}"
        assert same_bits(mine[:seen], lse[:seen]), f"lse beside {poison}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_and_neighbour_sequences(dtype, monkeypatch):
    shape, lengths = HeadShape(6, 2, 24), [17, 1, 513, 64, 8]
    data = [qkv_rows(n, shape, dtype) for n in lengths]
    alone = [packed(*d, [n], shape) for d, n in zip(data, lengths, strict=True)]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [2], [3, 2, 3]):
        for threads in (1, 2):
            force_threads(monkeypatch, threads)
            parts = [torch.cat([data[i][j] for i in order]) for j in range(3)]
            out = packed(*parts, [lengths[i] for i in order], shape)
            assert same_bits(out, torch.cat([alone[i] for i in order])), f"order {order}, {threads} threads"
    poisoned = [torch.cat([torch.full_like(a, torch.nan), a, torch.full_like(a, torch.inf)]) for a in data[2]]
    assert same_bits(packed(*poisoned, [513] * 3, shape)[513:1026], alone[2])
    with_gradient = [x.clone().requires_grad_() for x in data[2]]
    assert same_bits(packed(*with_gradient, [513], shape), alone[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_ulp_is_seen(dtype):
    """The comparison itself: one unit in the last place, the sign of zero and the kind of NaN all count."""
    x = torch.randn(9, 9, generator=generator()).to(dtype)
    y = x.clone()
    bits(y)[4, 4] += 1
    assert not same_bits(x, y)
    zero = torch.zeros(1, dtype=dtype)
    assert not same_bits(zero, -zero)
    assert same_bits(zero / 0, zero / 0)
    assert not same_bits(x, x.double())
