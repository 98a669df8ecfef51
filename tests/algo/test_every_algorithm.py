"""Every algorithm, advantages and loss: equal to a few lines of numpy, gradients to finite differences, and any split
into micro-batches adds up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from exactrl.algo.algorithm import ALGORITHMS, TokenBatch, get_algorithm
from exactrl.algo.losses import token_weights
from exactrl.config.algorithms import ALGORITHM_RULES, aggregation_of
from exactrl.errors import NonFiniteError, UsageError

NAN, INF = float("nan"), float("inf")
LENGTHS = [5, 0, 3, 1, 12, 7, 2, 9]  # two groups of four
LONGEST = 16
CASES = [(name, a, 0.0) for name in ALGORITHMS for a in ALGORITHM_RULES[name].aggregations]
CASES += [("grpo", "token-mean", 1.5), ("dapo", "token-mean", 1.1), ("rloo", "sequence-mean", 3.0)]


def normal(x):
    x = np.asarray(x, np.float64)
    return (x - x.mean()) / (x.std(ddof=1) + 1e-6)


def centred(groups):
    return [np.asarray(g, np.float64) - np.mean(g) for g in groups]


def whole(groups, f):
    cuts = np.cumsum([len(g) for g in groups])[:-1]
    return np.split(f(np.concatenate(groups)), cuts)


ADVANTAGES = {
    "grpo": lambda groups: [normal(g) for g in groups],
    "dr_grpo": centred,
    "rloo": lambda groups: [[r - (sum(g) - r) / (len(g) - 1) for r in g] for g in groups],
    "reinforce_pp": lambda groups: whole(groups, normal),
    "reinforce_pp_baseline": lambda groups: whole(centred(groups), normal),
}
GROUP_NORMALISED = {"gspo", "cispo", "dapo"}


def reference_weights(lengths, aggregation):
    if aggregation == "token-mean":
        return [np.full(n, 1 / sum(lengths)) for n in lengths]
    if aggregation == "constant-length":
        return [np.full(n, 1 / (len(lengths) * LONGEST)) for n in lengths]
    return [np.full(n, 1 / (sum(n > 0 for n in lengths) * max(n, 1))) for n in lengths]


def reference_loss(name, new, old, advantages, weights, low, high, dual, frozen):
    """Lists with one array per response, advantages one number each; `frozen` are the logprobs of a stopped ratio."""
    total = 0.0
    for lp, before, a, w, stopped in zip(new, old, advantages, weights, frozen, strict=True):
        log_ratio = lp - before
        if name == "gspo":
            log_ratio = np.full(len(lp), log_ratio.sum() / max(len(lp), 1))
        ratio = np.exp(log_ratio)
        objective = np.minimum(ratio * a, np.clip(ratio, 1 - low, 1 + high) * a)
        if dual and a < 0:
            objective = np.maximum(objective, dual * a)
        if name == "cispo":
            objective = np.clip(np.exp(stopped - before), 1 - low, 1 + high) * a * lp
        total -= np.sum(w * objective)
    return total


def bounds(name):
    return (0.02, 0.03) if name == "gspo" else (0.2, 0.28)


def rows(seed, scale):
    """(new, old) logprobs, one float64 array per response."""
    rng = np.random.default_rng(seed)
    old = [-5 * rng.random(n) for n in LENGTHS]
    return [lp + scale * rng.normal(size=len(lp)) for lp in old], old


def make_batch(new, old, advantages, weights, dtype=torch.float64):
    lengths = [len(lp) for lp in new]
    flat = [torch.from_numpy(np.concatenate([*x, []])).to(dtype) for x in (new, old, weights)]
    spread = torch.from_numpy(np.repeat(np.asarray(advantages, np.float64), lengths)).to(dtype)
    ids = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    return TokenBatch(flat[0].requires_grad_(), flat[1], spread, flat[2], ids, len(lengths))


def step_advantages(name, rewards):
    return np.concatenate(get_algorithm(name).advantages(rewards))


REWARDS = [
    [[1.0, 0.0, 0.0, 1.0], [0.3, -2.0, 0.9, 5.0]],
    [[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0]],  # one group has equal rewards
    [[0.1, 0.1, 0.1, 0.1], [0.7, 0.7, 0.7, 0.7]],  # both
    [[1e6, 1e6 + 1, 1e6, 1e6], [1e-9, 0.0, 0.0, 0.0]],
]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("rewards", REWARDS)
def test_advantages_equal_the_reference(name, rewards):
    expected = ADVANTAGES["grpo" if name in GROUP_NORMALISED else name](rewards)
    actual = get_algorithm(name).advantages(rewards)
    assert [a.dtype for a in actual] == [np.float64] * 2
    for mine, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "aggregation", "dual"), CASES)
@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0])
def test_loss_and_gradient_equal_the_reference(name, aggregation, dual, scale):
    """The gradient is compared with central differences of the reference at every token."""
    (low, high), (new, old) = bounds(name), rows(7, scale)
    advantages, weights = step_advantages(name, REWARDS[0]), reference_weights(LENGTHS, aggregation)

    def reference(shift, at):
        moved = np.concatenate(new)
        moved[at] += shift
        moved = np.split(moved, np.cumsum(LENGTHS)[:-1])
        return reference_loss(name, moved, old, advantages, weights, low, high, dual, new)

    batch = make_batch(new, old, advantages, weights)
    loss, metrics = get_algorithm(name, dual).loss(batch, low, high)
    loss.backward()
    np.testing.assert_allclose(loss.detach(), reference(0, 0), rtol=1e-12, atol=1e-14)
    assert metrics["num_tokens"] == sum(LENGTHS)
    assert metrics["clipped"] == 0 if scale == 0 else 0 < metrics["clipped"] < sum(LENGTHS)
    if scale == 0:
        return  # on the policy that sampled, see the test below; nothing is clipped
    slopes = [(reference(1e-6, i) - reference(-1e-6, i)) / 2e-6 for i in range(sum(LENGTHS))]
    np.testing.assert_allclose(batch.logprobs.grad, slopes, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("name", "aggregation", "dual"), CASES)
def test_on_policy_all_gradients_are_the_policy_gradient(name, aggregation, dual):
    new, _ = rows(3, 0.0)
    advantages, weights = step_advantages(name, REWARDS[0]), reference_weights(LENGTHS, aggregation)
    batch = make_batch(new, new, advantages, weights)
    get_algorithm(name, dual).loss(batch, *bounds(name))[0].backward()
    expected = np.concatenate([-a * w for a, w in zip(advantages, weights, strict=True)])
    np.testing.assert_allclose(batch.logprobs.grad, expected, rtol=1e-12)


@pytest.mark.parametrize(("name", "aggregation", "dual"), CASES)
@pytest.mark.parametrize("cuts", [[4], [1, 2], [3, 6], list(range(1, 8))])
def test_any_split_into_micro_batches_adds_up(name, aggregation, dual, cuts):
    new, old = rows(5, 0.3)
    advantages, weights = step_advantages(name, REWARDS[0]), token_weights(LENGTHS, aggregation, LONGEST)

    def run(part):
        columns = ([x[i] for i in part] for x in (new, old, advantages, weights))
        batch = make_batch(*columns, dtype=torch.float32)
        loss, metrics = get_algorithm(name, dual).loss(batch, *bounds(name))
        loss.backward()
        return float(loss.detach()), batch.logprobs.grad, metrics

    everything, parts = run(range(8)), [run(part) for part in np.split(np.arange(8), cuts)]
    assert abs(sum(p[0] for p in parts) - everything[0]) < 1e-12
    assert torch.equal(torch.cat([p[1] for p in parts]).view(torch.int32), everything[1].view(torch.int32))
    for key, value in everything[2].items():
        assert abs(sum(float(p[2][key]) for p in parts) - float(value)) < 1e-9, key


@pytest.mark.parametrize("name", ALGORITHMS)
def test_equal_rewards_give_no_gradient_at_all(name):
    new, old = rows(2, 1.0)
    advantages = step_advantages(name, [[0.1] * 4] * 2)
    assert (advantages.view(np.int64) == 0).all()
    batch = make_batch(new, old, advantages, reference_weights(LENGTHS, "token-mean"))
    loss, _ = get_algorithm(name).loss(batch, *bounds(name))
    loss.backward()
    assert loss == 0
    assert not batch.logprobs.grad.any()


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF, None, 1e200])
def test_a_bad_reward_is_named_not_repaired(name, bad):
    with pytest.raises(NonFiniteError, match="reward 1 of group 1"):
        get_algorithm(name).advantages([[1.0, 0.0], [0.0, bad]])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_groups_that_are_too_small(name):
    algorithm = get_algorithm(name)
    assert algorithm.min_group == (1 if name == "reinforce_pp" else 2)
    for groups in ([[1.0], [0.0]], [[1.0, 0.0], [0.5]]):
        if name == "reinforce_pp":
            assert len(algorithm.advantages(groups)) == 2
        else:
            with pytest.raises(UsageError, match="at least 2"):
                algorithm.advantages(groups)
    for groups in ([[1.0]], [[]]):
        with pytest.raises(UsageError, match="at least"):
            algorithm.advantages(groups)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_token_of_weight_0_may_hold_anything(name):
    algorithm, (new, old) = get_algorithm(name), rows(4, 0.3)
    advantages = step_advantages(name, REWARDS[0])
    weights = reference_weights(LENGTHS, aggregation_of(name, "auto"))
    weights[4][3] = weights[7][0] = 0
    clean = make_batch(new, old, advantages, weights)
    loss, metrics = algorithm.loss(clean, *bounds(name))
    loss.backward()
    new[4][3], old[4][3], new[7][0] = NAN, INF, -INF
    holes = make_batch(new, old, advantages, weights)
    again, found = algorithm.loss(holes, *bounds(name))
    again.backward()
    assert loss == again
    assert metrics == found
    assert metrics["num_tokens"] == sum(LENGTHS) - 2
    assert torch.equal(clean.logprobs.grad, holes.logprobs.grad)
    assert (clean.logprobs.grad == 0)[sum(LENGTHS[:4]) + 3]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_token_of_weight_0_is_as_good_as_absent(name):
    """One token of a response, and all tokens of another one."""
    algorithm, (new, old) = get_algorithm(name), rows(6, 0.3)
    advantages = step_advantages(name, REWARDS[0])
    weights = reference_weights(LENGTHS, aggregation_of(name, "auto"))
    weights[4][3], weights[5][:] = 0, 0
    masked = make_batch(new, old, advantages, weights)
    loss, metrics = algorithm.loss(masked, *bounds(name))
    loss.backward()
    kept = np.concatenate(weights) != 0
    absent = [[row[w != 0] for row, w in zip(x, weights, strict=True)] for x in (new, old, weights)]
    short = make_batch(absent[0], absent[1], advantages, absent[2])
    again, found = algorithm.loss(short, *bounds(name))
    again.backward()
    np.testing.assert_allclose(float(loss.detach()), float(again.detach()), rtol=1e-12)
    for key, value in metrics.items():
        np.testing.assert_allclose(value, found[key], rtol=1e-12, err_msg=key)
    np.testing.assert_allclose(masked.logprobs.grad[kept], short.logprobs.grad, rtol=1e-12)
    assert (masked.logprobs.grad[~kept] == 0).all()


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("side", [0, 1])
def test_a_logprob_that_is_not_finite_is_named(name, bad, side):
    pair = rows(4, 0.3)
    pair[side][4][3] = bad
    batch = make_batch(*pair, step_advantages(name, REWARDS[0]), reference_weights(LENGTHS, "token-mean"))
    with pytest.raises(NonFiniteError, match=f"not finite: response token {sum(LENGTHS[:4]) + 3} "):
        get_algorithm(name).loss(batch, *bounds(name))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_micro_batch_of_empty_responses_adds_nothing(name):
    batch = make_batch([np.zeros(0)] * 2, [np.zeros(0)] * 2, [1.0, -1.0], [np.zeros(0)] * 2)
    loss, metrics = get_algorithm(name).loss(batch, *bounds(name))
    loss.backward()
    assert loss == 0
    assert all(value == 0 for value in metrics.values())


def test_gspo_does_not_mix_responses_and_shares_one_gradient_within_each():
    new, old = rows(9, 0.02)
    advantages = np.array([1.0, -1, 2, -2, 1, -1, 0.5, 1])
    batch = make_batch(new, old, advantages, reference_weights(LENGTHS, "sequence-mean"))
    gspo = get_algorithm("gspo")
    gspo.loss(batch, 0.5, 0.5)[0].backward()
    for part in np.split(batch.logprobs.grad.numpy(), np.cumsum(LENGTHS)[:-1]):
        assert len(set(part.tolist())) <= 1
    moved = replace(batch, old_logprobs=batch.old_logprobs - torch.where(batch.sequence_ids == 4, 1.0, 0.0))
    batch.logprobs.grad = None
    _, metrics = gspo.loss(moved, 0.02, 0.03)
    before = gspo.loss(batch, 0.02, 0.03)[1]
    assert metrics["clipped_high"] - before["clipped_high"] == LENGTHS[4]  # all of its tokens, no other one


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    old = np.zeros(4)
    new = np.log([0.75, 0.9, 1.1, 50.0])
    batch = make_batch([new], [old], [-2.0], [np.ones(4)])
    loss, metrics = get_algorithm("cispo").loss(batch, 0.2, 0.28)
    loss.backward()
    np.testing.assert_allclose(batch.logprobs.grad, 2 * np.array([0.8, 0.9, 1.1, 1.28]), rtol=1e-12)
    assert (metrics["clipped"], metrics["clipped_low"], metrics["clipped_high"]) == (2, 1, 1)
    np.testing.assert_allclose(loss.detach(), 2 * (np.array([0.8, 0.9, 1.1, 1.28]) * new).sum(), rtol=1e-12)


def test_cispo_survives_a_ratio_that_overflows():
    batch = make_batch([np.array([0.0, -1.0])], [np.array([-1000.0, -1.0])], [-1.0], [np.ones(2)])
    loss, metrics = get_algorithm("cispo").loss(batch, 0.2, 0.28)
    loss.backward()
    assert metrics["overflowed"] == 1
    np.testing.assert_allclose(batch.logprobs.grad, [1.28, 1.0], rtol=1e-12)
