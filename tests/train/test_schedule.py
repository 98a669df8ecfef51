"""Learning-rate schedules at their corners."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from exactrl.train.schedule import learning_rate


def rates(schedule, steps=10, **settings):
    return [learning_rate(s, peak=0.5, total_steps=steps, schedule=schedule, **settings) for s in range(1, steps + 1)]


def test_constant_is_the_peak_itself():
    assert rates("constant") == [0.5] * 10


def test_linear():
    assert rates("linear") == pytest.approx([0.5 * (1 - i / 10) for i in range(10)])
    assert rates("linear", min_ratio=0.2) == pytest.approx([0.1 + 0.4 * (1 - i / 10) for i in range(10)])


def test_cosine():
    assert rates("cosine") == pytest.approx([0.25 * (1 + math.cos(math.pi * i / 10)) for i in range(10)])
    assert rates("cosine", min_ratio=1.0) == pytest.approx([0.5] * 10)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_rises_to_the_peak_and_hands_over(schedule):
    found = rates(schedule, warmup_steps=4)
    assert found[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    alone = rates(schedule, steps=6)  # what follows is the schedule of the steps that are left
    assert found[4:] == pytest.approx(alone)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_it_only_falls_never_to_0_within_the_run_and_stays_low_after(schedule):
    found = rates(schedule)
    assert all(a > b > 0 for a, b in pairwise(found))
    settings = {"peak": 0.5, "total_steps": 10, "schedule": schedule, "min_ratio": 0.25}
    assert [learning_rate(s, **settings) for s in (11, 12, 100)] == pytest.approx([0.125] * 3)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_of_one_step_uses_the_peak(schedule):
    assert rates(schedule, steps=1) == [0.5]
