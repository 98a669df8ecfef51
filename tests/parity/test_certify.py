"""Certification on the CPU with implementations made for the purpose: who is refused, where, and what is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict

import pytest
import torch

from exactrl import contract
from exactrl.contract import Certificate, Choice, LinearShape, read_certificate
from exactrl.errors import CertificationError
from exactrl.ops.cuda.linear import certified_product, linear, linear_reference
from exactrl.ops.cuda.matmul import Implementation, Product
from exactrl.parity.adversarial import KINDS, linear_inputs
from exactrl.parity.certificate import linear_shapes, shapes_certified_before, write_certificate
from exactrl.parity.certify import SPARE, LinearResult, Rows, certify_linear

SHAPE = LinearShape(n=12, k=32)
ROWS = Rows(every=24, most=200)
MACHINE = {"device": "Test GPU", "driver": "1", "libcublas": "aaaa"}


def row_by_row(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype, leaves: int) -> torch.Tensor:
    """A product whose rows cannot depend on one another."""
    return torch.stack([(w.double() * row.double()).sum(1) for row in x]).to(dtype)


def at_rows(bad: Callable[[int], bool], change: Callable[[torch.Tensor], torch.Tensor]) -> Product:
    def product(x, w, dtype, leaves):
        y = row_by_row(x, w, dtype, leaves)
        return change(y) if bad(len(x)) else y

    return product


def one_ulp(y: torch.Tensor) -> torch.Tensor:
    """Element (0, 5) of bf16 y, one unit in the last place up."""
    y = y.clone()
    y.view(torch.int16)[0, 5] += 1
    return y


def certify(most: int | None = None, **others: Product) -> LinearResult:
    """`others` beside the reference, each faster than it."""
    products = {"reference": row_by_row, **others}
    offered = {
        name: Implementation(name, product, lambda shape, m, name=name: name == "reference" or m <= (most or 1 << 30))
        for name, product in products.items()
    }

    def times(shape: LinearShape, candidates: Mapping[str, Product], m: int) -> dict[str, float]:
        return {name: 1.0 if name == "reference" else 0.5 for name in candidates}

    return certify_linear(SHAPE, offered, ROWS, times, device="cpu")


def chosen(result: LinearResult) -> dict[int, str]:
    return {m: c.implementation for c in result.choices for m in range(c.m_min, c.m_max + 1)}


def test_rows_are_every_one_then_a_sample() -> None:
    rows = Rows()
    assert rows.checked()[:256] == list(range(1, 257))
    assert {512, 1024, 16384, 511, 513, 577, 16383} <= set(rows.checked())
    assert max(rows.checked()) == 16384
    assert rows.ends()[-1] == 16384
    assert 256 in rows.ends()
    assert rows.ends() == sorted(set(rows.ends()))
    assert Rows(every=8, most=8).checked() == list(range(1, 9))
    assert Rows(most=512).ends() == [1, 2, 4, *range(8, 257, 8), 512]
    assert Rows(most=512, step=64).ends() == [1, 2, 4, 8, 64, 128, 192, 256, 512]


def test_an_exact_implementation_is_chosen_and_all_ranges_are_covered() -> None:
    result = certify(fast=row_by_row)
    assert chosen(result) == dict.fromkeys(range(1, 201), "fast")
    assert result.refused == []
    assert result.compared_elements == 2 * len(KINDS) * SHAPE.n * (sum(ROWS.checked()) + 5 * sum(range(1, 6)))


def test_one_ulp_at_one_number_of_rows_is_refused_there_and_named() -> None:
    result = certify(fast=at_rows(lambda m: m == 11, one_ulp))
    (refusal,) = result.refused
    assert (refusal.implementation, refusal.m, refusal.element, refusal.mismatched) == ("fast", 11, (0, 5), 1)
    x, w = linear_inputs(SHAPE, ROWS.every + SPARE, refusal.data, "cpu")
    right = row_by_row(x, w, torch.bfloat16, 1)[0, 5].view(torch.int16).item() & 0xFFFF
    assert refusal.expected.startswith(f"{right:#06x} ")
    assert refusal.found.startswith(f"{right + 1:#06x} ")
    assert refusal.failing_rows == 1
    names = chosen(result)
    assert names[11] == names[9] == "reference"  # the whole range 9 to 16
    assert names[8] == names[17] == "fast"


def test_above_the_decode_maximum_one_failing_sample_refuses_all() -> None:
    result = certify(fast=at_rows(lambda m: m == 128, one_ulp))
    assert {m for m, name in chosen(result).items() if name == "fast"} == set(range(1, 25))


@pytest.mark.parametrize(
    "change",
    [
        lambda y: torch.where(y == 0, -y.abs(), y),  # the sign of zero
        lambda y: torch.where(y.abs().float() < 2.0**-126, torch.zeros_like(y), y),  # denormals flushed
    ],
    ids=["sign of zero", "flushed denormals"],
)
def test_what_float_equality_or_random_data_would_miss(change) -> None:
    result = certify(fast=at_rows(lambda m: True, change))
    assert [(r.data, r.m) for r in result.refused] == [("adversarial", 1)]
    assert set(chosen(result).values()) == {"reference"}


def test_an_implementation_that_changes_its_bits_is_refused() -> None:
    calls = iter(range(10**9))
    result = certify(fast=at_rows(lambda m: next(calls) == 3, one_ulp))
    assert "other bits every time" in str(result.refused[0])


def test_a_reference_that_depends_on_the_number_of_rows_certifies_nothing() -> None:
    offered = {"reference": Implementation("reference", at_rows(lambda m: m == 5, one_ulp), lambda shape, m: True)}
    with pytest.raises(CertificationError, match="reference kernel itself gives other bits at 5 rows"):
        certify_linear(SHAPE, offered, ROWS, lambda *_: {}, device="cpu")


def test_an_implementation_that_cannot_run_is_refused_by_name() -> None:
    def broken(x, w, dtype, leaves):
        raise RuntimeError("out of shared memory")

    result = certify(fast=broken)
    assert [str(r) for r in result.refused] == ["fast does not run: RuntimeError: out of shared memory"]
    assert set(chosen(result).values()) == {"reference"}


def test_an_implementation_is_only_chosen_where_it_is_offered() -> None:
    names = chosen(certify(most=40, fast=row_by_row))
    assert names[24] == "fast"
    assert names[48] == "reference"


def test_adversarial_rows_are_what_they_say() -> None:
    x, w = linear_inputs(SHAPE, 60, "adversarial", "cpu")
    assert torch.isfinite(linear_reference(x, w).float()).all()
    assert (x[2::6].abs().float() < 2.0**-126).any()  # denormals
    zeros = x[3::6]
    assert (zeros == 0).any()
    assert torch.signbit(zeros[zeros == 0]).any()
    assert not torch.signbit(zeros[zeros == 0]).all()
    assert all(torch.equal(row, x[4]) for row in x[4::6])
    assert ((x[5::6] != 0).sum(1) == 1).all()
    assert x[0].abs().max() > 2.0**30


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EXACTRL_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_certificate_reads_back(cache) -> None:
    result = certify(fast=at_rows(lambda m: m == 11, one_ulp))
    path = write_certificate(MACHINE, [result])
    assert path.parent.parent.parent == cache
    certificate = read_certificate(MACHINE)
    assert certificate.linears == {SHAPE: tuple(result.choices)}
    assert certificate.implementation(SHAPE, 11) == "reference"
    assert certificate.implementation(SHAPE, 24) == "fast"
    assert certificate.max_rows(SHAPE) == 200
    other = LinearShape(8, 8)
    write_certificate(MACHINE, [LinearResult(other, [Choice(1, 4, "cublas")], [], 1, 1, {4: {"cublas": 1.0}})])
    assert set(read_certificate(MACHINE).linears) == {SHAPE, other}
    found = json.loads(json.dumps(read_certificate(MACHINE).excerpt([other, other], [])))
    choice = {"m_min": 1, "m_max": 4, "implementation": "cublas"}
    assert found == {"machine": MACHINE, "linears": [{"shape": asdict(other), "choices": [choice]}], "attention": []}
    with pytest.raises(CertificationError, match="no kernel is certified for linear 16 -> 8"):
        read_certificate(MACHINE).excerpt([other, LinearShape(8, 16)], [])
    assert set(shapes_certified_before("Test GPU")) == {SHAPE, other}
    assert shapes_certified_before("another GPU") == []


def test_a_changed_library_forces_certification_anew(cache) -> None:
    write_certificate(MACHINE, [certify()])
    with pytest.raises(CertificationError, match=r"out of date: libcublas aaaa -> bbbb; run: exactrl certify MODEL"):
        read_certificate({**MACHINE, "libcublas": "bbbb"})
    with pytest.raises(CertificationError, match="deep_gemm absent -> cccc"):
        read_certificate({**MACHINE, "deep_gemm": "cccc"})
    with pytest.raises(CertificationError, match="no certificate for this machine"):
        read_certificate({**MACHINE, "device": "Other GPU"})


OLD = {**MACHINE, "linear_kernels": "1111", "attention_kernels": "2222"}


def test_other_sources_of_attention_leave_the_linears_certified(cache) -> None:
    path = write_certificate(OLD, [certify()])
    found = read_certificate({**OLD, "attention_kernels": "3333"})
    assert set(found.linears) == {SHAPE}
    assert not found.outdated, "no attention was certified"
    write_certificate({**OLD, "attention_kernels": "3333"}, [LinearResult(LinearShape(8, 8), [], [], 1, 1)])
    assert [entry["shape"]["n"] for entry in json.loads(path.read_text())["linears"]] == [8, SHAPE.n]


def test_other_sources_of_the_linears_void_their_part(cache) -> None:
    path = write_certificate(OLD, [certify()])
    new = {**OLD, "linear_kernels": "4444"}
    found = read_certificate(new)
    assert not found.linears
    assert found.outdated == ("linears",)
    with pytest.raises(CertificationError, match=r"since the sources of linear_kernels changed; run: exactrl certify"):
        found.implementation(SHAPE, 1)
    write_certificate(new, [LinearResult(LinearShape(8, 8), [], [], 1, 1)])
    assert [entry["shape"]["n"] for entry in json.loads(path.read_text())["linears"]] == [8]
    assert not read_certificate(OLD).linears, "the file is of the new kernels now"


def test_a_certificate_copied_under_another_machines_name_is_refused(cache) -> None:
    path = write_certificate(MACHINE, [certify()])
    changed = {**MACHINE, "driver": "2"}
    path.rename(contract.certificate_path(changed))
    with pytest.raises(CertificationError, match="certificate of another machine"):
        read_certificate(changed)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 0}', "\x00"])
def test_a_spoilt_certificate_is_named(cache, text: str) -> None:
    path = write_certificate(MACHINE, [certify()])
    path.write_text(text)
    with pytest.raises(CertificationError, match=path.name):
        read_certificate(MACHINE)


def test_what_is_not_certified_is_refused_with_the_way_out() -> None:
    certificate = Certificate(MACHINE, {SHAPE: (Choice(1, 8, "fast"),)})
    fast = Implementation("fast", row_by_row, lambda shape, m: True)
    x, w = linear_inputs(SHAPE, 20, "random", "cpu")
    product = certified_product(certificate, {"fast": fast})
    with pytest.raises(CertificationError, match=r"linear 32 -> 12 \(bfloat16, 4 leaves\).*certify MODEL --k-leaves 4"):
        product(x, w, torch.bfloat16, 4)
    with pytest.raises(CertificationError, match=r"no kernel is certified for linear 32 -> 12 \(float32"):
        product(x, w, torch.float32, 1)
    with pytest.raises(CertificationError, match=r"names .fast.*not installed"):
        certified_product(certificate, {})(x, w, torch.bfloat16, 1)


def test_more_rows_than_certified_are_cut_into_slices() -> None:
    seen = []

    def counted(x, w, dtype, leaves):
        seen.append(len(x))
        return row_by_row(x, w, dtype, leaves)

    choices = (Choice(1, 2, "small"), Choice(3, 8, "large"))
    available = {name: Implementation(name, counted, lambda shape, m: True) for name in ("small", "large")}
    product = certified_product(Certificate(MACHINE, {SHAPE: choices}), available)
    x, w = linear_inputs(SHAPE, 18, "random", "cpu")
    assert torch.equal(product(x, w, torch.bfloat16, 1), row_by_row(x, w, torch.bfloat16, 1))
    assert seen == [8, 8, 2]
    assert product(x[:0], w, torch.bfloat16, 1).shape == (0, SHAPE.n)


def test_gradients_reach_input_and_master() -> None:
    x, w = linear_inputs(SHAPE, 6, "random", "cpu")
    x, master = x.float().requires_grad_(), w.float().requires_grad_()
    y = linear(x, w.float(), row_by_row, master=master)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    y.backward(dy)
    assert torch.allclose(x.grad.double(), dy.double() @ w.double(), rtol=1e-5, atol=1e-5)
    assert torch.allclose(master.grad.double(), dy.double().T @ x.detach().double(), rtol=1e-5, atol=1e-5)


def test_shapes_of_a_model() -> None:
    from exactrl.model.config import find_model, read_config

    config = read_config(find_model("tiny"))
    shapes = linear_shapes(config, leaves=2)
    assert shapes["head"] == LinearShape(config.vocab_size, config.hidden_size, "float32")
    assert [name for name, shape in shapes.items() if shape.leaves == 2] == ["o", "down"]


def test_the_gpu_room_needs_neither_numba_nor_triton() -> None:
    code = """
import sys
for name in ("numba", "llvmlite", "triton", "deep_gemm"):
    sys.modules[name] = None
import exactrl.ops.cuda.linear, exactrl.ops.cuda.machine, exactrl.ops.cuda.determinism
import exactrl.parity.certify, exactrl.parity.certificate
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can certify")
def test_without_a_gpu_the_command_says_so_and_exits_with_4(capsys, cache) -> None:
    from exactrl.cli import main

    assert main(["certify", "tiny"]) == 4
    assert "certify needs a GPU" in capsys.readouterr().err


def test_json_of_a_result_names_the_first_difference() -> None:
    result = json.loads(json.dumps(certify(fast=at_rows(lambda m: m == 11, one_ulp)).to_json()))
    assert result["refused"][0]["element"] == [0, 5]
    assert result["shape"] == {"n": 12, "k": 32, "out_dtype": "bfloat16", "leaves": 1}
    assert all(choice["seconds"] > 0 for choice in result["choices"])
