"""Groups from prompts, and what a failing reward does."""

from __future__ import annotations

import numpy as np
import pytest

from exactrl.contract import noise_key
from exactrl.errors import NonFiniteError, ParityError, UsageError
from exactrl.rl.rollout import Draw, assign_rewards, rollout
from exactrl.tasks.rewards import reward_many
from exactrl.types import Completion, EngineStats, Group, Prompt, Sample, SamplingParams


class FakeEngine:
    """Answers each request with its own noise key's last digits."""

    weight_version, stats = 3, EngineStats()

    def __init__(self):
        self.requests = []

    def generate(self, requests, on_progress=None):
        self.requests += requests
        on_progress(len(requests), len(requests))
        return [
            Completion(r.id, [r.noise_key % 97, 5], np.array([-1, -2], np.float32), "stop", self.weight_version)
            for r in requests
        ]


class FakeTask:
    """Rewards by sample name; an exception in the table is raised."""

    def __init__(self, rewards=None):
        self.table = rewards or {}

    def decode(self, token_ids):
        return "-".join(map(str, token_ids))

    def rewards(self, pairs):
        return reward_many(self.reward, pairs)

    def reward(self, prompt, sample):
        value = self.table.get(sample.name, 0.5)
        if isinstance(value, Exception):
            raise value
        return value


PROMPTS = [Prompt("a", "A", (1, 2), "x"), Prompt("b", "B", (3,), "y")]


def groups(count: int = 3) -> list[Group]:
    return [
        Group(p, [Sample(p.id, i, p.token_ids, [7], np.zeros(1, np.float32), "stop", 0, 1.0) for i in range(count)])
        for p in PROMPTS
    ]


def test_groups_are_the_engines_completions_in_order():
    engine, seen = FakeEngine(), []
    draw, params = Draw(11, "train", 4, 2), SamplingParams(8, 0.7, (5,))
    found = rollout(engine, PROMPTS, 2, params, draw, FakeTask(), lambda *a: seen.append(a))
    assert [g.prompt.id for g in found] == ["a", "b"]
    assert [s.name for g in found for s in g.samples] == ["a#0", "a#1", "b#0", "b#1"] == [r.id for r in engine.requests]
    for prompt, group in zip(PROMPTS, found, strict=True):
        for i, s in enumerate(group.samples):
            token = noise_key(11, "train", 4, 2, prompt.id, i) % 97
            assert (s.token_ids, s.text) == ([token, 5], f"{token}-5")
            assert (s.prompt_token_ids, s.label, s.weight_version) == (prompt.token_ids, prompt.label, 3)
            assert (s.temperature, s.logprobs.tolist()) == (0.7, [-1.0, -2.0])
    assert {r.params for r in engine.requests} == {params}
    assert seen == [("rollout", 4, 4)]


def test_greedy_samples_are_scored_at_temperature_1():
    greedy = SamplingParams(8, 0.0)
    (group,) = rollout(FakeEngine(), PROMPTS[:1], 1, greedy, Draw(0, "e", 0), FakeTask(), lambda *a: None)
    assert group.samples[0].temperature == 1.0


@pytest.mark.parametrize(
    "changes", [{"seed": 12}, {"stream": "eval/x"}, {"step": 5}, {"retry": 1}], ids=lambda c: next(iter(c))
)
def test_every_part_of_a_draw_changes_the_noise(changes):
    base = {"seed": 11, "stream": "train", "step": 4, "retry": 0}
    keys = []
    for draw in (Draw(**base), Draw(**{**base, **changes})):
        engine = FakeEngine()
        rollout(engine, PROMPTS, 2, SamplingParams(4), draw, FakeTask(), lambda *a: None)
        keys += [r.noise_key for r in engine.requests]
    assert len(set(keys)) == 8


def test_two_responses_with_the_same_noise_are_refused(monkeypatch):
    """They would be one response twice; greedy ones need no noise."""
    monkeypatch.setattr("exactrl.rl.rollout.noise_key", lambda *parts: 7)
    engine, draw = FakeEngine(), Draw(0, "train", 1)
    with pytest.raises(ParityError, match=r"requests 'a#0' and 'a#1' have the same noise key 0x0{15}7"):
        rollout(engine, PROMPTS, 2, SamplingParams(4), draw, FakeTask(), lambda *a: None)
    assert engine.requests == []
    rollout(engine, PROMPTS, 1, SamplingParams(4, 0.0), draw, FakeTask(), lambda *a: None)


FAILURES = [RuntimeError("broken"), float("nan"), float("inf"), "0.5", None]


@pytest.mark.parametrize("failure", FAILURES, ids=repr)
def test_on_error_stop(failure):
    with pytest.raises(NonFiniteError if isinstance(failure, float) else UsageError, match="b#1"):
        assign_rewards(groups(), FakeTask({"b#1": failure}), "stop")


@pytest.mark.parametrize("failure", FAILURES, ids=repr)
def test_on_error_zero_is_counted(failure):
    found = groups()
    assert assign_rewards(found, FakeTask({"b#1": failure, "a#0": failure}), "zero") == 2
    assert [[s.reward for s in g.samples] for g in found] == [[0.0, 0.5, 0.5], [0.5, 0.0, 0.5]]


@pytest.mark.parametrize("failure", FAILURES, ids=repr)
def test_on_error_drop_is_counted(failure):
    found = groups()
    assert assign_rewards(found, FakeTask({"b#1": failure, "b#2": failure}), "drop") == 2
    samples = [s for g in found for s in g.samples]
    assert [s.reward for s in samples] == [0.5] * 4 + [None] * 2
    assert [bool(s.reward_error) for s in samples] == [False] * 4 + [True] * 2


def test_an_interrupt_is_not_a_failed_reward():
    class Stopped(FakeTask):
        def reward(self, prompt, sample):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        assign_rewards(groups(), Stopped(), "zero")
