"""From rewards to advantages: what counts for the baseline, what for the loss."""

from __future__ import annotations

import numpy as np
import pytest

from exactrl.algo.advantages import reinforce_pp_advantages, reinforce_pp_token_advantages
from exactrl.algo.algorithm import ALGORITHMS, get_algorithm
from exactrl.errors import NonFiniteError, UsageError
from exactrl.rl.shaping import Shaping, has_signal, sample_kl, set_advantages
from exactrl.types import Group, Prompt, Sample

PLAIN = Shaping()


def group(name: str, rewards, lengths=None, finish="stop") -> Group:
    prompt = Prompt(name, name, (1, 2), "x")
    samples = []
    for i, reward in enumerate(rewards):
        n = lengths[i] if lengths else 3
        logprobs = -np.arange(1, n + 1, dtype=np.float32)
        samples.append(Sample(name, i, (1, 2), [7] * n, logprobs, finish, 0, 1.0, reward=reward))
    return Group(prompt, samples)


def advantages(*groups: Group) -> list[list[float]]:
    return [[s.advantage for s in g.samples] for g in groups]


def test_advantages_belong_to_their_samples():
    a, b = group("a", [1.0, 0.0, 0.5]), group("b", [0.5, 0.5, 1.0])
    set_advantages([a, b], get_algorithm("grpo"), PLAIN)
    assert advantages(a)[0] == pytest.approx([1, -1, 0], abs=1e-5)
    assert a.samples[0].advantage > 0
    assert b.samples[2].advantage > 0 > b.samples[0].advantage == b.samples[1].advantage


def test_D_07_a_failed_reward_has_no_part_in_baseline_or_loss():
    """Rewards [1, None, 0, 1]: the mean is 2/3; [None, None, None, 1]: too small a group, advantage 0 and no loss."""
    a, b = group("a", [1.0, None, 0.0, 1.0]), group("b", [None, None, None, 1.0])
    set_advantages([a, b], get_algorithm("dr_grpo"), PLAIN)
    assert advantages(a)[0] == pytest.approx([1 / 3, 0, -2 / 3, 1 / 3])
    assert [s.in_loss for s in a.samples] == [True, False, True, True]
    assert advantages(b)[0] == [0, 0, 0, 0]
    assert not any(s.in_loss for s in b.samples)


def test_a_batch_baseline_keeps_a_group_of_one():
    a, b = group("a", [1.0, 0.5, 0.5]), group("b", [0.5, None, None])
    set_advantages([a, b], get_algorithm("reinforce_pp"), PLAIN)
    assert [s.in_loss for s in b.samples] == [True, False, False]
    assert a.samples[0].advantage > 0 > a.samples[1].advantage == b.samples[0].advantage


def test_nothing_left_is_an_error():
    with pytest.raises(UsageError, match="nothing can be trained on"):
        set_advantages([group("a", [None, 1.0]), group("b", [0.0, None])], get_algorithm("grpo"), PLAIN)


def test_responses_near_the_longest_lose_advantage_not_reward():
    a, b = group("a", [0.5] * 3, [1, 9, 10]), group("b", [0.5] * 3, [1, 1, 1])
    set_advantages([a, b], get_algorithm("dr_grpo"), Shaping(max_length=10, overlong_cache=4))
    assert advantages(a)[0] == pytest.approx([1.75 / 3, 1.75 / 3 - 0.75, 1.75 / 3 - 1])
    assert advantages(b)[0] == [0, 0, 0]
    assert {s.reward for g in (a, b) for s in g.samples} == {0.5}


def test_truncated_responses_stay_out_of_the_loss_but_in_the_baseline():
    a = group("a", [1.0, 0.0, 0.5])
    a.samples[1].finish_reason = "length"
    set_advantages([a], get_algorithm("dr_grpo"), Shaping(overlong_filter=True))
    assert advantages(a)[0] == pytest.approx([0.5, -0.5, 0])
    assert [s.in_loss for s in a.samples] == [True, False, True]
    set_advantages([a], get_algorithm("dr_grpo"), PLAIN)
    assert all(s.in_loss for s in a.samples)


