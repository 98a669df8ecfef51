"""`exactrl certify` as a whole, with kernels, GPU and times made for the purpose: what is checked, kept and skipped."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from exactrl.contract import AttentionShape, Choice, LinearShape, read_certificate
from exactrl.launch import certifying
from exactrl.ops.cuda import matmul
from exactrl.parity.certify import LinearResult, Rows
from exactrl.parity.certify_attention import AttentionResult

MACHINE = {"device": "Test GPU", "linear_kernels": "a", "attention_kernels": "b"}


@pytest.fixture
def certify(tmp_path, monkeypatch) -> Callable[..., list]:
    """Runs it; returns the shapes that were checked."""
    monkeypatch.setenv("EXACTRL_CACHE_DIR", str(tmp_path))
    checked: list[LinearShape | AttentionShape] = []

    def linear(shape, available, rows, times) -> LinearResult:
        checked.append(shape)
        most = rows.most
        return LinearResult(shape, [Choice(1, most, "reference")], [], 1, 1, {most: {"reference": 1.0}})

    def attention(shape) -> AttentionResult:
        checked.append(shape)
        return AttentionResult(shape, {"in_order": "reference"}, [], 1, 1, {"in_order": {}})

    for name, stand_in in (
        ("require_gpu", lambda what, instead: None), ("machine", lambda: dict(MACHINE)),
        ("compile_all", lambda shapes, rows: None), ("compile_attention", lambda shapes: None),
        ("certify_linear", linear), ("certify_one_attention", attention), ("find_spec", lambda name: None),
    ):  # fmt: skip
        monkeypatch.setattr(certifying, name, stand_in)
    monkeypatch.setattr(matmul, "implementations", dict)

    def run(**options) -> list:
        checked.clear()
        certifying.certify(**options)
        return list(checked)

    return run


def test_what_the_certificate_holds_is_not_checked_twice(certify) -> None:
    first = certify(model="tiny")
    assert len({s for s in first if isinstance(s, LinearShape)}) == 5
    assert [s.page_size for s in first if isinstance(s, AttentionShape)] == [0, 64]
    assert certify(model="tiny") == []
    assert certify(model="tiny", again=True) == first
    held = read_certificate(MACHINE)
    assert (len(held.linears), len(held.attention)) == (5, 2)


def test_more_rows_or_other_leaves_are_checked(certify) -> None:
    certify(model="tiny", rows=Rows(16, 64))
    assert certify(model="tiny", rows=Rows(16, 64)) == []
    grown = certify(model="tiny", rows=Rows(16, 128))
    assert len(grown) == 5
    assert all(isinstance(s, LinearShape) for s in grown)
    assert [s.leaves for s in certify(model="tiny", k_leaves=2, rows=Rows(16, 128))] == [2, 2]


def test_a_part_whose_kernels_changed_is_checked_anew(certify, monkeypatch) -> None:
    certify(model="tiny")
    monkeypatch.setattr(certifying, "machine", lambda: {**MACHINE, "attention_kernels": "c"})
    assert [type(s) for s in certify(model="tiny")] == [AttentionShape, AttentionShape]


def test_an_interrupted_certification_keeps_what_it_has(certify, monkeypatch) -> None:
    def stop(shape) -> AttentionResult:
        raise KeyboardInterrupt

    whole = certifying.certify_one_attention
    monkeypatch.setattr(certifying, "certify_one_attention", stop)
    with pytest.raises(KeyboardInterrupt):
        certify(model="tiny")
    monkeypatch.setattr(certifying, "certify_one_attention", whole)
    assert [type(s) for s in certify(model="tiny")] == [AttentionShape, AttentionShape]
    json.dumps(read_certificate(MACHINE).excerpt([], []))
