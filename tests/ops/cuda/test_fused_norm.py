"""RMSNorm, add + RMSNorm and the trees in Triton's interpreter, against their definition bit for bit."""

from __future__ import annotations

from tests.ops.cuda import interpreter  # isort: skip  # noqa: F401 - sets up Triton before it is imported

import pytest
import torch

from exactrl.ops.cuda import norm, triton_norm
from exactrl.ops.cuda.triton_rows import LONGEST_ROW, column_sums
from exactrl.parity.compare import differing
from tests.ops.cuda import fused_definition as definition

EPS = 1e-6
SHAPES = [(1, 64), (257, 64), (3, 100), (2, 1000), (3, 2560), (2, 4096), (1, 5120)]
DTYPES = [(torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float32, torch.float16)]
"""(residual, weight); float16 stands for bfloat16, which the interpreter does not round."""


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    return not differing(a, b).any()


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 300, 512, 513, 4096, 4097])
def test_columns_are_added_by_the_tree(rows: int) -> None:
    parts = normal(rows, 70, seed=1)
    assert same(column_sums(parts), definition.column_sums(parts))


def test_no_partial_sums_are_zero() -> None:
    assert same(column_sums(torch.empty(0, 5)), torch.zeros(5))


@pytest.mark.parametrize("n", [7, 1024, 1025, 4096])
def test_the_trees_are_not_another_order(n: int) -> None:
    """Otherwise the tests of their bits would prove nothing."""
    v = normal(200, n, seed=2)
    halves = v
    halves = torch.nn.functional.pad(halves, (0, (1 << (n - 1).bit_length()) - n))
    while halves.shape[-1] > 1:
        halves = halves[:, : halves.shape[-1] // 2] + halves[:, halves.shape[-1] // 2 :]
    assert differing(definition.row_tree(v), halves[:, 0]).any()
    assert differing(definition.row_tree(v), v.cumsum(-1)[:, -1]).any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_bits_of_the_definition(shape: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    h, x = normal(*shape, seed=3, dtype=dtypes[0], scale=3), normal(*shape, seed=4, dtype=dtypes[1])
    w = normal(shape[1], seed=5, dtype=dtypes[1])
    assert same(norm.rms_norm(h, w, EPS), definition.rms_norm(h, w, EPS))
    found, expected = norm.add_rms_norm(h, x, w, EPS), definition.add_rms_norm(h, x, w, EPS)
    assert same(found[0], expected[0])
    assert same(found[1], expected[1])


def test_the_norm_reads_the_rounded_residual() -> None:
    h, x = normal(20, 256, seed=6, dtype=torch.float16, scale=30), normal(20, 256, seed=7, dtype=torch.float16)
    w = normal(256, seed=8, dtype=torch.float32)
    y = norm.add_rms_norm(h, x, w, EPS)[1]
    assert same(y, norm.rms_norm(h + x, w, EPS))
    assert differing(y, norm.rms_norm(h.float() + x.float(), w, EPS)).any()


def test_a_row_does_not_see_its_neighbours() -> None:
    h, x, w = normal(9, 2560, seed=9), normal(9, 2560, seed=10), normal(2560, seed=11)
    together = norm.add_rms_norm(h, x, w, EPS)
    for row in range(9):
        alone = norm.add_rms_norm(h[row : row + 1], x[row : row + 1], w, EPS)
        assert all(same(a[0], b[row]) for a, b in zip(alone, together, strict=True))
    h[::2] = float("nan")
    poisoned = norm.add_rms_norm(h, x, w, EPS)
    assert all(same(a[1::2], b[1::2]) for a, b in zip(poisoned, together, strict=True))


def test_rows_of_a_wider_tensor() -> None:
    h, x, w = normal(5, 300, seed=12)[:, 60:160], normal(5, 200, seed=13)[:, :100], normal(100, seed=14)
    found, expected = norm.add_rms_norm(h, x, w, EPS), definition.add_rms_norm(h, x, w, EPS)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.raises(AssertionError, match="rows have gaps"):
        norm.rms_norm(normal(100, 5, seed=1).T, w, EPS)
    assert norm.rms_norm(h[:0], w, EPS).shape == (0, 100)


def test_a_row_that_no_program_holds_is_refused() -> None:
    n = LONGEST_ROW + 1
    with pytest.raises(AssertionError, match=f"rows of {n}"):
        norm.rms_norm(torch.empty(1, n), torch.empty(n), EPS)


@pytest.mark.parametrize("with_extra", [False, True])
@pytest.mark.parametrize(("rows", "n"), [(1, 64), (32, 100), (33, 2560), (257, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_backward_has_the_bits_of_its_definition(rows: int, n: int, dtype: torch.dtype, with_extra: bool) -> None:
    h, w, dy = (normal(*s, seed=i, dtype=dtype) for i, s in enumerate([(rows, n), (n,), (rows, n)]))
    extra = normal(rows, n, seed=3, dtype=dtype) if with_extra else None
    dh, dx, parts = triton_norm.backward(h, w, dy, extra, EPS, torch.float32, True)
    expected_dh, expected_dw = definition.norm_backward(h, w, dy, extra, EPS)
    assert same(dh, expected_dh)
    assert same(dx, expected_dh.float())
    assert parts is not None
    assert same(column_sums(parts), expected_dw)


@pytest.mark.parametrize(("rows", "n"), [(1, 64), (40, 1000)])
def test_gradients_are_those_of_fp64(rows: int, n: int) -> None:
    h, x, dh, dy = (normal(rows, n, seed=i) for i in range(4))
    w = normal(n, seed=5)
    leaves = [h.clone().requires_grad_(), x.clone().requires_grad_(), w.clone().requires_grad_()]
    torch.autograd.backward(norm.add_rms_norm(leaves[0], leaves[1], w, EPS, master=leaves[2]), [dh, dy])
    wide = [t.detach().double().requires_grad_() for t in leaves]
    total = wide[0] + wide[1]
    torch.autograd.backward([total, norm.rms_norm_reference(total, wide[2], EPS)], [dh.double(), dy.double()])
    for found, right in zip(leaves, wide, strict=True):
        assert found.grad is not None
        assert right.grad is not None
        assert found.grad.dtype == torch.float32
        assert (found.grad - right.grad).norm() / right.grad.norm() < 1e-6


def test_expanded_gradients_and_a_weight_that_is_not_trained() -> None:
    h, w = normal(4, 64, seed=1).requires_grad_(), normal(64, seed=2)
    norm.rms_norm(h, w, EPS).sum().backward()  # dy has strides of 0
    wide = h.detach().double().requires_grad_()
    norm.rms_norm_reference(wide, w.double(), EPS).sum().backward()
    assert h.grad is not None
    assert wide.grad is not None
    assert (h.grad - wide.grad).norm() / wide.grad.norm() < 1e-6
    master = w.clone().requires_grad_()
    with torch.no_grad():
        assert not norm.rms_norm(h, w, EPS, master=master).requires_grad
    norm.rms_norm(h.detach(), w, EPS, master=master).sum().backward()
    assert master.grad is not None
