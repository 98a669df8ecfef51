"""The table of what every step moves, and a step's columns."""

from __future__ import annotations

import random

import numpy as np

from exactrl.engine.counters import Counters
from exactrl.engine.sequence import Sequence
from exactrl.engine.step import Chunk, Step
from exactrl.types import Request, SamplingParams


def test_rows_come_and_go_as_in_a_list() -> None:
    rng = random.Random(0)
    counters, rows = Counters(9), []
    for _ in range(2000):
        if len(rows) < 9 and rng.random() < 0.5:
            rows.append({name: rng.randrange(100) for name in Counters.NAMES})
            counters.append(**rows[-1])
        elif rng.random() < 0.5:
            rows = rows[: rng.randint(0, len(rows))]
            counters.resize(len(rows))
        else:
            kept = [rng.random() < 0.7 for _ in rows]
            rows = [row for row, keep in zip(rows, kept, strict=True) if keep]
            counters.keep(np.array(kept, np.bool_))
        for name in Counters.NAMES:
            assert getattr(counters, name).tolist() == [row[name] for row in rows]
            getattr(counters, name)[:] += 1  # a view
        rows = [{name: value + 1 for name, value in row.items()} for row in rows]


def step_of(*chunks: tuple[int, int, bool, int]) -> Step:
    seqs = [Sequence(i, Request(str(i), (1, 2, 3), SamplingParams(9))) for i in range(len(chunks))]
    start, num_tokens, samples, source = (np.array(column) for column in zip(*chunks, strict=True))
    return Step(seqs, start, num_tokens, samples, source, np.zeros(0, np.int64), np.arange(len(chunks)))


def test_a_step_is_its_chunks() -> None:
    step = step_of((0, 2, False, -1), (5, 1, True, 3))
    assert list(step) == [Chunk(step.seqs[0], 0, 2, False, -1), Chunk(step.seqs[1], 5, 1, True, 3)]
    assert (len(step), step.sampling, step.decodes) == (2, [step.seqs[1]], False)


def test_one_token_of_each_that_samples_is_a_decode() -> None:
    decode = step_of((4, 1, True, 0), (5, 1, True, 1))
    assert (decode.decodes, decode.sampling) == (True, decode.seqs)
    assert not step_of((4, 1, True, 0), (5, 2, True, -1)).decodes
    assert not step_of((4, 1, True, 0), (0, 1, False, -1)).decodes