def test_D_06_signal_is_decided_by_rewards_not_by_penalties():
    """Four wrong answers of different lengths: the penalties differ, the rewards do not."""
    a = group("a", [0.0] * 4, [3, 7, 8, 3])
    set_advantages([a], get_algorithm("dr_grpo"), Shaping(max_length=10, overlong_cache=4))
    assert len(set(advantages(a)[0])) > 1
    assert not has_signal(a)
    assert has_signal(group("b", [0.0, 1.0]))
    assert not has_signal(group("c", [1.0, None]))  # one reward alone differs from nothing


def with_reference(g: Group, seed: int) -> Group:
    rng = np.random.default_rng(seed)
    for s in g.samples:
        s.reference_logprobs = (s.logprobs - 0.3 * rng.normal(size=len(s.logprobs))).astype(np.float32)
    return g


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_of_a_sample_is_the_formula(estimator):
    (s, *_) = with_reference(group("a", [1.0, 0.0], [5, 4]), 3).samples
    d = s.logprobs.astype(np.float64) - s.reference_logprobs
    formula = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[estimator]
    np.testing.assert_allclose(sample_kl(s, estimator), formula, rtol=1e-9, atol=1e-12)
    s.reference_logprobs = s.logprobs.copy()
    assert (sample_kl(s, estimator) == 0).all()


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if n != "reinforce_pp"])
def test_kl_in_the_reward_is_summed_over_the_response(name):
    shaping = Shaping(kl_in_reward=0.1, kl_estimator="k1")
    a, b = (with_reference(group(n, [1.0, 0.0, 1.0], [5, 2, 0]), i) for i, n in enumerate("ab"))
    expected = get_algorithm(name).advantages(
        [[s.reward - 0.1 * sample_kl(s, "k1").sum() for s in g.samples] for g in (a, b)]
    )
    set_advantages([a, b], get_algorithm(name), shaping)
    for found, values in zip(advantages(a, b), expected, strict=True):
        np.testing.assert_allclose(found, values, rtol=1e-9)
    assert a.samples[0].token_advantages is None
    assert {s.reward for g in (a, b) for s in g.samples} == {0.0, 1.0}


def test_reinforce_pp_takes_the_penalty_token_by_token():
    shaping = Shaping(kl_in_reward=0.1, kl_estimator="k2")
    a, b = (with_reference(group(n, [1.0, 0.0], [5, 2]), i) for i, n in enumerate("ab"))
    samples = [s for g in (a, b) for s in g.samples]
    returns = [[s.reward - 0.1 * sum(sample_kl(s, "k2")[t:]) for t in range(len(s.token_ids))] for s in samples]
    whole = [r[0] for r in returns]
    set_advantages([a, b], get_algorithm("reinforce_pp"), shaping)
    for s, values in zip(samples, returns, strict=True):
        expected = (np.array(values) - np.mean(whole)) / (np.std(whole, ddof=1) + 1e-6)
        assert s.token_advantages.dtype == np.float32
        np.testing.assert_allclose(s.token_advantages, expected, rtol=1e-6, atol=1e-7)
        assert s.advantage == pytest.approx(expected[0])


def test_reinforce_pp_without_any_penalty_is_the_same_at_every_token():
    rewards = [[1.0, 0.0], [0.3, 0.9]]
    nothing = [[np.zeros(3), np.zeros(0)], [np.zeros(1), np.zeros(7)]]
    for plain, tokens in zip(reinforce_pp_advantages(rewards), reinforce_pp_token_advantages(rewards, nothing)):  # noqa: B905
        for a, t in zip(plain, tokens, strict=True):
            np.testing.assert_allclose(t, np.full(len(t), a), rtol=1e-12)
    equal = reinforce_pp_token_advantages([[0.1] * 3, [0.1] * 3], [[np.zeros(2)] * 3] * 2)
    assert all((t == 0).all() for row in equal for t in row)
    with pytest.raises(NonFiniteError, match="reward 1 of group 0"):
        reinforce_pp_token_advantages([[1.0, float("nan")]], [[np.zeros(1)] * 2])
