"""Group-relative advantages against a numpy reference, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from exactrl.algo.advantages import (
    dr_grpo_advantages,
    grpo_advantages,
    grpo_step_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    rloo_advantages,
)
from exactrl.errors import NonFiniteError, UsageError


def reference(rewards):
    r = np.asarray(rewards, np.float64)
    return (r - r.mean()) / (r.std(ddof=1) + 1e-6)


@pytest.mark.parametrize("size", [2, 3, 8, 16, 257])
def test_equals_the_reference(size):
    rng = np.random.default_rng(size)
    for rewards in (rng.normal(size=size), rng.integers(0, 2, size), 1e6 + rng.normal(size=size), -rng.random(size)):
        rewards = np.append(rewards[:-1], rewards[0] + 1)  # never all equal
        actual = grpo_advantages(rewards)
        assert actual.dtype == np.float64
        np.testing.assert_allclose(actual, reference(rewards), rtol=1e-9, atol=1e-9)


def test_D_15_unbiased_std_within_the_group():
    np.testing.assert_allclose(grpo_advantages([1, 0, 0, 0]), [1.5, -0.5, -0.5, -0.5], rtol=1e-5)
    np.testing.assert_allclose(grpo_advantages([1, 1, 1, 0]), [0.5, 0.5, 0.5, -1.5], rtol=1e-5)


def test_D_15_without_normalisation_nothing_is_divided():
    found = dr_grpo_advantages([[1, 0, 0, 0], [1, 1, 1, 0]])
    assert [a.tolist() for a in found] == [[0.75, -0.25, -0.25, -0.25], [0.25, 0.25, 0.25, -0.75]]


def test_D_15_batch_normalisation_uses_the_whole_step():
    """REINFORCE++ divides by the std of what it centred: the differences to group means, or all rewards."""
    groups = [[1, 0, 0, 0], [1, 1, 1, 0]]
    for group, centred in zip(reinforce_pp_baseline_advantages(groups), dr_grpo_advantages(groups), strict=True):
        np.testing.assert_allclose(group, centred / np.sqrt(1.5 / 7), rtol=1e-5)
    for group, rewards in zip(reinforce_pp_advantages(groups), groups, strict=True):
        np.testing.assert_allclose(group, (np.array(rewards) - 0.5) / 0.534522, rtol=1e-5)


def test_rloo_leaves_the_sample_out():
    (found,) = rloo_advantages([[1, 0, 0, 5]])
    np.testing.assert_allclose(found, [1 - 5 / 3, -2, -2, 5 - 1 / 3], rtol=1e-12)


def test_a_group_of_equal_rewards_stays_exactly_0_in_a_normalised_step():
    equal, other = reinforce_pp_baseline_advantages([[0.1] * 3, [1.0, 0.0, 0.3]])
    assert (equal.view(np.int64) == 0).all()
    assert other.all()


def test_reinforce_pp_takes_one_sample_per_prompt():
    found = reinforce_pp_advantages([[1.0], [0.0], [0.0]])
    np.testing.assert_allclose(np.concatenate(found), reference([1, 0, 0]), rtol=1e-12)


def test_epsilon_is_added_to_the_std():
    spread = 1e-6  # sample std of (0, d) is d / sqrt(2)
    expected = spread / 2 / (spread / np.sqrt(2) + 1e-6)
    np.testing.assert_allclose(grpo_advantages([0.0, spread]), [-expected, expected], rtol=1e-9)


@pytest.mark.parametrize("reward", [0.1, 1.0, -0.7, 1e17, 5e-324])
@pytest.mark.parametrize("size", [2, 3, 7, 10])
def test_equal_rewards_are_exactly_zero(reward, size):
    assert (grpo_advantages([reward] * size).view(np.int64) == 0).all()


def test_bits_do_not_depend_on_the_order_of_the_group():
    rng = np.random.default_rng(0)
    for _ in range(50):
        rewards, order = rng.normal(size=33), rng.permutation(33)
        first = grpo_advantages(rewards)
        assert (grpo_advantages(rewards).view(np.int64) == first.view(np.int64)).all()
        assert (grpo_advantages(rewards[order]).view(np.int64) == first[order].view(np.int64)).all()


@pytest.mark.parametrize("rewards", [[], [1.0], 1.0, [[1.0, 2.0], [3.0, 4.0]]])
def test_needs_a_flat_group_of_two(rewards):
    with pytest.raises(UsageError, match="at least 2"):
        grpo_advantages(rewards)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), None, -1e200])
def test_D_07_a_bad_reward_is_named_not_repaired(bad):
    with pytest.raises(NonFiniteError, match="reward 2 of the group"):
        grpo_advantages([1.0, 0.0, bad, 1.0])
    with pytest.raises(NonFiniteError, match="reward 0 of group 1"):
        grpo_step_advantages([[1.0, 0.0], [bad, bad]])


def test_groups_of_a_step_do_not_mix():
    groups = [[1.0, 0.0, 0.0], [5.0, 5.0], [2.0, 7.0]]
    for group, actual in zip(groups, grpo_step_advantages(groups), strict=True):
        assert (actual == grpo_advantages(group)).all()
