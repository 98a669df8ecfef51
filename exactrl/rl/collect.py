"""The groups that one step trains on: drawn once, or drawn until enough of them have a learning signal."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from exactrl.errors import UsageError
from exactrl.protocols import RolloutEngine, Task
from exactrl.rl.rollout import Draw, Progress, assign_rewards, rollout
from exactrl.rl.shaping import has_signal
from exactrl.types import EngineStats, Group, Prompt, Sample, SamplingParams


@dataclass(frozen=True, slots=True)
class Collecting:
    """How a step's groups are drawn. max_rounds > 1 is dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): groups
    of equal rewards are discarded and new prompts drawn in their place."""

    prompts_per_step: int
    samples_per_prompt: int
    sampling: SamplingParams
    seed: int
    on_reward_error: str
    max_rounds: int = 1


@dataclass(slots=True)
class Collected:
    """`groups` to train on; `discarded`: rolled out and rewarded, but without a signal; failed: failed reward calls."""

    groups: list[Group] = field(default_factory=list)
    discarded: list[Group] = field(default_factory=list)
    rounds: int = 0
    num_prompts: int = 0
    failed: int = 0

    @property
    def all_groups(self) -> list[Group]:
        return [*self.groups, *self.discarded]

    @property
    def samples(self) -> list[Sample]:
        return [s for g in self.groups for s in g.samples]

    @property
    def discarded_samples(self) -> list[Sample]:
        return [s for g in self.discarded for s in g.samples]


def collect(
    settings: Collecting, step: int, cursor: int, engine: RolloutEngine, task: Task, progress: Progress
) -> Collected:
    """Rolls out and rewards prompts number `cursor`, cursor + 1, ... of the task.

    Each round draws as many new prompts as groups are missing, with noise of its own; groups stay in the order of
    their prompts. After the last round a step is made with what there is. Raises UsageError when that is nothing.
    """
    engine.stats = EngineStats()
    found = Collected()
    seen: set[str] = set()
    while (missing := settings.prompts_per_step - len(found.groups)) and found.rounds < settings.max_rounds:
        prompts = task.train_prompts(cursor + found.num_prompts, missing)
        draw = Draw(settings.seed, "train", step, retry=found.rounds)
        drawn = rollout(
            engine, _unique(prompts, seen, found.rounds), settings.samples_per_prompt, settings.sampling, draw, task,
            progress,
        )  # fmt: skip
        found.failed += assign_rewards(drawn, task, settings.on_reward_error)
        found.num_prompts += missing
        found.rounds += 1
        for group in drawn:
            keep = settings.max_rounds == 1 or has_signal(group)
            (found.groups if keep else found.discarded).append(group)
    if not found.groups:
        raise _nothing_to_learn(settings, step, found)
    return found


def _unique(prompts: list[Prompt], seen: set[str], round_number: int) -> list[Prompt]:
    """A small data set may bring a prompt again in a later round: its id then says so, so that no two samples of a step
    have one name."""
    result = [replace(p, id=f"{p.id}@round{round_number}") if p.id in seen else p for p in prompts]
    seen.update(p.id for p in prompts)
    return result


def _nothing_to_learn(settings: Collecting, step: int, found: Collected) -> UsageError:
    rewards = [s.reward for s in found.discarded_samples if s.reward is not None]
    mean = f"mean reward {np.mean(rewards):.4g}" if rewards else "no reward at all"
    return UsageError(
        f"step {step}: dynamic sampling kept 0 of {found.num_prompts} groups in {found.rounds} rounds ({mean}, "
        f"{found.failed} failed rewards): in each of them all rewards are equal, so there is nothing to learn from. "
        "The task is too hard, too easy or finished for this model; raise rollout.samples_per_prompt or "
        "train.max_sampling_rounds, change the data, or set train.dynamic_sampling = false"
    )
