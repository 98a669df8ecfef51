"""The fused ops on a GPU in bfloat16: bits against the definition on the CPU, warps, neighbours, gradients."""

from __future__ import annotations

import pytest
import torch

from exactrl.ops.qkv import HeadShape, RopeTable
from exactrl.parity.compare import differing
from tests.ops.cuda import fused_definition as definition

if not torch.cuda.is_available():  # before kernels are imported, which tests/ops/cuda wants to run interpreted
    pytest.skip("needs an H100 or H200", allow_module_level=True)
pytest.importorskip("triton")
from exactrl.ops.cuda import embedding, norm, qkv, swiglu, triton_norm, triton_qkv
from exactrl.ops.cuda.triton_rows import column_sums

EPS = 1e-6
BF16 = torch.bfloat16
HIDDEN = (64, 1024, 2560, 4096, 5120)
ROWS = (1, 2, 33, 257)
SHAPES = [HeadShape(16, 8, 128), HeadShape(32, 8, 128), HeadShape(14, 2, 64), HeadShape(5, 3, 256)]


def normal(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> torch.Tensor:
    """On the CPU."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    return not differing(a.cpu(), b.cpu()).any()


def cuda(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(t.cuda() for t in tensors)


@pytest.mark.parametrize("rows", [1, 2, 17, 63, 64, 65, 511, 512, 513, 4096, 8192])
@pytest.mark.parametrize("columns", [128, 2560, 70])
def test_columns_are_added_by_the_tree(rows: int, columns: int) -> None:
    """Sums of -0, too: they show which zeros have been added."""
    parts = normal(rows, columns, seed=1, dtype=torch.float32)
    parts[:, ::3] = -0.0
    assert same(column_sums(parts.cuda()), definition.column_sums(parts))


@pytest.mark.parametrize("n", HIDDEN)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("residual", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32], ids=str)
def test_norms_have_the_bits_of_the_definition(n: int, rows: int, residual: torch.dtype, compute: torch.dtype) -> None:
    h, x, w = normal(rows, n, seed=1, scale=9, dtype=residual), normal(rows, n, seed=2), normal(n, seed=3)
    w = w.to(compute)
    found, expected = norm.add_rms_norm(*cuda(h, x, w), EPS), definition.add_rms_norm(h, x, w, EPS)
    assert same(found[0], expected[0])
    assert same(found[1], expected[1])
    assert same(norm.rms_norm(*cuda(h, w), EPS), definition.rms_norm(h, w, EPS))


@pytest.mark.parametrize("scale", [1e-39, 1e-30, 1e-18, 1e17])
def test_norms_of_extreme_rows(scale: float) -> None:
    """1e-39: denormal in bfloat16, whose addition is an instruction of its own."""
    h, x, w = normal(40, 1024, seed=1, scale=scale), normal(40, 1024, seed=2, scale=scale), normal(1024, seed=3)
    h[::3, ::7] = 0
    assert same(norm.rms_norm(*cuda(h, w), EPS), definition.rms_norm(h, w, EPS))
    found, expected = norm.add_rms_norm(*cuda(h, x, w), EPS), definition.add_rms_norm(h, x, w, EPS)
    assert same(found[0], expected[0])
    assert same(found[1], expected[1])


@pytest.mark.parametrize("warps", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("n", HIDDEN)
def test_warps_decide_no_bit_of_a_norm(n: int, warps: int, monkeypatch) -> None:
    h, x, w = cuda(normal(50, n, seed=1, scale=3), normal(50, n, seed=2), normal(n, seed=3))
    expected = norm.add_rms_norm(h, x, w, EPS)
    monkeypatch.setattr(triton_norm, "warps_for", lambda elements: warps)
    assert all(same(a, b) for a, b in zip(norm.add_rms_norm(h, x, w, EPS), expected, strict=True))


@pytest.mark.parametrize("n", [1000, 1024, 2560])
def test_many_rows_have_the_bits_of_one(n: int) -> None:
    """Other kernels take them."""
    h, w = cuda(normal(5000, n, seed=1, scale=3), normal(n, seed=3))
    y = norm.rms_norm(h, w, EPS)
    for row in (0, 1, 791, 792, 4999):
        assert same(norm.rms_norm(h[row : row + 1], w, EPS), y[row : row + 1])


@pytest.mark.parametrize(
    ("n", "chunks"),
    [
        (1024, (512, 1, 3, 2)),
        (600, (512, 2, 2, 4)),
        (2560, (1024, 1, 2, 8)),
        (5120, (512, 1, 1, 8)),
        (64, (64, 1, 1, 1)),
    ],
)
def test_chunks_decide_no_bit_of_the_norm_s_gradient(n: int, chunks, monkeypatch) -> None:
    h, w, dy, extra = (normal(*s, seed=i, scale=3) for i, s in enumerate([(75, n), (n,), (75, n), (75, n)]))
    h[7], dy[9, ::2], dy[70] = 0, -0.0, 0
    expected = definition.norm_backward(h, w, dy, extra, EPS)
    for chosen in (None, chunks):
        if chosen:
            monkeypatch.setattr(triton_norm, "_chunks", lambda padded, chosen=chosen: chosen)
        dh, _, parts = triton_norm.backward(*cuda(h, w, dy, extra), EPS, BF16, True)
        assert same(dh, expected[0])
        assert parts is not None
        assert same(column_sums(parts), expected[1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", ROWS)
def test_qkv_has_the_bits_of_the_definition_in_and_out_of_the_cache(tokens: int, shape: HeadShape, monkeypatch) -> None:
    x = normal(tokens, (shape.heads + 2 * shape.kv_heads) * shape.dim, seed=1, scale=3)
    wq, wk = normal(shape.dim, seed=2), normal(shape.dim, seed=3)
    positions = torch.randint(0, 40000, (tokens,), generator=torch.Generator().manual_seed(4))
    rope = RopeTable.build(1e6, shape.dim, 40000)
    expected = definition.qkv(x, wq, wk, rope, positions, shape, EPS)
    moved = (*cuda(x, wq, wk), RopeTable(*cuda(rope.cos, rope.sin)), positions.cuda(), shape, EPS)
    assert all(same(a, b) for a, b in zip(qkv.qkv(*moved), expected, strict=True))
    caches = [torch.full((20, 16, shape.kv_heads, shape.dim), float("nan"), dtype=BF16, device="cuda") for _ in "kv"]
    slots = torch.randperm(320, generator=torch.Generator().manual_seed(5))[:tokens]
    slots[-1] = -1
    for heads in (1, 4, 16):
        for warps in (1, 4):
            monkeypatch.setattr(triton_qkv, "_heads", lambda shape, heads=heads: heads)
            monkeypatch.setattr(triton_qkv, "warps_for", lambda elements, warps=warps: warps)
            assert same(qkv.qkv_into_cache(*moved, *caches, slots.cuda()), expected[0])
            for cache, rows in zip(caches, expected[1:], strict=True):
                flat = cache.flatten(0, 1).cpu()
                assert same(flat[slots[:-1]], rows[:-1])
                assert flat.isnan().all((1, 2)).sum() == 320 - (tokens - 1)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]], ids=str)
def test_many_tokens_have_the_bits_of_one(shape: HeadShape) -> None:
    """Programs take several."""
    tokens = 1027
    x = normal(tokens, (shape.heads + 2 * shape.kv_heads) * shape.dim, seed=1, scale=3).cuda()
    wq, wk = cuda(normal(shape.dim, seed=2), normal(shape.dim, seed=3))
    rope = RopeTable(*cuda(*(getattr(RopeTable.build(1e6, shape.dim, tokens), name) for name in ("cos", "sin"))))
    positions = torch.arange(tokens).cuda()
    together = qkv.qkv(x, wq, wk, rope, positions, shape, EPS)
    caches = [torch.full((33, 32, shape.kv_heads, shape.dim), float("nan"), dtype=BF16, device="cuda") for _ in "kv"]
    slots = torch.randperm(33 * 32).cuda()[:tokens]
    slots[5::100] = -1
    assert same(qkv.qkv_into_cache(x, wq, wk, rope, positions, shape, EPS, *caches, slots), together[0])
    for cache, rows in zip(caches, together[1:], strict=True):
        assert same(cache.flatten(0, 1)[slots[slots >= 0]], rows[slots >= 0])
        assert int(cache.flatten(0, 1).isnan().all(2).all(1).sum()) == 33 * 32 - int((slots >= 0).sum())
    for token in (0, 1, 3, 1023, 1024, 1026):
        cut = slice(token, token + 1)
        alone = qkv.qkv(x[cut], wq, wk, rope, positions[cut], shape, EPS)
        assert all(same(a, b[cut]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("width", [64, 3072, 9728])
def test_swiglu_is_correct_and_row_by_row(width: int) -> None:
    x = normal(257, 2 * width, seed=1, scale=6).cuda()
    y, right = swiglu.swiglu(x), swiglu.swiglu_reference(x.double())
    assert (y - right).norm() / right.norm() < 4e-3
    many = swiglu.swiglu(x.repeat(16, 1))  # with other programs
    for row in (0, 1, 100, 256):
        assert same(swiglu.swiglu(x[row : row + 1]), y[row : row + 1])
        assert same(many[row + 257 * 15 : row + 257 * 15 + 1], y[row : row + 1])
    wide = swiglu.swiglu(x.float())
    assert (wide - right).norm() / right.norm() < 2e-6
    assert same(wide.to(BF16), y)


def gradients(tokens: int, seed: int = 1) -> list[torch.Tensor]:
    """Of one chain: embedding, add + norm, qkv and SwiGLU of its values."""
    shape, n = HeadShape(8, 4, 64), 1024
    assert (shape.heads + 2 * shape.kv_heads) * shape.dim == n
    ids = torch.randint(0, 100, (tokens,), generator=torch.Generator().manual_seed(seed)).cuda()
    positions = torch.arange(tokens).cuda()
    rope = RopeTable(*cuda(*(getattr(RopeTable.build(1e6, 64, tokens), name) for name in ("cos", "sin"))))
    weights = cuda(normal(100, n, seed=1), normal(n, seed=2), normal(64, seed=3), normal(64, seed=4))
    masters = [w.float().requires_grad_() for w in weights]
    h = embedding.embedding(ids, weights[0], BF16, master=masters[0])
    h, y = norm.add_rms_norm(h, normal(tokens, n, seed=5).cuda(), weights[1], EPS, master=masters[1])
    q, k, v = qkv.qkv(y, weights[2], weights[3], rope, positions, shape, EPS, master_q=masters[2], master_k=masters[3])
    outputs = [swiglu.swiglu(torch.cat([q, k, v], 1).flatten(1)), h]
    torch.autograd.backward(outputs, list(cuda(normal(tokens, n // 2, seed=6), normal(tokens, n, seed=7))))
    found = [m.grad for m in masters if m.grad is not None]
    assert len(found) == 4
    return found


@pytest.mark.parametrize("tokens", [1, 1000, 5000])
def test_gradients_are_deterministic(tokens: int) -> None:
    first = gradients(tokens)
    for _ in range(5):
        assert all(same(a, b) for a, b in zip(gradients(tokens), first, strict=True))


@pytest.mark.parametrize("rows", [33, 1000])
def test_the_norm_backward_has_the_bits_of_its_definition(rows: int) -> None:
    h, w, dy, extra = (
        normal(rows, 2560, seed=1),
        normal(2560, seed=2),
        normal(rows, 2560, seed=3),
        normal(rows, 2560, seed=4),
    )
    dh, _, parts = triton_norm.backward(*cuda(h, w, dy, extra), EPS, BF16, True)
    expected_dh, expected_dw = definition.norm_backward(h, w, dy, extra, EPS)
    assert same(dh, expected_dh)
    assert parts is not None
    assert same(column_sums(parts), expected_dw)


def test_qkv_gradients_are_those_of_fp64() -> None:
    shape, tokens = HeadShape(8, 4, 128), 300
    x, wq, wk = normal(tokens, 16 * 128, seed=1).cuda(), normal(128, seed=2).cuda(), normal(128, seed=3).cuda()
    rope, positions = RopeTable.build(1e6, 128, 1000), torch.arange(tokens)
    leaves = [x.float().requires_grad_(), wq.float().requires_grad_(), wk.float().requires_grad_()]
    moved = RopeTable(*cuda(rope.cos, rope.sin))
    found = qkv.qkv(
        leaves[0], wq.float(), wk.float(), moved, positions.cuda(), shape, EPS, master_q=leaves[1], master_k=leaves[2]
    )
    wide = [t.double().requires_grad_() for t in (x, wq, wk)]
    cos, sin = (t[positions].double().cuda() for t in (rope.cos, rope.sin))
    right = qkv.qkv_reference(*wide, cos, sin, shape, EPS)
    dy = [normal(*t.shape, seed=9, dtype=torch.float32).cuda() for t in found]
    torch.autograd.backward(found, dy)
    torch.autograd.backward(right, [t.double() for t in dy])
    for leaf, exact in zip(leaves, wide, strict=True):
        assert leaf.grad is not None
        assert exact.grad is not None
        assert (leaf.grad - exact.grad).norm() / exact.grad.norm() < 2e-6
