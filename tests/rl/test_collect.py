"""Dynamic sampling: rounds, order, noise, and what happens when the batch never fills."""

from __future__ import annotations

import numpy as np
import pytest

from exactrl.errors import UsageError
from exactrl.rl.collect import Collecting, collect
from exactrl.tasks.rewards import reward_many
from exactrl.types import Completion, EngineStats, Prompt, SamplingParams


class World:
    """Engine and task: an endless row of prompts (`size` different ones), rewards by (prompt number, sample)."""

    def __init__(self, rewards, size=10**6) -> None:
        self.table, self.size = rewards, size
        self.stats, self.weight_version = EngineStats(), 0
        self.drawn: list[int] = []
        self.keys: list[int] = []
        self.names: list[str] = []

    def train_prompts(self, start, count):
        self.drawn += range(start, start + count)
        return [Prompt(f"p{i % self.size}", "", (1,), "", {"number": i}) for i in range(start, start + count)]

    def generate(self, requests, on_progress=None):
        self.keys += [r.noise_key for r in requests]
        self.names += [r.id for r in requests]
        return [Completion(r.id, [1, 2], np.zeros(2, np.float32), "stop", 0) for r in requests]

    def decode(self, token_ids):
        return ""

    def rewards(self, pairs):
        return reward_many(self.reward, pairs)

    def reward(self, prompt, sample):
        return self.table(prompt.metadata["number"], sample.sample_index)


def gather(world, *, cursor=0, rounds=10, prompts=4, on_error="stop", step=1):
    settings = Collecting(prompts, 2, SamplingParams(4), 7, on_error, rounds)
    return collect(settings, step, cursor, world, world, lambda *a: None)


def every_third(number, index):
    return float(index) if number % 3 == 0 else 1.0


def test_equal_groups_are_replaced_by_new_prompts_in_order():
    world = World(every_third)
    found = gather(world)
    assert [g.prompt.metadata["number"] for g in found.groups] == [0, 3, 6, 9]
    assert [g.prompt.metadata["number"] for g in found.discarded] == [1, 2, 4, 5, 7, 8]
    assert world.drawn == list(range(found.num_prompts)) == list(range(10))
    assert found.rounds > 2
    assert len(set(world.keys)) == len(world.keys) == 20
    assert len(found.samples) == 8
    assert len(found.discarded_samples) == 12


def test_it_is_a_pure_function_of_step_and_cursor():
    a, b = World(every_third), World(every_third)
    gather(a, cursor=5)
    gather(b, cursor=5)
    assert (a.drawn, a.keys) == (b.drawn, b.keys)
    assert a.drawn[0] == 5
    other = World(every_third)
    gather(other, cursor=5, step=2)
    assert not set(other.keys) & set(a.keys)


def test_without_dynamic_sampling_everything_is_kept():
    found = gather(World(every_third), rounds=1)
    assert (len(found.groups), len(found.discarded), found.rounds, found.num_prompts) == (4, 0, 1, 4)


def test_D_05_the_last_round_leaves_a_smaller_step():
    found = gather(World(lambda number, index: float(index) if number == 2 else 0.0), rounds=3)
    assert [g.prompt.metadata["number"] for g in found.groups] == [2]
    assert (found.rounds, found.num_prompts) == (3, 4 + 3 + 3)


def test_D_04_a_task_that_is_always_failed_stops_the_run():
    world = World(lambda number, index: 0.0)
    with pytest.raises(UsageError, match=r"step 1: dynamic sampling kept 0 of 40 groups in 10 rounds \(mean reward 0,"):
        gather(world)
    assert len(world.drawn) == 40


def test_rewards_that_all_fail_are_named_too():
    def broken(number, index):
        raise ValueError("broken")

    with pytest.raises(UsageError, match=r"no reward at all, 80 failed rewards"):
        gather(World(broken), on_error="drop")


def test_a_small_data_set_never_gives_one_sample_two_times():
    """Three prompts, drawn again in later rounds: other noise and other names."""
    world = World(lambda number, index: float(index) if number > 8 else 0.0, size=3)
    found = gather(world, prompts=3)
    assert len(set(world.keys)) == len(world.keys)
    assert len(set(world.names)) == len(world.names)
    assert found.groups[0].prompt.id.startswith("p0@round")
