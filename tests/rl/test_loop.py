"""The loop's order of events, with everything around it faked: who is called when, with what, and what is logged."""

from __future__ import annotations

import numpy as np
import pytest

from exactrl.algo.algorithm import get_algorithm
from exactrl.errors import ParityError
from exactrl.rl import loop
from exactrl.rl.collect import Collecting
from exactrl.rl.shaping import Shaping
from exactrl.sync.memory import sync
from exactrl.tasks.rewards import reward_many
from exactrl.types import Completion, EngineStats, Prompt, SamplingParams


class World:
    """Engine, trainer, task and judge in one; writes down every call."""

    def __init__(self, steps: int, **changes) -> None:
        self.calls: list[tuple] = []
        self.version = self.weight_version = 0
        self.stats = EngineStats()
        self.keys: list[int] = []
        self.drawn: list[tuple[int, int]] = []
        self.results: list[loop.StepResult] = []
        self.fail_at = 0
        self.arrives = "compute"
        self.plan = loop.Plan(
            **{
                "steps": steps, "audit_every": 0, "eval_every": 0,
                "collecting": Collecting(2, 2, SamplingParams(4, 0.9), 5, "stop", changes.pop("max_rounds", 1)),
                **changes,
            }
        )  # fmt: skip

    def run(self) -> None:
        judge, grpo = self, get_algorithm("grpo")
        loop.run(self.plan, self, self, self, grpo, judge, sync, self.results.append, lambda *a: None)

    # engine
    def generate(self, requests, on_progress=None):
        self.calls.append(("generate", self.weight_version, requests[0].params.temperature, len(requests)))
        self.keys += [r.noise_key for r in requests]
        values = np.zeros(2, np.float32)
        return [Completion(r.id, [1, 2], values.copy(), "length", self.weight_version) for r in requests]

    def load_weights(self, weights, version):
        self.calls.append(("load", version))
        self.weight_version = version
        return f"{self.arrives} {version}"

    def reset_cache(self):
        self.calls.append(("reset",))

    def sleep(self):
        self.calls.append(("sleep",))

    # trainer
    def step(self, samples, *, audit, observe):
        assert observe == self.observe
        self.calls.append(("step", audit, [s.advantage for s in samples]))
        observe("train", self.version, samples, [])
        self.version += 1
        return {"train/loss": 0.5}

    def named_weights(self):
        return iter(())

    def master_digest(self):
        return f"master {self.version}"

    def compute_digest(self):
        return f"compute {self.version}"

    # task
    def train_prompts(self, start, count):
        self.drawn.append((start, count))
        return [Prompt(f"p{i}", "", (1,), "") for i in range(count)]  # the same ones at every step

    def eval_prompts(self):
        return {"held": [Prompt(f"e{i}", "", (1,), "") for i in range(3)]}

    def decode(self, token_ids):
        return "text"

    def rewards(self, pairs):
        return reward_many(self.reward, pairs)

    def reward(self, prompt, sample):
        return float(sample.sample_index)

    # judge
    def begin(self, samples):
        self.calls.append(("begin", len(samples)))

    def observe(self, kind, version, samples, logprobs):
        self.calls.append(("observe", version))
        if version + 1 == self.fail_at:
            raise ParityError("differs")

    def metrics(self):
        self.calls.append(("judge",))
        return {"train/logprob_mismatch_tokens": 0}


def test_each_step_rolls_out_checks_trains_and_hands_over():
    world = World(2)
    world.run()
    names = [c[0] for c in world.calls]
    step = ["generate", "begin", "sleep", "step", "observe", "judge", "load"]
    assert names == ["load", *step, *step]
    assert [c[1] for c in world.calls if c[0] == "load"] == [0, 1, 2]
    assert [c[1] for c in world.calls if c[0] == "generate"] == [0, 1]  # at the weights just handed over
    assert len(set(world.keys)) == 8  # the same prompts get other noise in another step
    advantages = next(c[2] for c in world.calls if c[0] == "step")
    assert advantages == pytest.approx([-0.7071, 0.7071] * 2, abs=1e-4)
    rows = [r.metrics for r in world.results]
    assert [r["step"] for r in rows] == [1, 2]
    assert [r["train/weight_digest"] for r in rows] == ["master 1", "master 2"]
    assert [r["train/compute_digest"] for r in rows] == ["compute 1", "compute 2"]
    assert rows[0]["rollout/response_len/mean"] == 2.0
    assert rows[0]["rollout/truncated_ratio"] == 1.0
    assert (rows[0]["rollout/raw_reward"], rows[0]["rollout/zero_std_groups"]) == (0.5, 0)
    assert not any(k.startswith(("eval/", "train/kl")) for r in rows for k in r)
    assert world.drawn == [(0, 2), (2, 2)]
    assert [r.cursor for r in world.results] == [2, 4]


def test_overlong_responses_lose_advantage_but_not_reward():
    """The second sample of each prompt earns 1 and fills all 4 tokens, which costs 1: none is better than another."""

    class Wordy(World):
        def generate(self, requests, on_progress=None):
            found = super().generate(requests, on_progress)
            for c in found[1::2]:
                c.token_ids, c.logprobs = [1, 2, 3, 4], np.zeros(4, np.float32)
            return found

    for cache, advantage in ((0, 0.7071), (2, 0.0)):
        world = Wordy(1, shaping=Shaping(4, cache))
        world.run()
        assert world.calls[4][2] == pytest.approx([-advantage, advantage] * 2, abs=1e-4)
        (row,) = (r.metrics for r in world.results)
        assert (row["rollout/raw_reward"], row["rollout/zero_std_groups"]) == (0.5, 0)


def test_audited_steps():
    world = World(7, audit_every=3)
    world.run()
    assert [c[1] for c in world.calls if c[0] == "step"] == [True, False, True, False, False, True, False]
    world = World(3, audit_every=0)
    world.run()
    assert not any(c[1] for c in world.calls if c[0] == "step")


def test_evaluation_is_greedy_and_on_schedule():
    world = World(5, eval_every=2)
    world.run()
    evaluations = [(c[1], c[2], c[3]) for c in world.calls if c[0] == "generate" and c[3] == 3]
    assert evaluations == [(0, 0.0, 3), (2, 0.0, 3), (4, 0.0, 3), (5, 0.0, 3)]  # baseline, every 2nd, the last
    assert ["eval/held/mean" in r.metrics for r in world.results] == [True, True, False, True, True]


def test_a_violation_ends_the_run_before_anything_is_logged_or_handed_over():
    world = World(3)
    world.fail_at = 2
    with pytest.raises(ParityError):
        world.run()
    assert [r.step for r in world.results] == [1]
    assert world.version == 1
    assert world.calls[-1] == ("observe", 1)


def test_weights_that_arrive_changed_stop_the_run():
    world = World(1)
    world.arrives = "other"
    with pytest.raises(ParityError, match="kernels read other 0, the trainer's compute 0"):
        world.run()
    assert [c[0] for c in world.calls] == ["load"]
