"""Linears with exactness off: what is offered, what is chosen and when."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from exactrl.contract import Certificate, Choice, LinearShape
from exactrl.ops.cuda.linear import linear_plain
from exactrl.ops.cuda.matmul import Implementation
from exactrl.parity import fastest
from exactrl.parity.fastest import FastestProduct, offered_here

SHAPE = LinearShape(6, 4)
W = torch.ones(6, 4, dtype=torch.bfloat16)


def rows(m: int) -> torch.Tensor:
    return torch.ones(m, 4, dtype=torch.bfloat16)


def named(calls: list[str], name: str, x, w, out_dtype, leaves):
    assert leaves == 1
    calls.append(name)
    return (x.float() @ w.float().T).to(out_dtype)


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def capturing() -> list[bool]:
    return [False]


@pytest.fixture
def product(calls, capturing) -> FastestProduct:
    """`a` is fastest up to 8 rows, `b` beyond; each timing is in `calls`, too."""

    def times(shape, products, m):
        calls.append(f"times {shape.n} x {shape.k} {shape.out_dtype} {m}")
        return {name: 1.0 if (name == "a") == (m <= 8) else 2.0 for name in products}

    offered = {n: partial(named, calls, n) for n in ("a", "b")}
    return FastestProduct(lambda shape, m: offered, times, lambda: capturing[0])


def test_each_number_of_rows_gets_its_fastest_and_is_timed_once(product, calls) -> None:
    for m in (3, 4, 3, 9, 16):
        product(rows(m), W, torch.bfloat16)
    timed = [f"times 6 x 4 bfloat16 {m}" for m in (4, 16)]
    assert calls == [timed[0], "a", "a", "a", timed[1], "b", "b"]
    assert product.chosen == {(SHAPE, 4): "a", (SHAPE, 16): "b"}


def test_result_type_is_a_shape_of_its_own_and_leaves_are_not_kept(product, calls) -> None:
    found = product(rows(3), W, torch.float32, 4)
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.full((3, 6), 4.0))
    product(rows(3), W, torch.bfloat16, 2)
    assert calls == ["times 6 x 4 float32 4", "a", "times 6 x 4 bfloat16 4", "a"]


@pytest.mark.parametrize("m", [0, 16385])
def test_what_no_range_covers_goes_to_the_library(product, calls, m, monkeypatch) -> None:
    monkeypatch.setattr(fastest, "linear_plain", lambda x, w, out_dtype: ("library", len(x)))
    assert product(rows(m), W, torch.bfloat16) == ("library", m)
    assert calls == []


def test_nothing_is_timed_inside_a_capture(product, calls, capturing, monkeypatch) -> None:
    monkeypatch.setattr(fastest, "linear_plain", lambda x, w, out_dtype: "library")
    capturing[0] = True
    assert product(rows(3), W, torch.bfloat16) == "library"
    assert (calls, product.chosen) == ([], {})
    capturing[0] = False
    product(rows(3), W, torch.bfloat16)
    capturing[0] = True
    product(rows(3), W, torch.bfloat16)
    assert calls[1:] == ["a", "a"], "what was timed before runs inside a capture"


def test_without_memory_for_timing_the_library_is_taken() -> None:
    def times(shape, products, m):
        raise torch.OutOfMemoryError("full")

    offered = {"cublas": lambda *a: "library", "a": lambda *a: "a"}
    product = FastestProduct(lambda shape, m: offered, times, lambda: False)  # type: ignore[arg-type, return-value]
    assert product(rows(3), W, torch.bfloat16) == "library"
    assert product.chosen == {(SHAPE, 4): "cublas"}


def implementation(name: str, most: int) -> Implementation:
    return Implementation(name, SimpleNamespace(name=name), lambda shape, m: m <= most)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "m", "certified", "expected"),
    [
        (SHAPE, 4, True, ["cublas", "deepgemm", "deepgemm-padded", "tile:1"]),
        (SHAPE, 16, True, ["cublas", "deepgemm", "reference"]),
        (SHAPE, 64, True, ["cublas", "deepgemm"]),  # more rows than were certified
        (SHAPE, 4, False, ["cublas", "deepgemm", "deepgemm-padded"]),
        (LinearShape(8, 4), 4, True, ["cublas", "deepgemm", "deepgemm-padded"]),
    ],
)
def test_offered_are_the_libraries_and_what_is_certified(shape, m, certified, expected) -> None:
    most = {"deepgemm": 99, "deepgemm-padded": 8, "tile:1": 99, "tile:2": 99, "reference": 99}
    every = {name: implementation(name, n) for name, n in most.items()}
    certificate = Certificate({}, {SHAPE: (Choice(1, 8, "tile:1"), Choice(9, 16, "reference"))})
    found = offered_here(every, certificate if certified else None)(shape, m)
    assert sorted(found) == expected
    assert found.pop("cublas") is linear_plain
    assert all(product is every[name].product for name, product in found.items())


def test_a_certificate_may_name_what_is_no_longer_installed() -> None:
    certificate = Certificate({}, {SHAPE: (Choice(1, 8, "deepgemm"),)})
    assert list(offered_here({}, certificate)(SHAPE, 4)) == ["cublas"]
