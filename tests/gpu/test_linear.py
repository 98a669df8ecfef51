"""The GPU linears: bits against the reference and against another machine, correctness against fp64, refusals."""

from __future__ import annotations

import json

import pytest
import torch

from exactrl.contract import LinearShape, read_certificate
from exactrl.errors import CertificationError
from exactrl.ops.cuda.linear import certified_product, linear
from exactrl.parity.adversarial import KINDS, linear_inputs
from exactrl.parity.certify import spoil
from exactrl.parity.compare import differing
from tests.gpu.digests import COMMITTED, digests

SHAPES = [
    LinearShape(1024, 3072),
    LinearShape(2560, 4096),
    LinearShape(4096, 1024),
    LinearShape(5000, 1024, "float32"),
    *(LinearShape(1024, 3072, leaves=n) for n in (2, 4, 8)),
]
MS = (1, 2, 15, 16, 17, 64, 100, 256, 300, 1025)


def available():
    from exactrl.ops.cuda.matmul import implementations

    return implementations()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel_of_ours_has_the_bits_of_the_reference(shape: LinearShape, kind: str) -> None:
    found, dtype = available(), getattr(torch, shape.out_dtype)
    x, w = linear_inputs(shape, MS[-1], kind, "cuda")
    expected = found["reference"].product(x, w, dtype, shape.leaves)
    for m in MS:
        for name, implementation in found.items():
            if name != "cublas" and implementation.serves(shape, m):
                spoil(expected[:m])
                y = implementation.product(x[:m], w, dtype, shape.leaves)
                assert not differing(y, expected[:m]).any(), (name, m)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_is_correct(shape: LinearShape) -> None:
    x, w = linear_inputs(shape, 300, "random", "cuda")
    y = available()["reference"].product(x, w, getattr(torch, shape.out_dtype), shape.leaves).double()
    right = x.double() @ w.double().T
    error = (y - right).norm() / right.norm()
    assert error < (1e-5 if shape.out_dtype == "float32" else 4e-3)


@pytest.mark.parametrize("leaves", [2, 4, 8])
def test_leaves_are_a_balanced_tree_of_separate_products(leaves: int) -> None:
    shape = LinearShape(1024, 3072, "float32")
    reference = available()["reference"].product
    x, w = linear_inputs(shape, 70, "random", "cuda")
    length = shape.k // leaves
    parts = [
        reference(x[:, i : i + length].contiguous(), w[:, i : i + length].contiguous(), torch.float32, 1)
        for i in range(0, shape.k, length)
    ]
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    y = reference(x, w, torch.float32, leaves)
    assert not differing(y, parts[0]).any()
    assert differing(y, reference(x, w, torch.float32, 1)).any(), "leaves changed no bit: the test would prove nothing"


def test_the_same_bits_as_on_the_machine_that_wrote_the_digests() -> None:
    committed, found = json.loads(COMMITTED.read_text()), digests()
    assert found.keys() == committed.keys()
    assert {key for key in found if found[key] != committed[key]} == set()


def split_k(x, w, dtype, leaves):
    """cuBLAS with split-K put in by hand: two halves of K, added afterwards."""
    half = x.shape[1] // 2
    first = torch.mm(x[:, :half], w[:, :half].T, out_dtype=torch.float32)
    return torch.addmm(first, x[:, half:], w[:, half:].T, out_dtype=torch.float32).to(dtype)


def test_results_that_nobody_wrote_are_refused_though_their_memory_held_the_right_ones() -> None:
    from exactrl.ops.cuda.matmul import Implementation
    from exactrl.parity.certify import Rows, certify_linear
    from exactrl.parity.gpu_timing import linear_times

    def unwritten(x, w, dtype, leaves):
        return torch.empty(x.shape[0], w.shape[0], dtype=dtype, device=x.device)

    serves = lambda shape, m: True  # noqa: E731
    reference = available()["reference"]
    again = Implementation("again", reference.product, serves)  # two right results, so that the third memory has one
    offered = {"reference": reference, "again": again, "unwritten": Implementation("unwritten", unwritten, serves)}
    result = certify_linear(LinearShape(1024, 512), offered, Rows(every=64, most=64), linear_times)
    (refusal,) = result.refused
    assert refusal.implementation == "unwritten"
    assert refusal.failing_rows == 64


