"""QK-norm, RoPE and the write of keys and values in Triton's interpreter, against their definition bit for bit."""

from __future__ import annotations

from tests.ops.cuda import interpreter  # isort: skip  # noqa: F401 - sets up Triton before it is imported

import pytest
import torch

from exactrl.ops.cuda import qkv as op
from exactrl.ops.cuda import triton_qkv
from exactrl.ops.cuda.triton_rows import column_sums
from exactrl.ops.qkv import HeadShape, RopeTable
from exactrl.parity.compare import differing
from tests.ops.cuda import fused_definition as definition

EPS = 1e-6
SHAPES = [HeadShape(1, 1, 64), HeadShape(14, 2, 64), HeadShape(5, 3, 128), HeadShape(16, 8, 128), HeadShape(32, 16, 16)]
LENGTH = 600


def drawn(tokens: int, shape: HeadShape, dtype: torch.dtype = torch.float32):
    """(x, wq, wk, rope, positions, shape, eps)"""
    g = torch.Generator().manual_seed(tokens + shape.dim)
    x = torch.randn(tokens, (shape.heads + 2 * shape.kv_heads) * shape.dim, generator=g).to(dtype)
    wq, wk = (torch.randn(shape.dim, generator=g).to(dtype) for _ in range(2))
    positions = torch.randint(0, LENGTH, (tokens,), generator=g)
    return x, wq, wk, RopeTable.build(1e4, shape.dim, LENGTH), positions, shape, EPS


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    return not differing(a, b).any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 7])
def test_bits_of_the_definition(tokens: int, shape: HeadShape, dtype: torch.dtype) -> None:
    arguments = drawn(tokens, shape, dtype)
    assert all(same(a, b) for a, b in zip(op.qkv(*arguments), definition.qkv(*arguments), strict=True))


@pytest.mark.parametrize("heads", [1, 2, 4, 16])
def test_bits_do_not_depend_on_how_heads_are_shared_out(heads: int, monkeypatch) -> None:
    arguments = drawn(3, HeadShape(14, 3, 64))
    expected = op.qkv(*arguments)
    monkeypatch.setattr(triton_qkv, "_heads", lambda shape: heads)
    assert all(same(a, b) for a, b in zip(op.qkv(*arguments), expected, strict=True))


@pytest.mark.parametrize("layout", ["apart", "side by side"])
def test_keys_and_values_go_to_their_slots_and_nowhere_else(layout: str) -> None:
    shape, pages, page_size = HeadShape(5, 3, 64), 9, 4
    x, *rest = drawn(20, shape)
    x = torch.cat([x, x], 1)[:, : x.shape[1]]  # rows with a gap
    if layout == "apart":
        keys, values = (torch.full((pages, page_size, 3, 64), float("nan")) for _ in range(2))
    else:  # key and value of a slot next to each other
        keys, values = torch.full((pages, page_size, 2, 3, 64), float("nan")).unbind(2)
    slots = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(1))[:20]
    slots[3], slots[11] = -1, -1
    q, k, v = op.qkv(x, *rest)
    assert same(op.qkv_into_cache(x, *rest, keys, values, slots), q)
    written = slots >= 0
    for cache, rows in ((keys, k), (values, v)):
        flat = cache.reshape(-1, 3, 64)
        assert same(flat[slots[written]], rows[written])
        untouched = torch.ones(len(flat), dtype=torch.bool)
        untouched[slots[written]] = False
        assert flat[untouched].isnan().all()


def test_a_cache_with_gaps_between_its_pages_is_refused() -> None:
    x, *rest = drawn(2, HeadShape(2, 1, 64))
    pages = torch.zeros(3, 8, 1, 64)
    with pytest.raises(AssertionError, match="pages with gaps"):
        op.qkv_into_cache(x, *rest, pages[:, :4], torch.zeros(3, 4, 1, 64), torch.tensor([0, 1]))


