"""Traces of engine and trainer: rows are aligned by (sample, position), and the first difference is named exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from exactrl.model.qwen3 import unchanged
from exactrl.parity.op_trace import Trace, compare, trace_engine, trace_gradient_forward, trace_scoring
from exactrl.parity.subject import to_samples
from tests.ops.helpers import packed_rows
from tests.train.helpers import make_engine, make_trainer, request, tokens

DTYPES = [torch.float32, torch.bfloat16]


def requests() -> list:
    return [
        request(f"r{i}", tokens(n, i), 12, t) for i, (n, t) in enumerate([(40, 1.0), (40, 0.0), (3, 0.7), (21, 1.3)])
    ]


def samples_of(completions) -> list:
    return to_samples(requests(), completions)


def made(*events: tuple[str, list]) -> Trace:
    trace = Trace(unchanged)
    for name, x in events:
        trace(name, torch.tensor(x))
    return trace


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("budget", [1, 60, 8192])
def test_engine_and_trainer_agree_row_by_row(dtype, budget):
    """Whatever the micro-batches, and with preemption: rows that were computed twice are compared twice."""
    engine = make_engine(dtype, kv_tokens=96, chunk_tokens=13, prefix_cache=False)
    ours, completions = trace_engine(engine, requests())
    assert engine.see is unchanged
    assert engine.stats.recomputed_tokens > 0
    samples = samples_of(completions)
    num_rows = sum(len(s.prompt_token_ids) + len(s.token_ids) - 1 for s in samples)
    for trace in (trace_scoring, trace_gradient_forward):
        trainer = make_trainer(dtype, max_tokens_per_microbatch=budget)
        theirs = trace(trainer, requests(), samples)
        assert trainer.see is unchanged
        found = compare(ours, theirs)
        assert (found.mismatched, found.first, found.only_ours, found.only_theirs) == (0, None, [], [])
        assert len(theirs.table("layers.1.k")[0]) == num_rows
        assert len(ours.table("layers.1.k")[0]) == num_rows + engine.stats.recomputed_tokens
        assert len(theirs.table("logprob")[0]) == len(theirs.table("sample")[0]) == 48
        assert found.compared == sum(ours.table(op)[1].numel() for op in ours.ops)


def test_what_is_traced_is_what_the_sides_report():
    ours, completions = trace_engine(make_engine(), requests())
    samples = samples_of(completions)
    theirs = trace_scoring(make_trainer(), requests(), samples)
    for trace in (ours, theirs):
        tables = [{tuple(r): v for r, v in zip(*(x.tolist() for x in trace.table(op)), strict=True)}
                  for op in ("sample", "logprob", "ids", "positions")]  # fmt: skip
        sampled, logprobs, ids, positions = tables
        for i, s in enumerate(samples):
            for n, (token, logprob) in enumerate(zip(s.token_ids, s.logprobs.tolist(), strict=True)):
                row = i, len(s.prompt_token_ids) + n - 1
                assert (sampled[row], logprobs[row]) == (token, logprob)
            everything = [*s.prompt_token_ids, *s.token_ids]
            for (sample, position), token in ids.items():
                assert sample != i or everything[position] == token
        assert all(position == row[1] for row, position in positions.items())


def test_rows_from_the_prefix_cache_are_said_to_be_the_trainers_only():
    shared = [replace(r, token_ids=tuple(tokens(40, 9))) for r in requests()[:2]]
    engine = make_engine(max_concurrent=1)
    ours, completions = trace_engine(engine, shared)
    samples = to_samples(shared, completions)
    found = compare(ours, trace_scoring(make_trainer(), shared, samples))
    assert (found.mismatched, found.only_ours) == (0, [])
    assert engine.stats.cached_tokens == 32
    assert [row for row in found.only_theirs if row[0] == "embed"] == [("embed", 1, p) for p in range(32)]


def test_the_first_difference_is_the_first_in_model_order():
    rows = ("rows", [[0, 0], [0, 1], [1, 0]])
    ours = made(rows, ("a", [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), ("b", [1, 2, 3]))
    shuffled = ("rows", [[1, 0], [0, 1], [0, 0]])
    same = made(shuffled, ("b", [3, 2, 1]), ("a", [[5.0, 6.0], [3.0, 4.0], [1.0, 2.0]]))
    found = compare(ours, same)
    assert (found.compared, found.mismatched, found.first) == (9, 0, None)
    other = made(shuffled, ("b", [4, 2, 0]), ("a", [[5.0, 6.5], [3.5, 4.0], [1.0, 2.0]]))
    found = compare(ours, other)
    assert (found.compared, found.mismatched) == (9, 4)
    assert found.first.describe("s") == "a, sample s, position 1, element (0,): 3 and 3.5"


def test_zeros_of_both_signs_and_other_dtypes_differ():
    rows = ("rows", [[0, 0]])
    found = compare(made(rows, ("a", [0.0])), made(rows, ("a", [-0.0])))
    assert (found.mismatched, found.first.values) == (1, "0 and -0")
    found = compare(made(rows, ("a", [1])), made(rows, ("a", [1.0])))
    assert (found.mismatched, found.first.values) == (1, "torch.int64 () and torch.float32 ()")


def test_rows_of_one_side_only_are_listed():
    ours = made(("rows", [[0, 0], [0, 1]]), ("a", [1, 2]), ("predicting", [1]), ("b", [7]))
    theirs = made(("rows", [[0, 0], [2, 5]]), ("a", [1, 2]), ("predicting", [0]), ("b", [7]))
    found = compare(ours, theirs)
    assert found.only_ours == [("a", 0, 1), ("b", 0, 1)]
    assert found.only_theirs == [("a", 2, 5), ("b", 0, 0)]
    assert (found.compared, found.mismatched) == (1, 0)


def test_owners_name_sequence_and_position():
    rows = packed_rows([2, 3], make_engine().model.shape)
    rows = replace(rows, first=torch.tensor([0, 30]))
    assert rows.owners(torch.tensor([4, 9])).tolist() == [[4, 0], [4, 1], [9, 30], [9, 31], [9, 32]]
