"""Certification of attention on the CPU, with implementations made for it: who is refused, and what is named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from exactrl.contract import AttentionShape, Certificate, certificate_path, read_certificate
from exactrl.errors import CertificationError
from exactrl.ops.attention import attention_reference
from exactrl.ops.cuda.attention import AttentionImplementation, AttentionRows, paged_attention
from exactrl.ops.cuda.certified_attention import certified_attention
from exactrl.parity.attention_cases import boundaries, build, cases
from exactrl.parity.attention_data import KINDS, attention_inputs
from exactrl.parity.certificate import attention_certified_before, attention_shapes, write_certificate
from exactrl.parity.certify_attention import AttentionResult, certify_attention

PAGED = AttentionShape(4, 2, 16, page_size=4, kv_split=32, kv_block=8)
PACKED = AttentionShape(4, 2, 16, page_size=0, kv_split=32, kv_block=8)
LENGTHS = (1, 9, 33, 70)
MACHINE = {"device": "Test GPU", "driver": "1"}
Change = Callable[[AttentionRows, int, int, torch.Tensor, torch.Tensor], None]
"""(batch, sequence, row within it, out [H, D], lse [H]): changes the row in place."""


def attend(q, k, v, rows: AttentionRows, out, lse, sequences, change: Change | None = None) -> None:
    """Row by row in fp64, so that a row cannot depend on another."""
    starts, lengths = rows.starts.numpy(), rows.lengths.numpy()
    heads, dim = q.shape[1:]
    for s in sequences:
        for i in range(starts[s + 1] - starts[s]):
            row, position = starts[s] + i, lengths[s] - (starts[s + 1] - starts[s]) + i
            at = np.arange(position + 1)
            if rows.tables is None:
                keys, values = k[starts[s] + at], v[starts[s] + at]
            else:
                page = rows.tables.numpy()[s, at // k.shape[1]]
                keys, values = k[page, at % k.shape[1]], v[page, at % k.shape[1]]
            keys, values = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (keys, values))
            scores = (q[row].double() * keys).sum(-1) / math.sqrt(dim)  # [keys, H]
            sums = scores.logsumexp(0)
            y = ((scores - sums).exp()[..., None] * values).sum(0).to(out.dtype)
            z = sums.float()
            if change:
                change(rows, s, i, y, z)
            out[row] = y
            if lse is not None:
                lse[:, row] = z


def fake(name: str, kind: str, change: Change | None = None, most_rows: int | None = None) -> AttentionImplementation:
    def run(*args) -> None:
        attend(*args, change=change)

    return AttentionImplementation(name, kind, run, lambda shape: kind != "split" or shape.page_size > 0, most_rows)


def times(shape, kind, candidates) -> dict[str, dict[str, float]]:
    """Of two workloads: whatever has "fast" in its name is fastest."""
    return {work: {n: 1.0 if "fast" in n else 2.0 for n in candidates} for work in ("few", "many")}


def certify(*others: AttentionImplementation, shape: AttentionShape = PAGED, kinds=("flat",)) -> AttentionResult:
    every = [fake("reference", "in_order"), *others]
    return certify_attention(shape, {i.name: i for i in every}, times, LENGTHS, kinds, device="cpu")


def up(y: torch.Tensor, at: tuple[int, ...]) -> None:
    """One unit in the last place."""
    y.view({2: torch.int16, 4: torch.int32}[y.element_size()])[at] += 1


def position(rows: AttentionRows, s: int, i: int) -> int:
    return int(rows.lengths[s] - rows.counts[s] + i)


def test_data_is_finite_repeats_and_has_what_it_promises() -> None:
    for kind in KINDS:
        q, k, v = attention_inputs(PAGED, LENGTHS, kind, "cpu")
        again = attention_inputs(PACKED, LENGTHS, kind, "cpu")
        assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip((q, k, v), again, strict=True))
        assert all(torch.isfinite(x.float()).all() for x in (q, k, v))
        assert torch.isfinite(torch.einsum("thd,sgd->thsg", q.float(), k.float())).all()
    q, k, _ = attention_inputs(AttentionShape(12, 6, 64), (400,), "ascending", "cpu")
    scores = torch.einsum("hd,thd->ht", q[399].float(), k.float().repeat_interleave(2, 1)) * math.log2(math.e) / 8
    blocks = scores[:, :384].view(12, 6, 64).amax(2)
    rescale = torch.exp2((blocks[:, :-1] - blocks[:, 1:]).double())
    assert ((rescale > 0) & (rescale < 2.0**-126)).any(), "no block is rescaled by a denormal"
    assert (rescale > 0.1).any()
    assert (rescale < 2.0**-150).any()


def test_boundaries_surround_blocks_splits_and_pages() -> None:
    found = boundaries(AttentionShape(32, 8, 128, 16), 2200)
    for n in (16, 64, 512, 576, 1024, 1536, 2048):
        assert {n - 1, n, n + 1} <= set(found), n
    assert {1, 15, 17, 2200} <= set(found)
    assert len(found) < 200
    assert {255, 256, 257} <= set(boundaries(AttentionShape(32, 8, 128, 256), 600))


@pytest.mark.parametrize("shape", [PAGED, PACKED], ids=str)
def test_batches_hold_the_rows_that_they_name(shape: AttentionShape) -> None:
    q, k, v = attention_inputs(shape, LENGTHS, "flat", "cpu")
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    names, seen_nan = set(), False
    for case in cases(shape, LENGTHS):
        names.add(case.name)
        batch = build(case, shape, LENGTHS, q, k, v)
        assert torch.equal(batch.q, q[batch.source])
        for s, (source, first, count) in enumerate(case.pieces):
            length = int(batch.rows.lengths[s])
            assert (batch.rows.counts[s], length) == (count, first + count)
            if shape.page_size:
                at = np.arange(length)
                keys = batch.k[batch.rows.tables[s].numpy()[at // 4], at % 4]
                beyond = batch.k[batch.rows.tables[s].long()].flatten(0, 1)[length:]
                if case.own_pages:
                    assert torch.isnan(beyond.float()).all()
                    seen_nan |= bool(len(beyond))
            else:
                at = int(batch.rows.starts[s])
                keys = batch.k[at : at + length]
            assert torch.equal(keys, k[starts[source] : starts[source] + length])
    assert len(names) == len(list(cases(shape, LENGTHS)))
    assert seen_nan == (shape.page_size > 0)


def test_every_position_is_decoded() -> None:
    (case,) = (c for c in cases(PAGED, LENGTHS) if c.name == "decode at every position")
    assert {(int(s), int(p)) for s, p, _ in case.pieces} == {(s, p) for s, n in enumerate(LENGTHS) for p in range(n)}


def test_what_the_tests_attend_with_is_attention() -> None:
    q, k, v = attention_inputs(PACKED, (33,), "flat", "cpu")
    out = torch.empty_like(q)
    attend(q, k, v, AttentionRows.build([33], [33], None, "cpu"), out, None, [0])
    right = attention_reference(q.double(), k.double(), v.double())
    assert (out.double() - right).norm() / right.norm() < 3e-3


def test_exact_implementations_are_chosen_by_kind_and_time() -> None:
    result = certify(fake("slow", "split", most_rows=32), fake("fast", "split", most_rows=4), fake("other", "in_order"))
    assert result.choices == {"split": "fast", "in_order": "other"}
    assert result.refused == []
    assert result.compared_rows > 1000
    packed = certify(fake("fast", "split", most_rows=4), fake("fast-too", "in_order"), shape=PACKED)
    assert packed.choices == {"in_order": "fast-too"}


def test_only_the_reference_left_is_chosen_without_times() -> None:
    result = certify()
    assert result.choices == {"in_order": "reference"}
    assert json.loads(json.dumps(result.to_json()))["seconds"] == {"in_order": {}}


@pytest.mark.parametrize("what", ["out", "lse"])
def test_one_ulp_in_one_row_is_refused_and_the_row_named(what: str) -> None:
    def change(rows, s, i, y, z) -> None:
        if rows.counts[s] == 1 and position(rows, s, i) == 64:  # only decode, only there
            up(y, (1, 5)) if what == "out" else up(z, (1,))

    result = certify(fake("fast", "split", change, 4), fake("sound", "split", None, 4))
    (refusal,) = result.refused
    assert (refusal.implementation, refusal.what, refusal.position) == ("fast", what, 64)
    assert refusal.sequence == 65
    assert refusal.element == ((1, 5) if what == "out" else (1,))
    assert refusal.mismatched_rows == 1
    found, expected = (int(text.split()[0], 16) for text in (refusal.found, refusal.expected))
    assert found == expected + 1
    assert result.choices["split"] == "sound"
    assert f"first position 64 of a sequence of 65, {what} " in str(refusal)


@pytest.mark.parametrize("count", [1, 3, 31, 9])
def test_a_kernel_that_is_wrong_for_one_number_of_rows_is_refused(count: int) -> None:
    """3: a few rows of a sequence; 31: a chunk of one less than a split; 9: a whole sequence."""

    def change(rows, s, i, y, z) -> None:
        if rows.counts[s] == count and i == count - 1:
            up(y, (0, 0))

    assert [r.implementation for r in certify(fake("fast", "in_order", change)).refused] == ["fast"]


@pytest.mark.parametrize("length", [8, 9, 31, 32, 33, 63, 64, 65])
def test_a_kernel_that_is_wrong_at_one_length_is_refused(length: int) -> None:
    def change(rows, s, i, y, z) -> None:
        if rows.lengths[s] == length:
            up(y, (3, 15))

    result = certify(fake("fast", "split", change, 2))
    assert [(r.sequence, r.position) for r in result.refused] == [(length, length - 1)]


def test_writing_a_row_that_was_not_asked_for_is_refused() -> None:
    def run(q, k, v, rows, out, lse, sequences) -> None:
        attend(q, k, v, rows, out, lse, np.arange(len(rows.counts)))

    bad = AttentionImplementation("fast", "in_order", run, lambda shape: True)
    (refusal,) = certify(bad, shape=PACKED).refused
    assert refusal.what == "a row that was not asked for"
    assert "backwards" in refusal.case


def test_reading_a_slot_beyond_the_end_is_refused() -> None:
    """0 times what is in the slot: nothing, unless it is NaN."""

    def run(q, k, v, rows, out, lse, sequences) -> None:
        attend(q, k, v, rows, out, lse, sequences)
        starts, size = rows.starts.numpy(), k.shape[1]
        for s in sequences:
            n = int(rows.lengths[s])
            if n % size:
                out[starts[s] : starts[s + 1]] += 0 * v[rows.tables[s, n // size], n % size, 0, 0]

    bad = AttentionImplementation("fast", "in_order", run, lambda shape: True)
    (refusal,) = certify(bad).refused
    assert "NaN beyond" in refusal.case


@pytest.mark.parametrize(
    "change",
    [
        lambda y: torch.where(y == 0, -y, y),  # the sign of zero
        lambda y: torch.where(y.float().abs() < 2.0**-126, y * 0, y),  # denormals flushed
    ],
    ids=["sign of zero", "flushed denormals"],
)
def test_what_float_equality_or_random_data_would_miss(change) -> None:
    def changed(rows, s, i, y, z) -> None:
        y.copy_(change(y))

    (refusal,) = certify(fake("fast", "in_order", changed), kinds=KINDS).refused
    assert refusal.data not in ("flat", "peaked")


def test_bits_that_change_from_call_to_call_are_refused() -> None:
    calls = iter(range(10**9))

    def change(rows, s, i, y, z) -> None:
        if next(calls) == 7:
            up(y, (0, 0))

    (refusal,) = certify(fake("fast", "in_order", change)).refused
    assert "other bits every time" in str(refusal)


def test_a_kernel_that_cannot_run_is_refused_by_name() -> None:
    def broken(*_) -> None:
        raise RuntimeError("out of shared memory")

    result = certify(AttentionImplementation("fast", "split", broken, lambda shape: True, 4))
    (refusal,) = result.refused
    assert str(refusal).startswith("fast does not run (")
    assert "RuntimeError: out of shared memory" in str(refusal)
    assert result.choices == {"in_order": "reference"}


def test_a_reference_that_changes_certifies_nothing() -> None:
    def change(rows, s, i, y, z) -> None:
        if rows.counts[s] == 1:
            up(y, (0, 0))

    every = {"reference": fake("reference", "in_order", change)}
    with pytest.raises(CertificationError, match=r"reference kernel itself gives \d+ rows other bits"):
        certify_attention(PAGED, every, times, LENGTHS, ("flat",), device="cpu")


def test_a_reference_that_is_not_finite_certifies_nothing() -> None:
    def change(rows, s, i, y, z) -> None:
        y[0, 0] = torch.nan

    every = {"reference": fake("reference", "in_order", change)}
    with pytest.raises(CertificationError, match="not finite"):
        certify_attention(PAGED, every, times, LENGTHS, ("flat",), device="cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EXACTRL_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_certificate_of_attention_reads_back_beside_linears(cache) -> None:
    from exactrl.contract import Choice, LinearShape
    from exactrl.parity.certify import LinearResult

    linear = LinearShape(8, 8)
    write_certificate(MACHINE, [LinearResult(linear, [Choice(1, 4, "cublas")], [], 1, 1, {4: {"cublas": 1.0}})])
    write_certificate(MACHINE, attention=[certify(fake("fast", "split", most_rows=4))])
    write_certificate(MACHINE, attention=[certify(shape=PACKED)])
    certificate = read_certificate(MACHINE)
    assert set(certificate.linears) == {linear}
    assert certificate.attention == {
        PACKED: {"in_order": "reference"}, PAGED: {"split": "fast", "in_order": "reference"},
    }  # fmt: skip
    assert certificate.attends(PAGED, "split") == "fast"
    with pytest.raises(CertificationError, match=r"no split kernel is certified for attention 4/2 x 16 \(packed\)"):
        certificate.attends(PACKED, "split")
    assert set(attention_certified_before("Test GPU")) == {PAGED, PACKED}
    assert attention_certified_before("another") == []


def test_a_certificate_of_the_first_format_has_linears_and_no_attention(cache) -> None:
    path = certificate_path(MACHINE)
    path.parent.mkdir(parents=True)
    shape = {"n": 8, "k": 8, "out_dtype": "bfloat16", "leaves": 1}
    choices = [{"m_min": 1, "m_max": 4, "implementation": "cublas", "seconds": 1.0}]
    old = {"format": 1, "date": "", "machine": MACHINE, "linears": [{"shape": shape, "choices": choices}]}
    path.write_text(json.dumps(old))
    certificate = read_certificate(MACHINE)
    assert len(certificate.linears) == 1
    with pytest.raises(CertificationError, match=r"no in_order kernel is certified for attention 4/2 x 16 .*certify"):
        certificate.attends(PAGED, "in_order")
    write_certificate(MACHINE, attention=[certify()])
    grown = json.loads(path.read_text())
    assert (grown["format"], len(grown["linears"]), len(grown["attention"])) == (2, 1, 1)


def test_only_what_the_certificate_names_attends(cache) -> None:
    split, in_order = fake("fast", "split", most_rows=4), fake("other", "in_order")
    certificate = Certificate(
        MACHINE, {}, {PAGED: {"split": "fast", "in_order": "other"}, PACKED: {"in_order": "other"}}
    )
    choose = certified_attention(certificate, {"fast": split, "other": in_order})
    assert choose(PAGED).split is split
    assert (choose(PAGED).in_order, choose(PAGED).split_rows) == (in_order, 4)
    assert (choose(PACKED).split, choose(PACKED).split_rows) == (in_order, 0)
    with pytest.raises(CertificationError, match=r"no in_order kernel is certified for attention 8/2 x 16"):
        choose(AttentionShape(8, 2, 16, 4))
    with pytest.raises(CertificationError, match=r"names 'fast' .* not installed"):
        certified_attention(certificate, {"other": in_order})(PAGED)
    (case,) = (c for c in cases(PAGED, LENGTHS) if c.name == "decode rows among whole sequences")
    q, k, v = attention_inputs(PAGED, LENGTHS, "flat", "cpu")
    batch = build(case, PAGED, LENGTHS, q, k, v)
    expected = torch.empty_like(batch.q)
    attend(batch.q, batch.k, batch.v, batch.rows, expected, None, range(len(case.pieces)))
    assert torch.equal(paged_attention(batch.q, batch.k, batch.v, batch.rows, choose(PAGED)), expected)


def test_what_the_command_prints_names_choice_times_and_refusal() -> None:
    from exactrl.cli.certify import attention_lines

    def change(rows, s, i, y, z) -> None:
        if rows.lengths[s] == 33:
            up(y, (3, 15))

    first, split, in_order, refused = attention_lines(
        certify(fake("fast", "split", most_rows=4), fake("bad", "in_order", change))
    )
    assert first.startswith("attention 4/2 x 16 (pages of 4): ")
    assert split == "  split     fast  few 1000000 us, many 1000000 us"
    assert in_order == "  in_order  reference"
    assert refused.startswith("  refused: bad differs")
    nothing = AttentionResult.nothing(PAGED, "fa3", "other bits")
    assert "fa3 does not run (all batches): other bits" in attention_lines(nothing)[1]


def test_a_shape_without_kernels_is_shown_and_does_not_stop_the_linears(cache) -> None:
    from exactrl.launch.certifying import certify_one_attention

    result = certify_one_attention(AttentionShape(4, 2, 48, 16))
    assert result.choices == {}
    assert "not made for this shape" in str(result.refused[0])
    write_certificate(MACHINE, attention=[result])
    with pytest.raises(CertificationError, match="no in_order kernel is certified"):
        read_certificate(MACHINE).attends(result.shape, "in_order")


def test_the_order_fa3_is_certified_where_it_is_installed(monkeypatch) -> None:
    from exactrl.launch import certifying
    from exactrl.ops.cuda import fa3_attention

    shape = AttentionShape(32, 8, 128)
    monkeypatch.setattr(certifying, "attention_shapes", lambda config: [shape, AttentionShape(32, 8, 96)])
    monkeypatch.setattr(certifying, "find_spec", lambda name: None)
    assert [s.order for s in certifying.attention_shapes_of("tiny")] == ["canonical"] * 2
    for module in (certifying, fa3_attention):
        monkeypatch.setattr(module, "find_spec", lambda name: name)
    assert [(s.order, s.dim) for s in certifying.attention_shapes_of("tiny")[2:]] == [("fa3", 128)]

    def refuse(*_args, **_kwargs):
        raise CertificationError("other bits in a mixed batch")

    monkeypatch.setattr(certifying, "certify_attention", refuse)
    result = certifying.certify_one_attention(certifying.attention_shapes_of("tiny")[2])
    assert result.choices == {}
    assert "other bits in a mixed batch" in str(result.refused[0])


def test_whole_batches_only_are_asked_of_the_order_fa3() -> None:
    def run(q, k, v, rows, out, lse, sequences) -> None:
        assert len(sequences) == len(rows.counts)
        attend(q, k, v, rows, out, lse, sequences)

    shape = AttentionShape(4, 2, 16, page_size=4, kv_split=32, kv_block=8, order="fa3")
    fa3 = AttentionImplementation("fa3", "in_order", run, lambda shape: True)
    result = certify_attention(shape, {"fa3": fa3}, times, LENGTHS, ("flat",), device="cpu", reference="fa3")
    assert (result.choices, result.refused) == ({"in_order": "fa3"}, [])
    assert result.compared_rows > 500


def test_shapes_of_a_model() -> None:
    from exactrl.model.config import find_model, read_config

    config = read_config(find_model("tiny"))
    shapes = attention_shapes(config)
    assert [s.page_size for s in shapes] == [0, 64]
    assert {(s.heads, s.kv_heads, s.dim) for s in shapes} == {(config.num_heads, config.num_kv_heads, config.head_dim)}


def test_data_that_fa3_makes_nan_of_are_left_out_and_named() -> None:
    from exactrl.cli.certify import attention_lines

    shape = AttentionShape(4, 2, 16, page_size=4, kv_split=32, kv_block=8, order="fa3")

    def run_of(bad: tuple[str, ...]) -> AttentionImplementation:
        largest = {kind: float(attention_inputs(shape, LENGTHS, kind, "cpu")[0].float().abs().max()) for kind in KINDS}
        limit = min(largest[kind] for kind in bad)

        def run(q, k, v, rows, out, lse, asked) -> None:
            attend(q, k, v, rows, out, lse, asked)
            if float(q.float().abs().max()) >= limit:
                out[:] = torch.nan

        return AttentionImplementation("fa3", "in_order", run, lambda shape: True)

    kinds = ("flat", "large exponents")
    result = certify_attention(
        shape, {"fa3": run_of(("large exponents",))}, times, LENGTHS, kinds, device="cpu", reference="fa3"
    )
    assert (result.choices, result.left_out) == ({"in_order": "fa3"}, ["large exponents"])
    assert result.to_json()["left_out"] == ["large exponents"]
    assert "not compared: large exponents data" in "\n".join(attention_lines(result))
    with pytest.raises(CertificationError, match="not finite"):
        certify_attention(shape, {"fa3": run_of(kinds)}, times, LENGTHS, kinds, device="cpu", reference="fa3")
