"""The Triton attention kernels in Triton's interpreter: indexing, masks, splits, pages and merge, at small shapes.

Queries and keys have few non-zero elements and values are small integers: then every sum inside a block is exact, and
all tiles must agree to the last bit although numpy multiplies matrices in an order of its own. Inputs are float16, see
test_triton_matmul.py.
"""

from __future__ import annotations

from tests.ops.cuda import interpreter  # isort: skip  # noqa: F401 - sets up Triton before it is imported

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch

from exactrl.contract import AttentionShape, get_contract
from exactrl.errors import ConfigError, EnvironmentProblem
from exactrl.ops.cuda.attention import (
    AttentionChoice,
    AttentionRows,
    Workspace,
    attention_implementations,
    paged_attention,
)
from exactrl.ops.cuda.triton_split_attention import split_plan
from tests.gpu.attention_inputs import Sequences, draw, run

FOUND = attention_implementations()
DIM = 16
IN_ORDER = ["triton-in-order:64-w4-s3", "triton-in-order:128-w8-s3"]
SPLIT = ["triton-split:16-w4-s5-c3", "triton-split:64-w4-s3-c2"]
LENGTHS = (1, 17, 64, 65, 512, 577)
CASES = [(4, 1, 16), (5, 1, 64), (2, 2, 256)]  # heads, kv heads, page size


@functools.cache
def sequences(heads: int, kv_heads: int, page_size: int, lengths: tuple[int, ...] = LENGTHS) -> Sequences:
    data = draw(list(lengths), heads, kv_heads, DIM, page_size, 1.0, 0, "cpu", torch.float16)
    for q_or_k in (data.q, data.k, data.k_pages):
        q_or_k.copy_(q_or_k.sign())  # NaN stays
        q_or_k[..., 4:] = torch.where(q_or_k[..., 4:].isnan(), q_or_k[..., 4:], 0.0)
    for values in (data.v, data.v_pages):
        values.copy_((values * 2).round().clamp(-4, 4))
    return data


