"""Attention on the GPU: bits of every kernel in every way to ask for rows, correctness against fp64, gradients, FA3."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bench.attention_points import Heads, Pool
from exactrl.errors import EnvironmentProblem
from exactrl.ops.cuda.attention import attention_implementations, packed_attention
from exactrl.parity.compare import differing
from tests.gpu.attention_inputs import draw, run
from tests.gpu.attention_stress import one_batch
from tests.gpu.attention_sweep import EDGES, different_rows, sweep_case

CASES = [
    (8, 2, 128, 64, 1.0, [*EDGES, 3000]),
    (8, 2, 128, 16, 16.0, [*EDGES, 2049]),
    (5, 1, 64, 256, 4.0, EDGES),
    (4, 2, 256, 32, 2.0, EDGES),
]
HEADS = [(8, 2, 128), (5, 1, 64), (4, 2, 256)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way_to_ask_for_rows_has_the_bits_of_the_reference(case) -> None:
    found = list(sweep_case(case, 0, attention_implementations()))
    assert {way for _, way, _, _ in found} == {"packed", "paged", "decode", "chunks", "tails", "mixed"}
    assert [entry for entry in found if entry[3]] == []


@pytest.mark.parametrize("batch", [(32, 1024), (256, 1024), (7, 16500)], ids=str)
def test_repeated_launches_and_replayed_graphs_give_the_bits_of_the_reference(batch) -> None:
    pool = Pool(Heads(), 1 << 18)
    for page_size in (64, 16):
        rows, wrong = one_batch(pool, *batch, page_size, 0)
        assert rows > 0
        assert wrong == {"cuda-split": 0, "cuda-stream": 0, "cuda-decode": 0}


VALUES = {
    "zeros": lambda v: v * (torch.arange(v.shape[2], device=v.device) % 3 > 0),
    "denormals": lambda v: v * 2.0**-70 * torch.linspace(0, -60, len(v), device=v.device).exp2()[:, None, None],
    "negative denormals": lambda v: v.abs() * -(2.0**-126),
    "near the largest": lambda v: v * 2.0**110,
    "usual": lambda v: v,
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("heads", [(8, 2, 128), (8, 8, 64)], ids=str)
def test_in_order_kernels_divide_every_kind_of_sum_as_the_reference_does(heads, name: str) -> None:
    """Many short sequences, so that items by far outnumber the multiprocessors; two layers on one plan."""
    lengths = [1, 63, 64, 65, 512, 513, 1100, *np.random.default_rng(0).integers(1, 70, 300)]
    data, offered = draw(lengths, *heads, 64, 1.0, 7), attention_implementations()
    rows, v = data.packed(), VALUES[name](data.v.float()).bfloat16()
    expected = run(offered["reference"], data.q, data.k, v, rows)
    for implementation in (i for i in offered.values() if i.kind == "in_order" and i.name != "reference"):
        kept = []
        for _ in range(2):
            layer = [t.clone() for t in (data.q, data.k, v)]
            found = run(implementation, *layer, rows)
            assert different_rows(*found, *expected) == 0, implementation.name
            kept += [t.fill_(torch.nan) for t in layer]  # what a launch made ready for this layer would read


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths) -> torch.Tensor:
    """fp64, sequence by sequence."""
    outs, group = [], q.shape[1] // k.shape[1]
    for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        b, c = b.repeat_interleave(group, 1), c.repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", a, b) / math.sqrt(q.shape[2])
        hidden = torch.ones(len(a), len(a), dtype=torch.bool, device=q.device).triu(1)
        outs.append(torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -math.inf).softmax(-1), c))
    return torch.cat(outs)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_output_and_gradients_are_correct_and_deterministic(heads) -> None:
    lengths = [130, 1, 700]
    data = draw(lengths, *heads, 64, 1.0, 3)
    d_out = torch.randn(data.q.shape, generator=torch.Generator("cuda").manual_seed(4), device="cuda").bfloat16()
    runs = []
    for _ in range(3):
        leaves = [t.clone().requires_grad_() for t in (data.q, data.k, data.v)]
        out = packed_attention(*leaves, data.packed(), attention_implementations()["reference"])
        out.backward(d_out)
        runs.append([out.detach(), *(t.grad for t in leaves)])
    doubles = [t.double().requires_grad_() for t in (data.q, data.k, data.v)]
    right = causal(*doubles, lengths)
    right.backward(d_out.double())
    for name, *found, expected in zip(
        ("out", "dq", "dk", "dv"), *runs, [right.detach(), *(t.grad for t in doubles)], strict=True
    ):
        assert not any(differing(f, found[0]).any() for f in found), name
        assert (found[0].double() - expected).norm() / expected.norm() < 5e-3, name


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("page_size", [16, 64, 128, 256])
def test_fa3_has_one_set_of_bits_for_decode_chunks_and_mixed_batches(heads, page_size: int) -> None:
    from exactrl.ops.cuda.fa3_attention import fa3_implementation

    try:
        fa3 = fa3_implementation()
    except EnvironmentProblem as problem:
        pytest.skip(str(problem))
    data = draw([300, 1025, 2000, 77, 4096], *heads, page_size, 1.0, 5)
    pages = [t.nan_to_num(0.0) for t in (data.k_pages, data.v_pages)]  # FA3 reads values of unused slots
    expected = run(fa3, data.q, data.k, data.v, data.packed())
    tables = np.where(data.tables == np.iinfo(np.int32).max, 0, data.tables)
    for counts in ([1] * 5, [300, 1, 5, 1, 1], [100, 500, 512, 77, 512]):
        number, _ = data.last(np.array(counts), data.lengths, np.arange(5))
        rows = data.packed().build(counts, data.lengths, tables)
        at = torch.from_numpy(number).cuda()
        found = run(fa3, data.q[at], *pages, rows)
        assert different_rows(*found, expected[0][at], expected[1][:, at]) == 0
