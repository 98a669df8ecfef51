"""The Triton kernels in Triton's interpreter: indexing, masks, leaves and their order, on the CPU at small shapes.

Inputs are float16: the interpreter multiplies bfloat16 as if its bits were integers, and truncates to it. Small
integers make every order of summation exact, so that a wrong index, mask or leaf border shows; the order is then tested
with sums that depend on it.
"""

from __future__ import annotations

from tests.ops.cuda import interpreter  # isort: skip  # noqa: F401 - sets up Triton before it is imported

import pytest
import torch

from exactrl.ops.cuda.tiles import Tile
from exactrl.ops.cuda.triton_matmul import matmul, padded, tree_sum

PLAIN = Tile(16, 16, 32, 4, 2)
TILES = [PLAIN, Tile(16, 32, 16, 4, 2, swap=True), Tile(32, 16, 16, 4, 2, tma="xw"), Tile(16, 16, 16, 4, 2, True, "w")]
SHAPES = [(1, 16, 128), (37, 33, 128)]


def integers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).half()


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize(("leaves", "parts"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 4), (8, 8)])
def test_integers_are_exact(m: int, n: int, k: int, tile: Tile, leaves: int, parts: int) -> None:
    x, w = integers((m, k), 1), integers((n, k), 2)
    expected = x.float() @ w.float().T
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(matmul(x, w, dtype, leaves, tile, parts), expected.to(dtype))


def test_lengths_that_no_block_divides() -> None:
    x, w = integers((5, 72), 1), integers((33, 72), 2)
    for leaves in (1, 2, 4, 8):
        assert torch.equal(matmul(x, w, torch.float32, leaves, PLAIN), x.float() @ w.float().T)


def test_slices_of_a_larger_matrix_are_read_by_their_stride() -> None:
    x, w = integers((5, 128), 1), integers((33, 128), 2)
    for tile in TILES[::2]:
        y = matmul(x[:, 32:96], w[:, 32:96], torch.float32, 1, tile)
        assert torch.equal(y, x[:, 32:96].float() @ w[:, 32:96].float().T)


@pytest.mark.parametrize("m", [1, 7, 8, 9])
def test_padding_repeats_the_last_row(m: int) -> None:
    x = integers((12, 4100), 3)[:m]
    y = padded(x, 8)
    assert len(y) % 8 == 0
    assert len(y) < m + 8
    assert torch.equal(y, torch.cat([x, x[-1:].expand(len(y) - m, -1)]))


def leaf_values(leaves: int) -> list[float]:
    """Sums of these depend on the order: 1 is lost beside 2^24, but 1 + 1 is not."""
    return [2.0**24, 1.0, 1.0, 1.0, -(2.0**24), 1.0, 1.0, 1.0][:leaves]


def balanced(values: list[torch.Tensor]) -> torch.Tensor:
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    return balanced(values[:half]) + balanced(values[half:])


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("leaves", [4, 8])
def test_leaves_are_added_as_a_balanced_tree(tile: Tile, leaves: int) -> None:
    values = [torch.tensor(v) for v in leaf_values(leaves)]
    tree, in_order = balanced(values), torch.tensor(0.0)
    for v in values:
        in_order = in_order + v
    assert tree != in_order, "these values cannot tell the two orders apart"
    x, w = torch.zeros(1, 32 * leaves).half(), torch.zeros(16, 32 * leaves).half()
    for i, v in enumerate(values):  # one product per leaf: v = a * b with both exact in float16
        a = 4096.0 if abs(v) > 1 else 1.0
        x[0, 32 * i], w[:, 32 * i] = a, float(v) / a
    parts = 1
    while parts <= leaves:
        y = matmul(x, w, torch.float32, leaves, tile, parts)
        assert torch.equal(y, tree.expand(1, 16)), (parts, y)
        parts *= 2


@pytest.mark.parametrize("count", [2, 4, 8])
def test_tree_sum_is_balanced(count: int) -> None:
    parts = torch.randn(count, 3, 700, generator=torch.Generator().manual_seed(0)) * 10 ** torch.arange(count).view(
        -1, 1, 1
    )
    assert torch.equal(tree_sum(parts, torch.float32), balanced(list(parts)))


def test_a_leaf_is_accumulated_from_zero_in_ascending_order() -> None:
    """Blocks of K are added to one accumulator in turn: 2^24 + 1 + 1 … loses every 1, backwards it does not."""
    x, w = torch.ones(1, 128).half(), torch.zeros(16, 128).half()
    x[0, 0], w[:, 0] = 4096.0, 4096.0
    w[:, 32::32] = 1.0
    assert torch.equal(matmul(x, w, torch.float32, 1, PLAIN), torch.full((1, 16), 2.0**24))
    assert torch.equal(matmul(x.flip(1), w.flip(1), torch.float32, 1, PLAIN), torch.full((1, 16), 2.0**24 + 4))
