"""From rewards to advantages: penalties, failed rewards, groups too small, responses left out of the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from exactrl.algo.algorithm import Algorithm, TokenAdvantages
from exactrl.algo.kl import kl_estimate
from exactrl.algo.overlong import overlong_penalty
from exactrl.errors import UsageError
from exactrl.types import Group, Sample

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shaping:
    """What happens to rewards before advantages see them; `sample.reward` itself stays the reward function's.

    overlong_cache   tokens before max_length over which DAPO's penalty grows to 1; 0: no penalty
    overlong_filter  truncated responses stay out of the loss (their rewards still count for the baseline)
    kl_in_reward     weight of the KL penalty in the reward; 0: none
    """

    max_length: int = 0
    overlong_cache: int = 0
    overlong_filter: bool = False
    kl_in_reward: float = 0.0
    kl_estimator: str = "k3"


def set_advantages(groups: Sequence[Group], algorithm: Algorithm, shaping: Shaping) -> None:
    """Sets every sample's advantage and in_loss.

    A sample without a reward (it failed, and the policy is to drop it) has no part in the baseline and none in the
    loss; nor has a group left with fewer than algorithm.min_group rewards. Raises UsageError when nothing is left.
    """
    rewarded = [[s for s in g.samples if s.reward is not None] for g in groups]
    chosen = [samples for samples in rewarded if len(samples) >= algorithm.min_group]
    if not chosen:
        raise UsageError(
            f"failed rewards left no group its {algorithm.min_group} or more samples; nothing can be trained on"
        )
    for sample in (s for g in groups for s in g.samples):
        sample.in_loss, sample.advantage = False, 0.0
    if shaping.kl_in_reward and algorithm.token_advantages:
        _set_token_advantages(chosen, algorithm.token_advantages, shaping)
    else:
        outcomes = [[_outcome(s, shaping) - math.fsum(_penalties(s, shaping)) for s in samples] for samples in chosen]
        for samples, advantages in zip(chosen, algorithm.advantages(outcomes), strict=True):
            for sample, value in zip(samples, advantages, strict=True):
                sample.advantage = float(value)
    for sample in (s for samples in chosen for s in samples):
        sample.in_loss = not (shaping.overlong_filter and sample.finish_reason == "length")


def _set_token_advantages(chosen: list[list[Sample]], advantages_of: TokenAdvantages, shaping: Shaping) -> None:
    """`sample.advantage` is then that of the first token, to which all penalties are still to come."""
    rewards = [[_outcome(s, shaping) for s in samples] for samples in chosen]
    penalties = [[_penalties(s, shaping) for s in samples] for samples in chosen]
    for samples, per_token in zip(chosen, advantages_of(rewards, penalties), strict=True):
        for sample, values in zip(samples, per_token, strict=True):
            sample.token_advantages = values.astype(np.float32)
            sample.advantage = float(values[0]) if len(values) else 0.0


def _outcome(sample: Sample, shaping: Shaping) -> float:
    assert sample.reward is not None, sample.name
    return sample.reward + overlong_penalty(len(sample.token_ids), shaping.max_length, shaping.overlong_cache)


def _penalties(sample: Sample, shaping: Shaping) -> Values:
    """kl_in_reward x the estimate at each token, of the policy that sampled: float64 [len(token_ids)], or empty."""
    if not shaping.kl_in_reward:
        return np.zeros(0)
    return shaping.kl_in_reward * sample_kl(sample, shaping.kl_estimator)


def sample_kl(sample: Sample, estimator: str) -> Values:
    """KL to the reference policy at each token, of the policy that sampled, in nats: float64 [len(token_ids)].

    The logprobs are subtracted in float64: where their bits agree, every estimate is exactly 0.
    """
    assert sample.reference_logprobs is not None, sample.name
    ours, reference = (torch.from_numpy(x).double() for x in (sample.logprobs, sample.reference_logprobs))
    return kl_estimate(ours, reference, estimator).numpy()


def has_signal(group: Group) -> bool:
    """Whether the rewards of a group differ, as the reward function gave them: penalties for length do not count, or a
    group without any right answer would pass because its lengths differ (DAPO, arXiv:2503.14476, eq. 11)."""
    return len({s.reward for s in group.samples if s.reward is not None}) > 1