def test_split_k_put_in_by_hand_is_refused_with_its_first_difference(tmp_path, monkeypatch) -> None:
    from exactrl.ops.cuda.machine import machine
    from exactrl.ops.cuda.matmul import Implementation
    from exactrl.parity.certificate import write_certificate
    from exactrl.parity.certify import SPARE, Rows, certify_linear
    from exactrl.parity.gpu_timing import linear_times

    monkeypatch.setenv("EXACTRL_CACHE_DIR", str(tmp_path))
    shape, rows, found = LinearShape(2560, 4096), Rows(every=32, most=64), available()
    offered = {"reference": found["reference"], "split-k": Implementation("split-k", split_k, lambda shape, m: True)}
    result = certify_linear(shape, offered, rows, linear_times)
    (refusal,) = result.refused
    assert (refusal.implementation, refusal.m) == ("split-k", 1)
    assert {choice.implementation for choice in result.choices} == {"reference"}
    x, w = linear_inputs(shape, rows.every + SPARE, refusal.data, "cuda")
    at, expected = refusal.element, found["reference"].product(x, w, torch.bfloat16, 1)
    assert differing(split_k(x[:1], w, torch.bfloat16, 1), expected[:1])[at]
    assert refusal.failing_rows == len(rows.checked())

    write_certificate(machine(), [result])
    product = certified_product(read_certificate(machine()), found)
    assert not differing(product(x[:9], w, torch.bfloat16, 1), expected[:9]).any()
    with pytest.raises(CertificationError, match="exactrl certify MODEL"):
        product(x[:9], w, torch.float32, 1)
    with pytest.raises(CertificationError, match=r"out of date: libcublas \w+ -> changed"):
        read_certificate({**machine(), "libcublas": "changed"})


def test_gradients_are_deterministic_and_correct() -> None:
    shape = LinearShape(2560, 4096)
    x, w = linear_inputs(shape, 1000, "random", "cuda")
    dy = torch.randn(1000, shape.n, generator=torch.Generator("cuda").manual_seed(1), device="cuda").bfloat16()
    master = w.float().requires_grad_()
    runs = []
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        master.grad = None
        linear(leaf, w, available()["reference"].product, master=master).backward(dy)
        runs.append((leaf.grad, master.grad))
    for dx, dw in runs[1:]:
        assert not differing(dx, runs[0][0]).any()
        assert not differing(dw, runs[0][1]).any()
    dx, dw = (t.double() for t in runs[0])
    right_dx, right_dw = dy.double() @ w.double(), dy.double().T @ x.double()
    assert (dx - right_dx).norm() / right_dx.norm() < 4e-3
    assert (dw - right_dw).norm() / right_dw.norm() < 1e-5
    assert dw.dtype == torch.float64
    assert master.grad.dtype == torch.float32


def test_accumulating_a_weight_gradient_adds_in_fp32() -> None:
    from exactrl.ops.cuda.linear import grad_weight

    shape = LinearShape(512, 1024)
    x, _ = linear_inputs(shape, 200, "random", "cuda")
    dy = torch.randn(200, 512, generator=torch.Generator("cuda").manual_seed(1), device="cuda").bfloat16()
    before = torch.randn(512, 1024, generator=torch.Generator("cuda").manual_seed(2), device="cuda")
    into = before.clone()
    assert grad_weight(dy, x, into) is into
    right = before.double() + dy.double().T @ x.double()
    assert (into.double() - right).norm() / right.norm() < 1e-6
