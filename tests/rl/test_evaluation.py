"""pass@k, confidence intervals, and the score of groups."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactrl.errors import UsageError
from exactrl.rl.evaluation import Z95, default_ks, interval, pass_at_k, score
from exactrl.types import Group, Prompt, Sample


def group(rewards, finish="stop") -> Group:
    samples = [
        Sample("p", i, (1,), [1], np.zeros(1, np.float32), finish, 0, 1.0, reward=r) for i, r in enumerate(rewards)
    ]
    return Group(Prompt("p", "", (1,), ""), samples)


@pytest.mark.parametrize(("n", "right", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 2), (6, 6, 6), (4, 1, 4), (7, 3, 5)])
def test_pass_at_k_is_the_share_of_k_subsets_with_a_right_sample(n, right, k):
    subsets = list(itertools.combinations([1] * right + [0] * (n - right), k))
    assert pass_at_k(n, right, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_pass_at_k_is_unbiased():
    """Its mean over samples of a problem with chance p is 1 - (1 - p)^k, which 1 - (1 - c/n)^k is not."""
    n, p, k = 6, 0.3, 4
    weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    assert sum(w * pass_at_k(n, c, k) for c, w in enumerate(weights)) == pytest.approx(1 - (1 - p) ** k, rel=1e-12)
    naive = sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(weights))
    assert abs(naive - (1 - (1 - p) ** k)) > 0.01


@pytest.mark.parametrize("k", [0, 5])
def test_k_must_fit(k):
    with pytest.raises(UsageError, match=f"pass@{k} needs"):
        pass_at_k(4, 1, k)


def test_default_ks():
    assert [default_ks(n) for n in (1, 2, 3, 8, 10)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 10]]


@given(st.integers(1, 400), st.data())
def test_binary_intervals_are_wilsons(count, data):
    """The bounds are where a score test at 95 % would just reject: (p - q)^2 = z^2 q (1 - q) / n."""
    right = data.draw(st.integers(0, count))
    low, high = interval([1.0] * right + [0.0] * (count - right), binary=True)
    assert 0 <= low <= right / count <= high <= 1
    assert high - low > 0
    for bound in (low, high):
        if 0 < bound < 1:
            gap = (right / count - bound) ** 2
            assert gap == pytest.approx(1.959963984540054**2 * bound * (1 - bound) / count, rel=1e-6)


def test_intervals_of_means_are_clustered_by_problem():
    """Four equal samples of a problem say no more than one."""
    once, four = [group([r]) for r in (0.2, 0.9, 0.4)], [group([r] * 4) for r in (0.2, 0.9, 0.4)]
    a, b = score(once), score(four)
    assert (a.mean, a.low, a.high) == pytest.approx((b.mean, b.low, b.high))
    spread = 1.96 * np.std([0.2, 0.9, 0.4], ddof=1) / math.sqrt(3)
    assert (b.low, b.high) == pytest.approx((0.5 - spread, 0.5 + spread), rel=1e-4)


def test_one_problem_has_no_spread():
    """However often it was sampled; as yes or no it has Wilson's interval."""
    found = score([group([1.0, 0.0, 0.0])])
    assert (found.low, found.high) == (None, None)
    found = score([group([0.3])])
    assert (found.low, found.high) == (None, None)
    found = score([group([1.0])])
    assert (found.low, found.high) == pytest.approx((1 / (1 + Z95**2), 1.0))


def test_score():
    groups = [group([1.0, 0.0, 0.0]), group([0.0] * 3, "length"), group([1.0] * 3)]
    groups[1].samples[0].reward_error = "ValueError: broken"
    found = score(groups, [1, 2])
    assert (found.num_problems, found.num_samples, found.right, found.failed) == (3, 3, 4, 1)
    assert found.mean == pytest.approx(4 / 9)
    assert found.pass_at == pytest.approx({1: 4 / 9, 2: (2 / 3 + 0 + 1) / 3})
    assert found.truncated_ratio == pytest.approx(1 / 3)


def test_D_47_k_is_what_was_sampled():
    assert sorted(score([group([1.0, 0.0, 0.0, 1.0])]).pass_at) == [1, 2, 4]
