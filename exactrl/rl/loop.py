"""The RL loop: roll out, reward, train, hand the weights over; every step's logprobs pass the oracle."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from exactrl.algo.algorithm import Algorithm
from exactrl.algo.overlong import overlong_penalty
from exactrl.errors import UsageError
from exactrl.protocols import RolloutEngine, Task, Trainer
from exactrl.rl.rollout import Draw, Progress, assign_rewards, rollout
from exactrl.types import EngineStats, Group, Sample, SamplingParams

Metrics = dict[str, Any]
LogprobArray = NDArray[np.float32]


class Judge(Protocol):
    """parity.Oracle, or anything that compares a step's logprobs."""

    def begin(self, samples: Sequence[Sample]) -> None: ...

    def observe(
        self, kind: str, version: int, samples: Sequence[Sample], logprobs: Sequence[LogprobArray], /
    ) -> None: ...

    def metrics(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of the loop: counts per step, sampling, and what happens every how many steps (0: never)."""

    steps: int
    prompts_per_step: int
    samples_per_prompt: int
    sampling: SamplingParams
    seed: int
    audit_every: int
    eval_every: int
    on_reward_error: str
    overlong_cache: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """`metrics` as in metrics.jsonl; `groups` are the step's samples."""

    step: int
    metrics: Metrics
    groups: list[Group]


def run(
    plan: Plan,
    engine: RolloutEngine,
    trainer: Trainer,
    task: Task,
    algorithm: Algorithm,
    judge: Judge,
    sync: Callable[[Trainer, RolloutEngine], str],
    on_step: Callable[[StepResult], None],
    progress: Progress,
) -> None:
    """Runs plan.steps steps; `on_step` is called after each. Weights are handed over before the first step, too.

    Held-out results in a step's row are those after its update, except in the first row: there they are those before
    any update, the baseline.
    """
    sync(trainer, engine)
    before = evaluate(plan, 0, engine, task, progress)
    for step in range(1, plan.steps + 1):
        clock = Clock()
        groups = roll_out_step(plan, step, engine, task, progress)
        metrics = rollout_metrics(groups, engine.stats)
        judge.begin([s for g in groups for s in g.samples])
        failed = assign_rewards(groups, task, plan.on_reward_error)
        samples = set_advantages(groups, algorithm, plan.sampling.max_new_tokens, plan.overlong_cache)
        metrics |= reward_metrics(groups, failed)
        metrics["rollout/dropped_samples"] = metrics["rollout/num_samples"] - len(samples)
        clock.lap("perf/rollout_time")
        progress("train", 0, len(samples))
        audit = plan.audit_every > 0 and (step == 1 or step % plan.audit_every == 0)
        metrics |= trainer.step(samples, audit=audit, observe=judge.observe)
        metrics |= judge.metrics()
        clock.lap("perf/train_time")
        metrics["train/compute_digest"] = sync(trainer, engine)
        metrics["train/weight_digest"] = trainer.master_digest()
        clock.lap("perf/sync_time")
        metrics |= clock.metrics(samples)
        if step == 1 < plan.steps:
            metrics |= before
        elif plan.eval_every and (step % plan.eval_every == 0 or step == plan.steps):
            metrics |= evaluate(plan, step, engine, task, progress)
        on_step(StepResult(step, {"step": step, **metrics}, groups))


def roll_out_step(plan: Plan, step: int, engine: RolloutEngine, task: Task, progress: Progress) -> list[Group]:
    engine.stats = EngineStats()
    prompts = task.train_prompts(step - 1, plan.prompts_per_step)
    draw = Draw(plan.seed, "train", step)
    return rollout(engine, prompts, plan.samples_per_prompt, plan.sampling, draw, task, progress)


def set_advantages(
    groups: list[Group], algorithm: Algorithm, max_length: int = 0, overlong_cache: int = 0
) -> list[Sample]:
    """Advantages from rewards; returns the samples to train on. Groups that failed rewards left too small are removed.

    Only advantages see the penalty for responses near max_length: `sample.reward` stays the reward function's.
    Raises UsageError when nothing is left.
    """
    least = algorithm.min_group
    groups[:] = [g for g in groups if len(g.samples) >= least]
    if not groups:
        raise UsageError(f"failed rewards left no group its {least} or more samples; nothing can be trained on")
    advantages = algorithm.advantages(
        [[s.reward + overlong_penalty(len(s.token_ids), max_length, overlong_cache) for s in g.samples] for g in groups]
    )
    for group, values in zip(groups, advantages, strict=True):
        for sample, value in zip(group.samples, values, strict=True):
            sample.advantage = float(value)
    return [s for g in groups for s in g.samples]


def evaluate(plan: Plan, step: int, engine: RolloutEngine, task: Task, progress: Progress) -> Metrics:
    """Mean reward of greedy responses on every held-out set, `eval/<name>/mean`; nothing where eval_every is 0.

    A failed reward counts as 0 and in `eval/<name>/failed_rewards`, or stops the run (reward.on_error = "stop").
    """
    if not plan.eval_every:
        return {}
    params = SamplingParams(plan.sampling.max_new_tokens, 0.0, plan.sampling.stop_token_ids)
    result: Metrics = {}
    begin = time.perf_counter()
    for name, prompts in task.eval_prompts().items():
        draw = Draw(plan.seed, f"eval/{name}", step)
        report = lambda _, done, total: progress("eval", done, total)  # noqa: E731
        groups = rollout(engine, prompts, 1, params, draw, task, report)
        policy = "stop" if plan.on_reward_error == "stop" else "zero"  # a mean over survivors would flatter
        result[f"eval/{name}/failed_rewards"] = assign_rewards(groups, task, policy)
        result[f"eval/{name}/mean"] = float(np.mean([s.reward for g in groups for s in g.samples]))
    return result | {"perf/eval_time": time.perf_counter() - begin}


def rollout_metrics(groups: Sequence[Group], stats: EngineStats) -> Metrics:
    lengths = [len(s.token_ids) for g in groups for s in g.samples]
    truncated = [s.finish_reason == "length" for g in groups for s in g.samples]
    return {
        "rollout/response_len/mean": float(np.mean(lengths)),
        "rollout/response_len/max": max(lengths),
        "rollout/truncated_ratio": float(np.mean(truncated)),
        "rollout/num_samples": len(lengths),
        "rollout/preemptions": stats.preemptions,
        "rollout/prefix_hit_tokens": stats.cached_tokens,
        "rollout/recomputed_tokens": stats.recomputed_tokens,
        "rollout/engine_steps": stats.steps,
    }


def reward_metrics(groups: Sequence[Group], failed: int) -> Metrics:
    rewards = [s.reward for g in groups for s in g.samples]
    equal = [len({s.reward for s in g.samples}) == 1 for g in groups]
    return {
        "rollout/raw_reward": float(np.mean(rewards)),
        "rollout/zero_std_groups": sum(equal),
        "rollout/failed_rewards": failed,
    }


class Clock:
    """Seconds of each part of a step."""

    def __init__(self) -> None:
        self.begin = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self.last
        self.last = now

    def metrics(self, samples: Sequence[Sample]) -> Metrics:
        """Laps, their sum, tokens per second: response tokens rolled out; prompt and response tokens trained on."""
        response = sum(len(s.token_ids) for s in samples)
        trained = response + sum(len(s.prompt_token_ids) for s in samples)
        return self.laps | {
            "perf/step_time": self.last - self.begin,
            "perf/rollout_tokens_per_sec": response / self.laps["perf/rollout_time"],
            "perf/train_tokens_per_sec": trained / self.laps["perf/train_time"],
        }
