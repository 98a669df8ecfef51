"""SwiGLU and the gradient of the embedding in Triton's interpreter."""

from __future__ import annotations

from tests.ops.cuda import interpreter  # isort: skip  # noqa: F401 - sets up Triton before it is imported

import pytest
import torch

from exactrl.ops.cuda.embedding import embedding
from exactrl.ops.cuda.swiglu import swiglu, swiglu_reference
from exactrl.parity.compare import differing
from tests.ops.cuda import fused_definition as definition


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    return not differing(a, b).any()


@pytest.mark.parametrize("shape", [(1, 64), (257, 10), (3, 1024), (2, 3072), (2, 1025)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_swiglu_has_the_bits_of_its_definition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, width = shape
    x = normal(rows, 2 * width, seed=1, dtype=dtype)
    y = swiglu(x)
    assert same(y, definition.swiglu(x))
    right = swiglu_reference(x.double())
    assert (y - right).norm() / right.norm() < (1e-6 if dtype == torch.float32 else 1e-3)


def test_swiglu_of_rows_alone_of_strided_rows_and_of_none() -> None:
    x = normal(6, 1200, seed=2)
    y = swiglu(x)
    assert all(same(swiglu(x[i : i + 1]), y[i : i + 1]) for i in range(6))
    assert same(swiglu(normal(6, 1300, seed=3)[:, 40:240]), definition.swiglu(normal(6, 1300, seed=3)[:, 40:240]))
    assert swiglu(x[:0]).shape == (0, 600)
    with pytest.raises(AssertionError, match="halves of a row, not of 7"):
        swiglu(normal(2, 7, seed=1))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
def test_swiglu_where_the_exponential_leaves_fp32() -> None:
    gate = torch.tensor([-1e30, -200.0, -88.8, -0.0, 0.0, 88.8, 200.0, 1e30])
    x = torch.cat([gate, torch.ones(8)])[None].requires_grad_()
    y = swiglu(x)
    assert y.isfinite().all()
    assert torch.equal(y[0, -3:], gate[-3:])
    assert (y[0, :2] == 0).all()
    y.sum().backward()
    assert x.grad is not None
    slope = x.grad[0, :8]
    assert slope.isfinite().all()
    assert torch.allclose(slope, torch.tensor([0.0, 0, 0, 0.5, 0.5, 1, 1, 1]), atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 64), (9, 1500)], ids=str)
def test_swiglu_gradients_are_those_of_fp64(shape: tuple[int, int]) -> None:
    rows, width = shape
    x, dy = normal(rows, 2 * width, seed=1).requires_grad_(), normal(rows, width, seed=2)
    swiglu(x).backward(dy)
    wide = x.detach().double().requires_grad_()
    swiglu_reference(wide).backward(dy.double())
    assert x.grad is not None
    assert wide.grad is not None
    for half in (slice(0, width), slice(width, None)):
        a, b = x.grad[:, half], wide.grad[:, half]
        assert (a - b).norm() / b.norm() < 1e-6


@pytest.mark.parametrize("tokens", [1, 257])
def test_embedding_rows_of_one_id_are_added_in_token_order(tokens: int) -> None:
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 40, (tokens,), generator=g)
    w, dy = normal(50, 700, seed=1, dtype=torch.float16), normal(tokens, 700, seed=2)
    master = w.float().requires_grad_()
    h = embedding(ids, w, torch.float32, master=master)
    assert same(h.detach(), w.float()[ids])
    h.backward(dy)
    expected = torch.zeros(50, 700)
    for t in range(tokens):
        expected[ids[t]] = expected[ids[t]] + dy[t]
    assert master.grad is not None
    assert same(master.grad, expected)
    assert not embedding(ids, w, torch.float32).requires_grad
