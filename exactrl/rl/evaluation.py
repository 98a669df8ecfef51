"""Scores of held-out problems: mean@n, pass@k and their uncertainty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from exactrl.errors import UsageError
from exactrl.types import Group

Z95 = 1.959963984540054  # two-sided 95 % of the normal distribution


@dataclass(frozen=True, slots=True)
class Score:
    """Result of P problems with n samples each.

    mean      mean reward of all samples ("mean@n"); low, high its 95 % confidence interval over problems, None for one
              problem, unless it has one sample whose reward is 0 or 1
    pass_at   k -> chance that at least one of k samples of a problem is right
    right     samples whose reward is above 0; failed: reward calls that failed, which count as 0
    """

    num_problems: int
    num_samples: int
    mean: float
    low: float | None
    high: float | None
    pass_at: dict[int, float]
    right: int
    failed: int
    truncated_ratio: float


def pass_at_k(n: int, right: int, k: int) -> float:
    """1 - C(n - right, k) / C(n, k): unbiased for k of n samples, `right` of them right.

    Source: Chen et al., arXiv:2107.03374, eq. 1. Raises UsageError for k outside 1 ... n.
    """
    if not 1 <= k <= n:
        raise UsageError(f"pass@{k} needs at least {k} samples for each problem, and there are {n}")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def default_ks(n: int) -> list[int]:
    """1, 2, 4, ... and n itself."""
    return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})


def score(groups: Sequence[Group], ks: Sequence[int] | None = None) -> Score:
    """Every group holds the same number of rewarded samples. A sample is right when its reward is above 0."""
    n = len(groups[0].samples)
    assert all(len(g.samples) == n for g in groups), "every problem has the same number of samples"
    rewards = [[s.reward or 0.0 for s in g.samples] for g in groups]
    right = [sum(r > 0 for r in row) for row in rewards]
    means = [math.fsum(row) / n for row in rewards]
    low, high = interval(means, binary=n == 1 and all(m in (0.0, 1.0) for m in means))
    samples = [s for g in groups for s in g.samples]
    return Score(
        num_problems=len(groups), num_samples=n, mean=math.fsum(means) / len(means), low=low, high=high,
        pass_at={k: math.fsum(pass_at_k(n, c, k) for c in right) / len(right) for k in ks or default_ks(n)},
        right=sum(right), failed=sum(bool(s.reward_error) for s in samples),
        truncated_ratio=sum(s.finish_reason == "length" for s in samples) / len(samples),
    )  # fmt: skip


def interval(means: Sequence[float], *, binary: bool) -> tuple[float, float] | tuple[None, None]:
    """95 % confidence interval of the mean over problems.

    binary: Wilson's interval, which stays inside 0 ... 1 and has a width when all are right or all wrong. Otherwise
    the normal one of the problems' means: samples of one problem are not independent, problems are (arXiv:2411.00640).
    A single mean has no spread: (None, None).
    """
    count = len(means)
    mean = math.fsum(means) / count
    if binary:
        centre, factor = mean + Z95**2 / (2 * count), 1 + Z95**2 / count
        spread = Z95 * math.sqrt(mean * (1 - mean) / count + Z95**2 / (4 * count**2))
        low, high = (centre - spread) / factor, (centre + spread) / factor
        return (max(0.0, low) if mean > 0 else 0.0), (min(1.0, high) if mean < 1 else 1.0)  # exact at both ends
    if count == 1:
        return None, None
    variance = math.fsum((m - mean) ** 2 for m in means) / (count - 1)
    spread = Z95 * math.sqrt(variance / count)
    return mean - spread, mean + spread
