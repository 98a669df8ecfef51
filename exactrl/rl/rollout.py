"""Groups of samples from prompts, and their rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from exactrl.contract import noise_key
from exactrl.errors import ExactRLError, NonFiniteError, UsageError
from exactrl.protocols import RolloutEngine, Task
from exactrl.types import Completion, Group, Prompt, Request, Sample, SamplingParams

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Draw:
    """What the noise of a rollout is keyed by, besides the prompt and the sample index (numerics.md, "sampling")."""

    seed: int
    stream: str
    step: int
    retry: int = 0


def rollout(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    params: SamplingParams,
    draw: Draw,
    task: Task,
    progress: Progress,
) -> list[Group]:
    """One group per prompt, with text; rewards are still 0."""
    requests = [
        Request(f"{p.id}#{i}", p.token_ids, params, noise_key(draw.seed, draw.stream, draw.step, draw.retry, p.id, i))
        for p in prompts
        for i in range(samples_per_prompt)
    ]
    completions = iter(engine.generate(requests, lambda done, total: progress("rollout", done, total)))
    groups = []
    for prompt in prompts:
        samples = [_sample(prompt, i, next(completions), params, task) for i in range(samples_per_prompt)]
        groups.append(Group(prompt, samples))
    return groups


def _sample(prompt: Prompt, index: int, completion: Completion, params: SamplingParams, task: Task) -> Sample:
    return Sample(
        prompt_id=prompt.id,
        sample_index=index,
        prompt_token_ids=prompt.token_ids,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
        weight_version=completion.weight_version,
        temperature=params.temperature or 1.0,
        text=task.decode(completion.token_ids),
        label=prompt.label,
    )


def assign_rewards(groups: Sequence[Group], task: Task, on_error: str) -> int:
    """Sets every sample's reward; returns how many reward calls failed.

    on_error: "stop" raises UsageError naming the sample; "zero" gives it 0; "drop" leaves it without a reward, so that
    it plays no part in baseline and loss. `sample.reward_error` keeps what went wrong. Never a silent 0.
    """
    failed = 0
    for group in groups:
        for sample in group.samples:
            try:
                sample.reward = _finite(task.reward(group.prompt, sample), sample)
            except Exception as error:  # a user's reward may raise anything
                failed += 1
                if on_error == "stop":
                    raise _described(error, sample) from error
                sample.reward = 0.0 if on_error == "zero" else None
                sample.reward_error = f"{type(error).__name__}: {error}"
    return failed


def _finite(reward: float, sample: Sample) -> float:
    if not math.isfinite(reward):
        raise NonFiniteError(f"the reward of sample {sample.name} is {reward}")
    return float(reward)


def _described(error: Exception, sample: Sample) -> ExactRLError:
    if isinstance(error, ExactRLError):
        return error
    return UsageError(
        f"the reward function failed on sample {sample.name} with {type(error).__name__}: {error}; "
        'reward.on_error = "zero" or "drop" would go on and count it'
    )