REFERENCE: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def reference(data: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
    """Computed once for each `sequences`, which stay alive."""
    if id(data) not in REFERENCE:
        REFERENCE[id(data)] = whole(data)
    return REFERENCE[id(data)]


def whole(data: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
    return run(FOUND["reference"], data.q, data.k, data.v, data.packed())


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_attention(case) -> None:
    data = sequences(*case)
    out, lse = reference(data)
    group = case[0] // case[1]
    for start, n in zip(data.starts, data.lengths, strict=False):
        q, k, v = (t[start : start + n].double() for t in (data.q, data.k, data.v))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(DIM)
        scores.masked_fill_(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
        right = torch.einsum("hts,shd->thd", scores.softmax(-1), v)
        assert (out[start : start + n].double() - right).abs().max() < 4e-3
        assert (lse[:, start : start + n].double() - scores.logsumexp(-1)).abs().max() < 2e-3


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", IN_ORDER)
def test_in_order_kernels_have_its_bits_packed_and_over_pages_of_nan(case, name: str) -> None:
    data = sequences(*case)
    expected = reference(data)
    paged = AttentionRows.build(data.lengths, data.lengths, data.tables, "cpu")
    for k, v, rows in ((data.k, data.v, data.packed()), (data.k_pages, data.v_pages, paged)):
        for found, right in zip(run(FOUND[name], data.q, k, v, rows), expected, strict=True):
            assert torch.equal(found, right)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["reference", *IN_ORDER, *SPLIT])
def test_the_last_rows_alone_have_the_bits_of_the_whole(case, name: str) -> None:
    data = sequences(*case)
    out, lse = reference(data)
    of, group = np.arange(len(data.lengths)), case[0] // case[1]
    for count in (1, 3):
        if FOUND[name].most_rows is not None and count * group > FOUND[name].most_rows:
            continue
        number, rows = data.last(np.minimum(count, data.lengths), data.lengths, of)
        found = run(FOUND[name], data.q[number], data.k_pages, data.v_pages, rows)
        assert torch.equal(found[0], out[number])
        assert torch.equal(found[1], lse[:, number])


def test_chunks_have_the_bits_of_the_whole_and_the_order_of_pages_does_not_matter() -> None:
    data = sequences(4, 2, 16, (600,))
    out, _ = reference(data)
    pages = len(data.k_pages)
    order = np.random.default_rng(1).permutation(pages)
    moved = dataclasses.replace(
        data, k_pages=data.k_pages[np.argsort(order)], v_pages=data.v_pages[np.argsort(order)],
        tables=order[np.minimum(data.tables, pages - 1)].astype(np.int32),
    )  # fmt: skip
    for name in ("reference", *IN_ORDER):
        for start, stop in ((0, 500), (500, 513), (513, 600)):
            number, rows = moved.last(np.array([stop - start]), np.array([stop]), np.array([0]))
            found, _ = run(FOUND[name], moved.q[number], moved.k_pages, moved.v_pages, rows)
            assert torch.equal(found, out[number])


def test_a_mixed_batch_has_the_bits_of_its_parts_and_runs_each_kernel_once() -> None:
    data = sequences(4, 2, 32)
    out, lse = reference(data)
    calls = []

    def counted(name: str):
        implementation = FOUND[name]

        def attend(*arguments) -> None:
            calls.append((implementation.kind, arguments[-1].tolist()))
            implementation.attend(*arguments)

        return dataclasses.replace(implementation, attend=attend)

    counts = np.array([1, 9, 8, 65, 3, 100])
    number, rows = data.last(counts, data.lengths, np.arange(len(counts)))
    found_lse = torch.full((4, len(number)), math.nan)
    choice = AttentionChoice(counted(SPLIT[0]), counted(IN_ORDER[0]), 16)
    found = paged_attention(data.q[number], data.k_pages, data.v_pages, rows, choice, found_lse)
    assert torch.equal(found, out[number])
    assert torch.equal(found_lse, lse[:, number])
    assert calls == [("split", [0, 2, 4]), ("in_order", [1, 3, 5])]


def test_sequences_without_rows_are_left_alone() -> None:
    data = sequences(4, 2, 32, (70, 600, 30))
    number, rows = data.last(np.array([1, 0, 1]), data.lengths, np.arange(3))
    choice = AttentionChoice(FOUND[SPLIT[0]], FOUND[IN_ORDER[0]], 16)
    found = paged_attention(data.q[number], data.k_pages, data.v_pages, rows, choice)
    assert torch.equal(found, reference(data)[0][number])


def test_a_plan_is_made_once_and_follows_lengths_that_grow() -> None:
    data = sequences(4, 2, 32, (513, 1025))
    out, _ = reference(data)
    most, of = data.lengths, np.arange(2)
    number, rows = data.last(np.ones(2, int), np.array([100, 512]), of)
    rows = dataclasses.replace(rows, most_keys=most)
    found, _ = run(FOUND[SPLIT[0]], data.q[number], data.k_pages, data.v_pages, rows)
    assert torch.equal(found, out[number])
    plan = split_plan(rows, of, 4, 2, DIM)
    assert int(plan.total) == 2
    number, _ = data.last(np.ones(2, int), most, of)
    rows.lengths.copy_(torch.from_numpy(most))
    rows.refresh()
    assert split_plan(rows, of, 4, 2, DIM) is plan
    assert int(plan.total) == 2 + 3
    for _ in range(2):  # two layers of one step
        found, _ = run(FOUND[SPLIT[0]], data.q[number], data.k_pages, data.v_pages, rows)
        assert torch.equal(found, out[number])


def test_batches_share_a_workspace_that_grows() -> None:
    """Each of both layers of a batch finds in it what another batch has left, or NaN."""
    data, workspace, batches = sequences(4, 2, 32, (513, 1025)), Workspace(), []
    out, _ = reference(data)
    for lengths, of in (([513], [0]), ([1025, 513], [1, 0]), ([600], [1])):
        counts = np.ones(len(of), int)
        number, rows = data.last(counts, np.array(lengths), np.array(of))
        batches.append((number, dataclasses.replace(rows, workspace=workspace)))
        split_plan(batches[-1][1], np.arange(len(of)), 4, 2, DIM)
    first, second, third = (next(iter(rows.plans.values())).partial for _, rows in batches)
    assert second.data_ptr() == third.data_ptr() == workspace.floats.data_ptr() != first.data_ptr()
    for number, rows in (*batches, *batches[::-1]):
        found, _ = run(FOUND[SPLIT[0]], data.q[number], data.k_pages, data.v_pages, rows)
        assert torch.equal(found, out[number])
        workspace.floats.fill_(torch.nan)
    held = workspace.floats.numel()
    assert workspace.take(held + 1, torch.device("cpu")).numel() == held + 1
    assert workspace.floats.numel() == held * 3 // 2, "growing a little at a time would drop graphs each time"


def test_lengths_beyond_what_a_plan_has_room_for_give_nan() -> None:
    data = sequences(4, 2, 32, (513, 1025))
    number, rows = data.last(np.ones(2, int), data.lengths, np.arange(2))
    rows = dataclasses.replace(rows, most_keys=np.array([512, 512]))
    found, _ = run(FOUND[SPLIT[0]], data.q[number], data.k_pages, data.v_pages, rows)
    assert found.isnan().all()


def test_what_is_served() -> None:
    assert not FOUND["reference"].serves(AttentionShape(8, 2, 96, 64))
    assert not FOUND["reference"].serves(AttentionShape(8, 2, 128, 24))
    assert not FOUND[SPLIT[0]].serves(AttentionShape(8, 2, 128))
    assert not FOUND["triton-in-order:128-w8-s3-tma"].serves(AttentionShape(8, 2, 128, 32))
    assert all(FOUND[n].serves(AttentionShape(8, 2, 128, 64)) for n in (*IN_ORDER, *SPLIT))


def test_fa3_is_a_contract_of_its_own_for_gpus() -> None:
    from exactrl.ops.binding import Ops
    from exactrl.ops.cuda.fa3_attention import fa3_choice

    contract, plain = get_contract("exact-v1-fa3"), get_contract("exact-v1")
    assert (contract.attention, plain.attention) == ("fa3", "canonical")
    assert contract.digest != plain.digest
    with pytest.raises(ConfigError, match="runs on GPUs only; use 'exact-v1'"):
        Ops(contract)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'exactrl\[fa3\]'"):
        fa3_choice()
