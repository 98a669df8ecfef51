"""The RL loop: roll out, reward, train, hand the weights over; every step's logprobs pass the oracle."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from exactrl.algo.algorithm import Algorithm
from exactrl.protocols import RolloutEngine, Task, Trainer
from exactrl.rl.collect import Collected, Collecting, collect
from exactrl.rl.evaluation import score
from exactrl.rl.rollout import Draw, Progress, assign_rewards, rollout
from exactrl.rl.shaping import Shaping, has_signal, sample_kl, set_advantages
from exactrl.tasks.grading.outcome import count
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
    """Settings of the loop: how groups are collected and rewards shaped, and what happens every how many steps (0:
    never). kl: whether responses are scored by the reference policy, for a penalty in loss or reward."""

    steps: int
    collecting: Collecting
    audit_every: int
    eval_every: int
    eval_samples: int = 1
    eval_temperature: float = 0.0
    shaping: Shaping = field(default_factory=Shaping)
    kl: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """`metrics` as in metrics.jsonl; `groups` are the step's samples, discarded ones included; `cursor`: prompts drawn
    since the start of the run."""

    step: int
    metrics: Metrics
    groups: list[Group]
    cursor: int


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins: steps already made, prompts already drawn."""

    step: int = 0
    cursor: int = 0


FROM_SCRATCH = Start()


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
    start: Start = FROM_SCRATCH,
) -> None:
    """Runs steps start.step + 1 to plan.steps; `on_step` is called after each. Weights are handed over before the first
    step, too.

    Held-out results in a step's row are those after its update, except in the first row: there they are those before
    any update, the baseline.
    """
    sync(trainer, engine)
    before = evaluate(plan, 0, engine, task, progress) if start.step == 0 else {}
    cursor = start.cursor
    for step in range(start.step + 1, plan.steps + 1):
        clock = Clock()
        found = collect(plan.collecting, step, cursor, engine, task, progress)
        cursor += found.num_prompts
        judge.begin(found.samples + found.discarded_samples)
        metrics = rollout_metrics(found, engine.stats)
        clock.lap("perf/rollout_time")
        engine.sleep()
        metrics |= score_reference(plan, trainer, found.samples)
        set_advantages(found.groups, algorithm, plan.shaping)
        metrics |= loss_metrics(plan, found)
        progress("train", 0, len(found.samples))
        audit = plan.audit_every > 0 and (step == 1 or step % plan.audit_every == 0)
        if audit and found.discarded:
            judge.observe("rescore", trainer.version, found.discarded_samples, trainer.score(found.discarded_samples))
        metrics |= trainer.step(found.samples, audit=audit, observe=judge.observe)
        metrics |= judge.metrics()
        clock.lap("perf/train_time")
        metrics["train/compute_digest"] = sync(trainer, engine)
        metrics["train/weight_digest"] = trainer.master_digest()
        clock.lap("perf/sync_time")
        metrics |= clock.metrics(found)
        if step == 1 < plan.steps:
            metrics |= before
        elif plan.eval_every and (step % plan.eval_every == 0 or step == plan.steps):
            metrics |= evaluate(plan, step, engine, task, progress)
        on_step(StepResult(step, {"step": step, **metrics}, found.all_groups, cursor))


def score_reference(plan: Plan, trainer: Trainer, samples: Sequence[Sample]) -> Metrics:
    """Gives samples the reference policy's logprobs. `train/kl` is the mean over tokens of the estimate for the policy
    that sampled; it is exactly 0 before the first update, since both obey the same contract."""
    if not plan.kl:
        return {}
    for sample, logprobs in zip(samples, trainer.score_reference(samples), strict=True):
        sample.reference_logprobs = logprobs
    return {"train/kl": float(np.mean(np.concatenate([sample_kl(s, plan.shaping.kl_estimator) for s in samples])))}


