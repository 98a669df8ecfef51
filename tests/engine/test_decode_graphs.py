"""What a captured decode step reads from the host: sizes, and what rows hold, only written where it changed."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch

from exactrl.engine.decode_graphs import Inputs, Rows, context_of, fill, rows_of
from exactrl.engine.sequence import Sequence
from exactrl.engine.step import Step
from exactrl.types import Request, SamplingParams
from tests.engine.fake_engine import random_engine, random_requests


def sequence(index: int) -> Sequence:
    return Sequence(index, Request(str(index), (1,), SamplingParams(9, index / 8), 2**64 - 1 - index))


def decoding(seqs: list[Sequence], starts: list[int]) -> Step:
    n, none = len(seqs), np.zeros(0, np.int64)
    admission = np.array([seq.admission for seq in seqs], np.int64)
    ones = np.ones(n, np.int64)
    return Step(seqs, np.array(starts, np.int64), ones, ones > 0, -ones, none, admission)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 100, 256, 300, 1024])
def test_a_graph_holds_the_rows_it_serves_and_no_more_than_it_may(most: int) -> None:
    sizes = [rows_of(n, most) for n in range(1, most + 1)]
    assert all(n <= size <= most for n, size in enumerate(sizes, 1))
    assert all(size < n + max(8, n / 4) for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) <= 44
    assert sizes == sorted(sizes)


def test_contexts() -> None:
    assert [context_of(n, 5000) for n in (1, 1024, 1025, 2049, 4097)] == [1024, 1024, 2048, 4096, 5000]
    assert context_of(3, 100) == 100


def test_rows_follow_their_sequences() -> None:
    """Sequences grow, leave, move up, and come back after a preemption with as many other pages."""
    rng = random.Random(0)
    size, rows, admissions, running = 4, Rows(6, 12, 4), count(), []
    for step in range(500):
        for seq in running:
            if rng.random() < 0.2:
                seq.block_ids.append(rng.randrange(1000))
            if len(seq.block_ids) > 12:
                seq.admission = -1
        left = [seq for seq in running if rng.random() < 0.9 and seq.admission >= 0]
        again = [seq for seq in running if seq not in left and rng.random() < 0.5]
        running = [*left, *again, *(sequence(10 * step + i) for i in range(rng.randint(0, 6 - len(left + again))))]
        for seq in running[len(left) :]:
            seq.admission = next(admissions)
            seq.block_ids = [rng.randrange(1000) for _ in range(rng.randint(1, 12))]
        served = [seq for seq in running if rng.random() < 0.9]
        if not served:
            continue
        rows.update(decoding(served, [len(seq.block_ids) * size - rng.randint(1, size) for seq in served]))
        for i, seq in enumerate(served):
            assert rows.tables[i, : len(seq.block_ids)].tolist() == seq.block_ids
            assert int(rows.keys[i]) % 2**64 == seq.request.noise_key
            assert rows.temperatures[i] == seq.request.params.temperature


def check_inputs(host: dict[str, np.ndarray], step: Step, size: int) -> None:
    for i, c in enumerate(step):
        seq, row = c.seq, {name: values[i].item() for name, values in host.items() if name != "tables"}
        assert row["sources"] == c.source
        assert c.source >= 0 or row["ids"] == seq.token_ids[c.start]
        assert (row["positions"], row["sample_positions"], row["lengths"]) == (c.start, c.start + 1, c.start + 1)
        assert row["slots"] == seq.block_ids[c.start // size] * size + c.start % size
        assert (row["keys"] % 2**64, row["temperatures"]) == (seq.request.noise_key, seq.request.params.temperature)
        assert host["tables"][i, : len(seq.block_ids)].tolist() == seq.block_ids
    for name, padding in (("sources", -1), ("slots", -1), ("lengths", 0), ("ids", 0), ("positions", 0), ("keys", 0)):
        assert (host[name][len(step) :] == padding).all()


def test_inputs_are_those_of_the_steps_of_random_traces() -> None:
    """Steps that decode, among others, with preemptions, sequences that end and steps in flight."""
    pending = known = preemptions = 0
    for seed in range(300):
        rng = random.Random(80_000 + seed)
        engine, capacity = random_engine(rng)
        engine.lookahead = rng.random() < 0.7
        size = engine.allocator.block_tokens
        rows, inputs = Rows(8, 64, size), Inputs(8, 64, torch.device("cpu"))
        compute = engine.compute

        def launch(step: Step, compute=compute, rows=rows, inputs=inputs, size=size):
            nonlocal pending, known
            if step.decodes:
                fill(inputs.host[0], step, rows)
                check_inputs(inputs.host[0], step, size)
                pending += int((step.source >= 0).sum())
                known += int((step.source < 0).sum())
            return compute(step)

        engine.compute = launch
        some = random_requests(rng, capacity, rng.randint(1, 8))
        engine.generate(
            replace(r, noise_key=rng.getrandbits(64), params=replace(r.params, temperature=rng.randrange(8) / 8))
            for r in some
        )
        preemptions += engine.scheduler.stats.preemptions
    assert min(pending, known, preemptions) > 100, "the traces no longer reach the interesting cases"
