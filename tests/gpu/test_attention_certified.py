"""GPU attention: certified against the reference on this machine, and the same bits as on another machine."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from exactrl.contract import AttentionShape
from exactrl.parity.attention_data import KINDS, attention_inputs
from exactrl.parity.attention_timing import attention_times
from exactrl.parity.certify_attention import certify_attention
from tests.gpu.attention_digests import COMMITTED, digests

LENGTHS = (1, 17, 65, 513, 1100)


def available():
    from exactrl.ops.cuda.attention import attention_implementations

    return attention_implementations()


def test_the_same_bits_as_on_the_machine_that_wrote_the_digests() -> None:
    committed, found = json.loads(COMMITTED.read_text()), digests()
    assert found.keys() == committed.keys()
    assert {key for key in found if found[key] != committed[key]} == set()


@pytest.mark.parametrize("page_size", [0, 16, 128])
def test_every_kernel_of_ours_is_certified(page_size: int) -> None:
    """Certification at the model shapes' head dimension; times are not looked at."""
    shape = AttentionShape(8, 2, 128, page_size)
    result = certify_attention(shape, available(), lambda *_: {"any": dict.fromkeys(_[2], 1.0)}, LENGTHS)
    assert [str(refusal) for refusal in result.refused] == []
    assert set(result.choices) == ({"split", "in_order"} if page_size else {"in_order"})
    assert result.compared_rows > 10_000


def test_one_row_off_by_one_ulp_is_refused_with_that_row() -> None:
    """A real kernel whose result is changed in one decode row, at the first key of the second split."""
    from dataclasses import replace

    shape, found = AttentionShape(8, 2, 128, 16), available()
    name = next(n for n, i in found.items() if i.kind == "split" and i.serves(shape))

    def off(q, k, v, rows, out, lse, sequences) -> None:
        found[name].attend(q, k, v, rows, out, lse, sequences)
        at = np.flatnonzero((rows.counts == 1) & (rows.most_keys == 513))
        for s in np.intersect1d(at, sequences):
            out[int(rows.starts[s])].view(torch.int16)[3, 7] += 1

    offered = {"reference": found["reference"], name: replace(found[name], attend=off)}
    result = certify_attention(shape, offered, lambda *_: {"any": dict.fromkeys(_[2], 1.0)}, LENGTHS)
    (refusal,) = result.refused
    assert (refusal.implementation, refusal.sequence, refusal.position) == (name, 513, 512)
    assert (refusal.what, refusal.element) == ("out", (3, 7))
    assert result.choices == {"in_order": "reference"}


def test_survivors_are_timed() -> None:
    shape, found = AttentionShape(8, 2, 128, 16), available()
    split = {n: i for n, i in found.items() if i.kind == "split" and i.serves(shape)}
    name = next(iter(split))
    measured = attention_times(shape, "split", {name: split[name]})
    assert all(0 < t[name] < 0.1 for t in measured.values())


def test_adversarial_inputs_are_the_same_for_every_page_size() -> None:
    for kind in KINDS:
        a = attention_inputs(AttentionShape(8, 2, 64, 16), LENGTHS, kind, "cuda")
        b = attention_inputs(AttentionShape(8, 2, 64, 256), LENGTHS, kind, "cuda")
        assert all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in zip(a, b, strict=True))
