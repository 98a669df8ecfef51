"""Rewards of a step -> one advantage per sample, in float64 on the host.

Every function here takes all groups of a step and gives float64 [G] for each, in order; "group" below is a prompt's
samples. What all of them do:
  equal rewards      advantage exactly 0 (a rounded mean may differ from them in the last bit, which 1e-6 would blow up)
  non-finite reward  NonFiniteError naming group and reward; never a NaN, never a silent 0
  group too small    UsageError; the loop removes such groups before (rl.loop.set_advantages)
  length             plays no part: an empty or a truncated response counts with its reward like any other
Sums are exactly rounded, so a sample's advantage does not depend on the order within its group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from exactrl.errors import NonFiniteError, UsageError

EPSILON = 1e-6  # keeps nearly equal rewards finite; verl and slime use the same, TRL 1e-4
LARGEST = 1e100  # squares of larger rewards come near the end of float64, and an infinite std would read as advantage 0

Values = NDArray[np.float64]


def grpo_advantages(rewards: ArrayLike, name: str = "the group") -> Values:
    """(r - mean) / (std + 1e-6) over the samples of one prompt: rewards [G] -> float64 [G], in their order.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2 (outcome supervision). The paper leaves open which standard
    deviation it means; this is the sample one (divisor G - 1), as torch.std computes it in TRL, verl and slime.
    `name` is what messages call the group.
    """
    centred = _centred(_checked(rewards, name))
    return centred / (_std(centred) + EPSILON)


def grpo_step_advantages(groups: Sequence[ArrayLike]) -> list[Values]:
    """`grpo_advantages` of every group of a step; messages count groups from 0."""
    return [grpo_advantages(rewards, f"group {i}") for i, rewards in enumerate(groups)]


def dr_grpo_advantages(groups: Sequence[ArrayLike]) -> list[Values]:
    """r - mean of the group, not divided by its standard deviation.

    Source: Dr. GRPO, arXiv:2503.20783: the division favours prompts that are nearly always or nearly never
    solved. The other half of Dr. GRPO is the aggregation "constant-length", see losses.token_weights.
    """
    return [_centred(_checked(rewards, f"group {i}")) for i, rewards in enumerate(groups)]


def rloo_advantages(groups: Sequence[ArrayLike]) -> list[Values]:
    """r minus the mean reward of the group's other samples, which is G / (G - 1) x (r - mean).

    Source: RLOO, arXiv:2402.14740 (after Kool et al., 2019).
    """
    centred = dr_grpo_advantages(groups)
    return [values * (len(values) / (len(values) - 1)) for values in centred]


def reinforce_pp_advantages(groups: Sequence[ArrayLike]) -> list[Values]:
    """(r - mean) / (std + 1e-6) over all samples of the step; groups play no part and may hold one sample.

    Source: REINFORCE++, arXiv:2501.03262, global advantage normalisation. Mean and standard deviation (divisor:
    samples - 1) are over responses; frameworks that spread advantages over tokens first weigh responses by their
    length. With a penalty per token see `reinforce_pp_token_advantages`.
    """
    checked = [_checked(rewards, f"group {i}", 1) for i, rewards in enumerate(groups)]
    return _split(grpo_advantages(np.concatenate([*checked, ()]), "the whole step"), checked)


def reinforce_pp_token_advantages(
    groups: Sequence[ArrayLike], penalties: Sequence[Sequence[Values]]
) -> list[list[Values]]:
    """REINFORCE++ with a penalty in the reward: (R_t - mean R_0) / (std R_0 + 1e-6), R_t = r - penalties from t on.

    `groups` are rewards, `penalties` float64 [length] for each response; gives float64 [length] for each. Source:
    arXiv:2501.03262, eq. 8 (A_t = r - beta x sum of KL from t on). Mean and standard deviation are over responses, of
    their whole return R_0, so that without penalties this is `reinforce_pp_advantages` at every token.
    """
    to_go = [[np.cumsum(p[::-1])[::-1] for p in group] for group in penalties]
    whole = [
        _checked(rewards, f"group {i}", 1) - [math.fsum(p) for p in group]
        for i, (rewards, group) in enumerate(zip(groups, penalties, strict=True))
    ]
    flat = _checked(np.concatenate([*whole, ()]), "the whole step")
    centred = _centred(flat)
    mean, std = flat[0] - centred[0], _std(centred)  # exactly flat[0] where all are equal
    return [
        [(r - left - mean) / (std + EPSILON) for r, left in zip(np.asarray(rewards, np.float64), group, strict=True)]
        for rewards, group in zip(groups, to_go, strict=True)
    ]


def reinforce_pp_baseline_advantages(groups: Sequence[ArrayLike]) -> list[Values]:
    """r - mean of the group, then divided by (std + 1e-6) of these differences over all samples of the step.

    Source: REINFORCE++ with baseline, arXiv:2501.03262. The differences of each group add up to 0, so their mean over
    the step is 0 and is not subtracted again: a group of equal rewards keeps exactly 0.
    """
    centred = dr_grpo_advantages(groups)
    std = _std(np.concatenate([*centred, ()]))
    return [values / (std + EPSILON) for values in centred]


def _checked(rewards: ArrayLike, name: str, least: int = 2) -> Values:
    values = np.asarray(rewards, np.float64)
    if values.ndim != 1 or len(values) < least:
        raise UsageError(
            f"{name} has rewards of shape {values.shape}; this advantage needs a flat list of at least {least} "
            "(rollout.samples_per_prompt)"
        )
    for i, value in enumerate(values):
        if not abs(value) <= LARGEST:
            raise NonFiniteError(
                f"reward {i} of {name} is {value}; rewards must be finite and at most {LARGEST:g} in size: "
                "check the reward function, or choose in reward.on_error what a failed reward does"
            )
    return values


def _centred(values: Values) -> Values:
    """values - mean, exactly 0 where all are equal."""
    if (values == values[0]).all():
        return np.zeros(len(values))
    return values - math.fsum(values) / len(values)


def _std(centred: Values) -> float:
    """Sample standard deviation (divisor n - 1) of values whose mean is 0."""
    return math.sqrt(math.fsum(centred * centred) / max(len(centred) - 1, 1))


def _split(values: Values, like: Sequence[Values]) -> list[Values]:
    return np.split(values, np.cumsum([len(group) for group in like])[:-1])