def evaluate(plan: Plan, step: int, engine: RolloutEngine, task: Task, progress: Progress) -> Metrics:
    """Every held-out set: `eval/<name>/mean` (mean reward), `/ci95` (half of its confidence interval) and `/pass@k`;
    nothing where eval_every is 0.

    A failed reward counts as 0 and in `eval/<name>/failed_rewards`, or stops the run (reward.on_error = "stop").
    """
    if not plan.eval_every:
        return {}
    c = plan.collecting
    params = SamplingParams(c.sampling.max_new_tokens, plan.eval_temperature, c.sampling.stop_token_ids)
    result: Metrics = {}
    begin = time.perf_counter()
    for name, prompts in task.eval_prompts().items():
        draw = Draw(c.seed, f"eval/{name}", step)
        report = lambda _, done, total: progress("eval", done, total)  # noqa: E731
        groups = rollout(engine, prompts, plan.eval_samples, params, draw, task, report)
        policy = "stop" if c.on_reward_error == "stop" else "zero"  # a mean over survivors would flatter
        result[f"eval/{name}/failed_rewards"] = assign_rewards(groups, task, policy)
        found = score(groups)
        result[f"eval/{name}/mean"] = found.mean
        if found.low is not None and found.high is not None:
            result[f"eval/{name}/ci95"] = (found.high - found.low) / 2
        result |= {f"eval/{name}/pass@{k}": value for k, value in found.pass_at.items()}
    engine.reset_cache()  # or the next step's scheduling would depend on whether an evaluation came before it
    return result | {"perf/eval_time": time.perf_counter() - begin}


def rollout_metrics(found: Collected, stats: EngineStats) -> Metrics:
    """Of all that was sampled, discarded groups included: what the policy does, not what was chosen of it."""
    samples = [*found.samples, *found.discarded_samples]
    lengths = [len(s.token_ids) for s in samples]
    metrics = {
        "rollout/response_len/mean": float(np.mean(lengths)),
        "rollout/response_len/max": max(lengths),
        "rollout/truncated_ratio": float(np.mean([s.finish_reason == "length" for s in samples])),
        "rollout/num_samples": len(samples),
        "rollout/zero_std_groups": sum(not has_signal(g) for g in found.all_groups),
        "rollout/failed_rewards": found.failed,
        "rollout/preemptions": stats.preemptions,
        "rollout/prefix_hit_tokens": stats.cached_tokens,
        "rollout/recomputed_tokens": stats.recomputed_tokens,
        "rollout/engine_steps": stats.steps,
    }
    if rewards := _rewards(found.all_groups):
        metrics["rollout/raw_reward"] = float(np.mean(rewards))
    if reasons := [s.reward_reason for s in samples if s.reward_reason]:
        metrics |= {f"rollout/reward_{kind}": n for kind, n in count(reasons).items()}
    return metrics


def _rewards(groups: Sequence[Group]) -> list[float]:
    return [s.reward for g in groups for s in g.samples if s.reward is not None]


def loss_metrics(plan: Plan, found: Collected) -> Metrics:
    """What was left out of the loss, each reason counted apart; reasons that are switched off are absent."""
    left_out = [s for s in found.samples if not s.in_loss]
    cut = [s for s in left_out if plan.shaping.overlong_filter and s.finish_reason == "length"]
    metrics: Metrics = {"rollout/dropped_samples": len(left_out) - len(cut)}
    if plan.shaping.overlong_filter:
        metrics["rollout/overlong_filtered"] = len(cut)
    if plan.collecting.max_rounds > 1:
        metrics |= {"rollout/sampling_rounds": found.rounds, "rollout/discarded_groups": len(found.discarded)}
    return metrics


class Clock:
    """Seconds of each part of a step."""

    def __init__(self) -> None:
        self.begin = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self.last
        self.last = now

    def metrics(self, found: Collected) -> Metrics:
        """Laps, their sum, tokens per second: response tokens rolled out; prompt and response tokens trained on."""
        response = sum(len(s.token_ids) for s in [*found.samples, *found.discarded_samples])
        trained = sum(len(s.token_ids) + len(s.prompt_token_ids) for s in found.samples)
        return self.laps | {
            "perf/step_time": self.last - self.begin,
            "perf/rollout_tokens_per_sec": response / self.laps["perf/rollout_time"],
            "perf/train_tokens_per_sec": trained / self.laps["perf/train_time"],
        }
