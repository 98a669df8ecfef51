"""Reward functions by name: bundled ones, or `module:function` for the user's own. Rules: docs/rewards.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from exactrl.errors import ConfigError, DataError
from exactrl.tasks import arithmetic
from exactrl.tasks.grading.grade import SCORES, Grade, grade_many
from exactrl.tasks.grading.outcome import TIMEOUT, UNPARSEABLE_GOLD
from exactrl.tasks.user_reward import RewardTimeout, UserReward, import_function
from exactrl.types import Prompt, Sample, Scored

Reward = Callable[[Prompt, Sample], float]
Pairs = Sequence[tuple[Prompt, Sample]]

FUNCTIONS: dict[str, Reward] = {"arithmetic": arithmetic.reward}
BUNDLED = ("math", "dapo", *FUNCTIONS)


def resolve_reward(name: str, timeout_s: float = 5.0, key: str = "") -> Reward:
    """The reward named in a recipe: one of BUNDLED, or `module:function` with function(sample) -> number.

    timeout_s is the limit for one sample; "dapo" and "arithmetic" need none, they only compare short texts. key names
    the entry to use of a dict that a user's function returns. What happens where a reward raises (reward.on_error:
    stop, zero or drop) is the caller's part. Raises ConfigError when there is no such reward.
    """
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    if name in SCORES:
        return GradedReward(name, timeout_s)
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        known = ", ".join(repr(bundled) for bundled in BUNDLED)
        raise ConfigError(f"reward.name {name!r} is unknown; use {known} or 'module:function'")
    return UserReward(name, import_function(name), timeout_s, key)


class GradedReward:
    """The reward "math" or "dapo". A response that reaches a limit, or whose answer cannot be read, gets the reward of
    a wrong one; `reward_many` tells them apart by `reason`."""

    def __init__(self, rules: str, timeout_s: float) -> None:
        self.rules, self.timeout_s = rules, timeout_s

    def __call__(self, prompt: Prompt, sample: Sample) -> float:
        """Raises DataError where the label is empty, since then no response could ever be right."""
        scored = self.score_many([(prompt, sample)])[0]
        if scored.error:
            raise scored.error
        return scored.value

    def score_many(self, pairs: Pairs) -> list[Scored]:
        """One call for all samples of a step: worker processes share the formulas among them."""
        texts = [(sample.text or "", prompt.label) for prompt, sample in pairs]
        grades = grade_many(texts, self.timeout_s, rules=self.rules)
        return [self._scored(prompt, grade) for (prompt, _), grade in zip(pairs, grades, strict=True)]

    def _scored(self, prompt: Prompt, grade: Grade) -> Scored:
        if grade.reason == UNPARSEABLE_GOLD and not prompt.label.strip():
            text = (
                f"prompt {prompt.id!r}: the label is empty; the {self.rules!r} reward compares with it (data.label_key)"
            )
            return Scored(0.0, grade.reason, DataError(text))
        right, wrong = SCORES[self.rules]
        return Scored(right if grade.correct else wrong, grade.reason)


def reward_many(reward: Reward, pairs: Pairs) -> list[Scored]:
    """The rewards of many samples, in order, by the fastest way that this reward has. Raises nothing that a reward
    function raises: that is in `error`."""
    if isinstance(reward, GradedReward):
        return reward.score_many(pairs)
    if isinstance(reward, UserReward):
        outcomes = reward.outcomes(pairs)
        return [_failed(found) if isinstance(found, Exception) else Scored(found) for found in outcomes]
    return [_one(reward, prompt, sample) for prompt, sample in pairs]


def _one(reward: Reward, prompt: Prompt, sample: Sample) -> Scored:
    try:
        return Scored(reward(prompt, sample))
    except Exception as error:  # noqa: BLE001 (a user's reward may raise anything)
        return _failed(error)


def _failed(error: Exception) -> Scored:
    return Scored(0.0, TIMEOUT if isinstance(error, RewardTimeout) else "", error)
