"""Rewards of a group -> one advantage per sample, in float64 on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from exactrl.errors import NonFiniteError, UsageError

EPSILON = 1e-6  # keeps nearly equal rewards finite; verl and slime use the same, TRL 1e-4
LARGEST = 1e100  # squares of larger rewards come near the end of float64, and an infinite std would read as advantage 0


def grpo_advantages(rewards: ArrayLike, name: str = "the group") -> NDArray[np.float64]:
    """(r - mean) / (std + 1e-6) over the samples of one prompt: rewards [G] -> float64 [G], in their order.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2 (outcome supervision). The paper leaves open which standard
    deviation it means; this is the sample one (divisor G - 1), as torch.std computes it in TRL, verl and slime.
    Sums are exactly rounded, so a sample's advantage does not depend on the order of the group. Equal rewards give
    exactly 0 (their rounded mean may differ from them in the last bit, which 1e-6 would blow up).

    Raises UsageError for a group of fewer than two, NonFiniteError naming the first reward that is NaN, infinite or
    above 1e100. `name` is what messages call the group.
    """
    values = np.asarray(rewards, np.float64)
    if values.ndim != 1 or len(values) < 2:
        raise UsageError(
            f"{name} has rewards of shape {values.shape}; a group-relative advantage needs a flat list of at least 2 "
            "(rollout.samples_per_prompt)"
        )
    for i, value in enumerate(values):
        if not abs(value) <= LARGEST:
            raise NonFiniteError(
                f"reward {i} of {name} is {value}; rewards must be finite and at most {LARGEST:g} in size: "
                "check the reward function, or choose in reward.on_error what a failed reward does"
            )
    if (values == values[0]).all():
        return np.zeros(len(values))
    centred = values - math.fsum(values) / len(values)
    std = math.sqrt(math.fsum(centred * centred) / (len(values) - 1))
    return centred / (std + EPSILON)


def grpo_step_advantages(groups: Sequence[ArrayLike]) -> list[NDArray[np.float64]]:
    """`grpo_advantages` of every group of a step; messages count groups from 0."""
    return [grpo_advantages(rewards, f"group {i}") for i, rewards in enumerate(groups)]