def test_a_token_does_not_see_its_neighbours() -> None:
    x, wq, wk, rope, positions, shape, eps = drawn(9, HeadShape(4, 2, 128))
    together = op.qkv(x, wq, wk, rope, positions, shape, eps)
    for t in range(9):
        alone = op.qkv(x[t : t + 1], wq, wk, rope, positions[t : t + 1], shape, eps)
        assert all(same(a[0], b[t]) for a, b in zip(alone, together, strict=True))
    x[::2] = float("nan")
    poisoned = op.qkv(x, wq, wk, rope, positions, shape, eps)
    assert all(same(a[1::2], b[1::2]) for a, b in zip(poisoned, together, strict=True))


@pytest.mark.parametrize("position", [-1, LENGTH, 2**31])
def test_a_position_outside_the_table_gives_nan(position: int) -> None:
    x, wq, wk, rope, positions, shape, eps = drawn(3, HeadShape(4, 2, 64))
    positions[1] = position
    q, k, v = op.qkv(x, wq, wk, rope, positions, shape, eps)
    assert q[1].isnan().all()
    assert k[1].isnan().all()
    assert all(t[[0, 2]].isfinite().all() for t in (q, k, v))


def test_a_head_whose_tree_is_not_two_halves_is_refused() -> None:
    with pytest.raises(AssertionError, match="power of two, not 96"):
        op.qkv(*drawn(1, HeadShape(1, 1, 96)))


@pytest.mark.parametrize("shape", SHAPES[0:3:2], ids=str)
@pytest.mark.parametrize("tokens", [1, 33])
def test_gradients_are_those_of_fp64(tokens: int, shape: HeadShape) -> None:
    x, wq, wk, rope, positions, _, _ = drawn(tokens, shape)
    g = torch.Generator().manual_seed(9)
    leaves = [t.clone().requires_grad_() for t in (x, wq, wk)]
    found = op.qkv(leaves[0], wq, wk, rope, positions, shape, EPS, master_q=leaves[1], master_k=leaves[2])
    gradients = [torch.randn(t.shape, generator=g) for t in found]
    torch.autograd.backward(found, gradients)
    wide = [t.double().requires_grad_() for t in (x, wq, wk)]
    cos, sin = rope.cos[positions].double(), rope.sin[positions].double()
    right = op.qkv_reference(*wide, cos, sin, shape, EPS)
    torch.autograd.backward(right, [t.double() for t in gradients])
    for a, b in zip(found, right, strict=True):
        assert (a - b).norm() / b.norm() < 1e-6
    for leaf, exact in zip(leaves, wide, strict=True):
        assert leaf.grad is not None
        assert exact.grad is not None
        assert (leaf.grad - exact.grad).norm() / exact.grad.norm() < 1e-6


def test_gradients_have_the_bits_of_the_norm_backward_after_rotating_back() -> None:
    shape, tokens = HeadShape(5, 3, 64), 70
    x, wq, wk, rope, positions, _, _ = drawn(tokens, shape)
    g = torch.Generator().manual_seed(9)
    dq, dk, dv = (torch.randn(tokens, n, 64, generator=g) for n in (5, 3, 3))
    dqkv, parts_q, parts_k = triton_qkv.backward(x, wq, wk, rope, positions, shape, EPS, dq, dk, dv)
    cos, sin = rope.cos[positions], rope.sin[positions]
    heads, found = x.unflatten(-1, (-1, 64)), dqkv.unflatten(-1, (-1, 64))
    for first, count, w, dy, parts in ((0, 5, wq, dq, parts_q), (5, 3, wk, dk, parts_k)):
        back = definition.rotated(dy, cos, -sin)
        sums = torch.empty(3, count, 64)  # three jobs of 32 tokens
        for h in range(count):
            dx, _ = definition.norm_backward(heads[:, first + h], w, back[:, h], None, EPS)
            assert same(found[:, first + h], dx)
            for job in range(3):
                at = slice(32 * job, 32 * job + 32)
                sums[job, h] = definition.norm_backward(heads[at, first + h], w, back[at, h], None, EPS)[1]
        assert same(column_sums(parts), definition.column_sums(sums.flatten(0, 1)))
    assert same(found[:, 8:], dv)
