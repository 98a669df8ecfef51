"""Groups of samples from prompts, and their rewards."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from exactrl.contract import noise_key
from exactrl.errors import ExactRLError, NonFiniteError, ParityError, UsageError
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
    """One group per prompt, with text; rewards are still 0.

    Raises ParityError when two responses would be sampled with the same noise: they would be no independent samples.
    """
    requests = [
        Request(f"{p.id}#{i}", p.token_ids, params, noise_key(draw.seed, draw.stream, draw.step, draw.retry, p.id, i))
        for p in prompts
        for i in range(samples_per_prompt)
    ]
    _require_own_noise(requests)
    completions = iter(engine.generate(requests, lambda done, total: progress("rollout", done, total)))
    groups = []
    for prompt in prompts:
        samples = [_sample(prompt, i, next(completions), params, task) for i in range(samples_per_prompt)]
        groups.append(Group(prompt, samples))
    return groups


def _require_own_noise(requests: Sequence[Request]) -> None:
    owner: dict[int, str] = {}
    for r in requests:
        if r.params.temperature and r.noise_key in owner:
            raise ParityError(
                f"requests {owner[r.noise_key]!r} and {r.id!r} have the same noise key {r.noise_key:#018x}; every "
                "response needs noise of its own (contract.noise_key)"
            )
        owner[r.noise_key] = r.id


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
    pairs = [(g.prompt, s) for g in groups for s in g.samples]
    failed = 0
    for (_, sample), scored in zip(pairs, task.rewards(pairs), strict=True):
        sample.reward_reason = scored.reason
        error = scored.error or _not_finite(scored.value, sample)
        if error is None:
            sample.reward = float(scored.value)
            continue
        failed += 1
        if on_error == "stop":
            raise _described(error, sample) from error
        sample.reward = 0.0 if on_error == "zero" else None
        sample.reward_error = f"{type(error).__name__}: {error}"
    return failed


def _not_finite(reward: object, sample: Sample) -> ExactRLError | None:
    if not isinstance(reward, numbers.Real):
        return UsageError(f"the reward of sample {sample.name} is {reward!r}, not a number")
    return None if math.isfinite(reward) else NonFiniteError(f"the reward of sample {sample.name} is {reward}")


def _described(error: Exception, sample: Sample) -> ExactRLError:
    if isinstance(error, ExactRLError):
        return error
    return UsageError(
        f"the reward function failed on sample {sample.name} with {type(error).__name__}: {error}; "
        'reward.on_error = "zero" or "drop" would go on and count it'
    )
