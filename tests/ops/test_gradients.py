"""Correctness of every op, forward and backward, against fp64 autograd of its torch reference."""

from __future__ import annotations

import pytest
import torch

from exactrl.ops import attention, embedding, head, linear, norm, qkv, swiglu
from exactrl.ops.qkv import HeadShape, RopeTable

from .helpers import CONTRACT, DTYPES, make_weight, packed_rows

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    """Largest error relative to the largest value of the fp64 reference."""
    error = (actual.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
    assert torch.isfinite(actual).all(), what
    assert error < TOLERANCE[dtype], f"{what}: relative error {error:.2e}"


def check(outputs, references, inputs, weights, dtype, generator) -> None:
    """Compares outputs, then gradients of a random projection of all outputs. inputs: (leaf, fp64 leaf) pairs."""
    loss, ref_loss = 0.0, 0.0
    for i, (out, ref) in enumerate(zip(outputs, references, strict=True)):
        close(out, ref.detach(), dtype, f"output {i}")
        g = torch.randn(out.shape, generator=generator)
        loss = loss + (out.float() * g).sum()
        ref_loss = ref_loss + (ref * g.double()).sum()
    loss.backward()
    ref_loss.backward()
    for i, (leaf, ref) in enumerate(inputs + [(w.master, r) for w, r in weights]):
        close(leaf.grad, ref.grad, dtype, f"gradient {i}")


def leaves(shape, dtype, generator):
    x = torch.randn(shape, generator=generator).to(dtype)
    return x.clone().requires_grad_(), x.double().requires_grad_()


def reference_of(weight):
    return weight.rows().double().clone().requires_grad_()


@pytest.fixture
def g():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "k", "n", "leaf"), [(1, 16, 7, 1), (37, 100, 131, 1), (130, 1200, 70, 4), (65, 33, 33, 1)]
)
def test_linear(dtype, m, k, n, leaf, g):
    x, x64 = leaves((m, k), dtype, g)
    w = make_weight((n, k), dtype, g)
    w64 = reference_of(w)
    y = linear.linear_exact(x, w, leaf)
    check([y], [linear.linear_reference(x64, w64)], [(x, x64)], [(w, w64)], dtype, g)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n"), [(1, 5), (70, 48), (130, 97), (3, 1024)])
def test_norms(dtype, rows, n, g):
    h, h64 = leaves((rows, n), dtype, g)
    w = make_weight((n,), dtype, g, packed=False)
    w64 = reference_of(w)
    check(
        [norm.rms_norm_exact(h, w, 1e-6)], [norm.rms_norm_reference(h64, w64, 1e-6)], [(h, h64)], [(w, w64)], dtype, g
    )
    h, h64 = leaves((rows, n), dtype, g)
    x, x64 = leaves((rows, n), dtype, g)
    w.master.grad = None
    w64 = reference_of(w)
    total, y = norm.add_rms_norm_exact(h, x, w, 1e-6)
    ref = h64 + x64
    outs, refs = [total, y], [ref, norm.rms_norm_reference(ref, w64, 1e-6)]
    check(outs, refs, [(h, h64), (x, x64)], [(w, w64)], dtype, g)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [HeadShape(4, 2, 32), HeadShape(3, 1, 24), HeadShape(5, 5, 6)])
def test_qkv(dtype, shape, g):
    t = 70
    x, x64 = leaves((t, (shape.heads + 2 * shape.kv_heads) * shape.dim), dtype, g)
    wq, wk = (make_weight((shape.dim,), dtype, g, packed=False) for _ in range(2))
    q64, k64 = reference_of(wq), reference_of(wk)
    rope = RopeTable.build(1e4, shape.dim, 100)
    positions = torch.randint(0, 100, (t,), generator=g)
    outs = qkv.qkv_exact(x, wq, wk, rope, positions, shape, 1e-6)
    cos, sin = rope.cos[positions].double(), rope.sin[positions].double()
    refs = qkv.qkv_reference(x64, q64, k64, cos, sin, shape, 1e-6)
    check(outs, refs, [(x, x64)], [(wq, q64), (wk, k64)], dtype, g)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype, g):
    x, x64 = leaves((70, 2 * 37), dtype, g)
    check([swiglu.swiglu_exact(x)], [swiglu.swiglu_reference(x64)], [(x, x64)], [], dtype, g)
    big = torch.tensor([[-200.0, -89.0, 0.0, 89.0, 200.0, 1.0, 1.0, 1.0, 1.0, 1.0]], dtype=dtype)
    assert torch.isfinite(swiglu.swiglu_exact(big)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [HeadShape(4, 2, 32), HeadShape(3, 1, 24), HeadShape(5, 5, 8), HeadShape(12, 1, 64), HeadShape(2, 2, 128)]
)
def test_attention(dtype, shape, g):
    lengths = [1, 17, 64, 65, 130, 7, 600]
    t = sum(lengths)
    parts = [leaves((t, n, shape.dim), dtype, g) for n in (shape.heads, shape.kv_heads, shape.kv_heads)]
    (q, q64), (k, k64), (v, v64) = parts
    out = attention.packed_attention(q, k, v, packed_rows(lengths, shape), CONTRACT)
    pieces = zip(*(x.split(lengths) for x in (q64, k64, v64)), strict=True)
    ref = torch.cat([attention.attention_reference(*p) for p in pieces])
    check([out], [ref], parts, [], dtype, g)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [5, 97, 128, 300])
def test_logprobs(dtype, vocab, g, monkeypatch):
    for chunk in (1 << 30, 4 * vocab * 7):  # logits kept, and logits made again chunk by chunk
        monkeypatch.setattr(head, "CHUNK_BYTES", chunk)
        x, x64 = leaves((30, 24), dtype, g)
        w = make_weight((vocab, 24), dtype, g)
        w64 = reference_of(w)
        targets = torch.randint(0, vocab, (30,), generator=g)
        temperatures = torch.rand(30, generator=g) + 0.5
        outs = head.logprobs_exact(x, w, targets, temperatures, CONTRACT)
        refs = head.logprobs_reference(x64, w64, targets, temperatures.double())
        check(outs, refs, [(x, x64)], [(w, w64)], dtype, g)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(dtype, g):
    w = make_weight((11, 24), dtype, g)
    w64 = reference_of(w)
    ids = torch.randint(0, 11, (40,), generator=g)
    check([embedding.embedding_exact(ids, w, dtype)], [w64[ids]], [], [(w, w64)], dtype, g)
