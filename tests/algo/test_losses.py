"""Policy loss against a numpy reference, finite differences, any micro-batch split; the clip at its bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from exactrl.algo.losses import policy_loss, ppo_clip_loss, token_weights, weighted_sum
from exactrl.errors import ConfigError, NonFiniteError, UsageError

LOW, HIGH = 0.2, 0.28
NAN, INF = float("nan"), float("inf")


def reference(logprobs, old, advantages, weights, low=LOW, high=HIGH):
    total = 0.0
    for new, before, a, w in zip(logprobs, old, advantages, weights, strict=True):
        ratio = np.exp(new - before)
        total += w * -min(ratio * a, np.clip(ratio, 1 - low, 1 + high) * a)
    return total


def vector(values, dtype=torch.float64, grad=False):
    return torch.tensor(values, dtype=dtype, requires_grad=grad)


def random_batch(seed, lengths, aggregation="token-mean", scale=0.3, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    old = -torch.rand(n, generator=g, dtype=dtype) * 5
    new = old + scale * torch.randn(n, generator=g, dtype=dtype)
    advantages = torch.repeat_interleave(torch.randn(len(lengths), generator=g, dtype=dtype), torch.tensor(lengths))
    weights = torch.from_numpy(np.concatenate(token_weights(lengths, aggregation))).to(dtype)
    return new, old, advantages, weights


def gradient(new, *rest):
    leaf = new.clone().requires_grad_()
    loss, metrics = policy_loss(leaf, *rest, LOW, HIGH)
    loss.backward()
    return loss.detach(), leaf.grad, metrics


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
@pytest.mark.parametrize("lengths", [[1], [5, 0, 3], [1, 17, 2, 40], [0, 0, 1]])
@pytest.mark.parametrize("scale", [0.0, 0.3, 5.0])
def test_equals_the_reference(aggregation, lengths, scale):
    batch = random_batch(1, lengths, aggregation, scale)
    loss, metrics = policy_loss(*batch, LOW, HIGH)
    np.testing.assert_allclose(loss, reference(*(t.numpy() for t in batch)), rtol=1e-12, atol=1e-14)
    assert metrics["num_tokens"] == sum(lengths)


def test_gradient_equals_finite_differences():
    new, old, advantages, weights = random_batch(2, [30, 50, 20], scale=0.5)
    _, grad, metrics = gradient(new, old, advantages, weights)
    assert 0 < metrics["clipped"] < 100
    step = 1e-6
    for i, rest in enumerate(zip(*(t.numpy() for t in (old, advantages, weights)), strict=True)):  # tokens are separate
        up, down = (reference(*([x] for x in (float(new[i]) + s, *rest))) for s in (step, -step))
        slope = (up - down) / (2 * step)
        assert abs(float(grad[i]) - slope) < 1e-8, i


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
@pytest.mark.parametrize("cuts", [[1], [40, 41], [10, 20, 30, 40, 50, 60], list(range(1, 63))])
def test_any_split_adds_up_to_the_minibatch(aggregation, cuts):
    batch = random_batch(3, [20, 1, 30, 12], aggregation, dtype=torch.float32)
    loss, grad, metrics = gradient(*batch)
    parts = [gradient(*part) for part in zip(*(torch.tensor_split(t, cuts) for t in batch), strict=True)]
    assert abs(sum(float(p[0]) for p in parts) - float(loss)) < 1e-12
    assert torch.equal(torch.cat([p[1] for p in parts]), grad)
    for key, value in metrics.items():
        assert abs(sum(float(p[2][key]) for p in parts) - float(value)) < 1e-9, key


def test_empty_micro_batch_adds_nothing():
    loss, grad, metrics = gradient(*(torch.zeros(0) for _ in range(4)))
    assert loss == 0
    assert grad.shape == (0,)
    assert all(value == 0 for value in metrics.values())


def test_A_23_denominator_is_the_minibatch_not_the_rank():
    weights = [torch.from_numpy(w) for w in token_weights([100, 900], "token-mean")]
    ranks = [(torch.full((100,), -1.0), weights[0]), (torch.full((900,), -2.0), weights[1])]  # advantages
    parts = [gradient(torch.zeros(len(a)), torch.zeros(len(a)), a, w) for a, w in ranks]
    assert abs(sum(float(p[0]) for p in parts) - 1.9) < 1e-6
    joined = gradient(torch.zeros(1000), torch.zeros(1000), *(torch.cat(t) for t in zip(*ranks, strict=True)))
    assert torch.equal(torch.cat([p[1] for p in parts]), joined[1])
    per_sequence = torch.from_numpy(np.concatenate(token_weights([100, 900], "sequence-mean")))
    assert abs(float(weighted_sum(torch.cat([torch.ones(100), torch.full((900,), 2.0)]), per_sequence)) - 1.5) < 1e-6


def test_A_52_nan_at_a_masked_position_does_not_leak():
    values, weights = vector([0.2, NAN, 0.4], grad=True), vector([0.5, 0.0, 0.5])
    mean = weighted_sum(values, weights)
    mean.backward()
    assert abs(mean.item() - 0.3) < 1e-12
    assert values.grad.tolist() == [0.5, 0.0, 0.5]
    for bad in (NAN, INF, -INF):
        zero, hole = vector([0.0, 0.0, 0.0]), vector([0.0, bad, 0.0])
        for batch in ((hole, zero, zero - 1), (zero, hole, zero - 1), (zero, zero, hole - 1), (hole, hole, hole - 1)):
            loss, grad, metrics = gradient(*batch, weights)
            assert loss == 1
            assert grad.tolist() == [0.5, 0.0, 0.5]
            assert (metrics["num_tokens"], metrics["log_ratio_abs"]) == (2, 0)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_A_53_non_finite_is_never_on_policy(bad, place, advantage):
    batch = [torch.zeros(3), torch.zeros(3), torch.full((3,), advantage)]
    batch[place][1] = bad
    with pytest.raises(NonFiniteError, match="token 1 "):
        policy_loss(*batch, torch.ones(3), LOW, HIGH)


def test_A_53_equal_infinite_logprobs_are_no_ratio_of_one():
    hole = vector([-1.0, -INF])
    with pytest.raises(NonFiniteError, match="token 1 "):
        policy_loss(hole, hole, vector([1.0, 1.0]), vector([0.5, 0.5]), LOW, HIGH)


@pytest.mark.parametrize("log_ratio", [5.0, 88.0, 90.0, 1000.0])
def test_A_53_large_log_ratio_is_clipped_and_reported(log_ratio):
    new, old = torch.tensor([0.0, -1.0, 0.0]), torch.tensor([-log_ratio, -1.0, -log_ratio])
    loss, grad, metrics = gradient(new, old, torch.tensor([2.0, 2.0, 0.0]), torch.ones(3))
    assert abs(float(loss) - (-2 * 1.28 - 2)) < 1e-6
    assert grad.tolist() == [0.0, -2.0, 0.0]
    assert (metrics["clipped"], metrics["clipped_high"], metrics["clipped_low"]) == (1, 1, 0)
    assert metrics["overflowed"] == (2 if log_ratio > 88.7 else 0)
    assert metrics["log_ratio_abs"] == 2 * log_ratio


def test_A_53_large_log_ratio_that_no_clip_bounds_raises():
    with pytest.raises(NonFiniteError, match=r"loss is infinite at response token 1 .*-90.*train\.lr"):
        policy_loss(torch.zeros(2), torch.tensor([0.0, -90.0]), -torch.ones(2), torch.ones(2), LOW, HIGH)
    loss, grad, _ = gradient(torch.zeros(1), torch.tensor([-50.0]), -torch.ones(1), torch.ones(1))
    assert loss == grad == torch.tensor([50.0]).exp()


def test_vanishing_ratio():
    new, old = torch.tensor([-1000.0, -1000.0]), torch.zeros(2)
    loss, grad, metrics = gradient(new, old, torch.tensor([-1.0, 1.0]), torch.ones(2))
    assert abs(float(loss) - 0.8) < 1e-6
    assert grad.tolist() == [0.0, 0.0]
    assert (metrics["clipped_low"], metrics["clipped_high"]) == (1, 0)
    assert (metrics["clipped"], metrics["overflowed"], metrics["log_ratio_abs"]) == (1, 0, 2000)


@pytest.mark.parametrize(("ratio", "low", "high"), [(0.5, 0.5, 1.0), (2.0, 0.5, 1.0)])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_clip_exactly_at_the_bound_keeps_the_gradient(ratio, low, high, advantage):
    new = vector([math.log(ratio)], torch.float32, grad=True)
    loss, tokens = ppo_clip_loss(new, torch.zeros(1), torch.tensor([advantage]), low, high)
    assert tokens["ratio"].item() == ratio  # exact, so the bound is hit
    assert not (tokens["clipped_low"] | tokens["clipped_high"]).any()
    loss.sum().backward()
    assert loss.item() == new.grad.item() == -ratio * advantage


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.281, 1, "high"), (1.279, 1, ""), (1.281, -1, ""), (1.279, -1, ""),
        (0.799, -1, "low"), (0.801, -1, ""), (0.799, 1, ""), (0.801, 1, ""),
    ],
)  # fmt: skip
def test_asymmetric_clip_just_beside_the_bounds(ratio, advantage, clipped):
    new = vector([math.log(ratio)], grad=True)
    loss, tokens = ppo_clip_loss(new, vector([0.0]), vector([advantage]), LOW, HIGH)
    loss.sum().backward()
    assert (bool(tokens["clipped_low"]), bool(tokens["clipped_high"])) == (clipped == "low", clipped == "high")
    expected = {"high": 1 + HIGH, "low": 1 - LOW, "": ratio}[clipped]
    np.testing.assert_allclose(loss.item(), -expected * advantage, rtol=1e-12)
    np.testing.assert_allclose(new.grad.item(), 0 if clipped else -ratio * advantage, rtol=1e-12)


@pytest.mark.parametrize(("low", "high"), [(LOW, HIGH), (0.0, 0.0)])
def test_equal_logprobs_have_ratio_one_and_the_plain_policy_gradient(low, high):
    new, _, advantages, weights = random_batch(4, [7, 50, 3], "sequence-mean", dtype=torch.float32)
    leaf = new.clone().requires_grad_()
    _, tokens = ppo_clip_loss(leaf, new, advantages, low, high)
    assert (tokens["ratio"] == 1).all()
    loss, metrics = policy_loss(leaf, new, advantages, weights, low, high)
    loss.backward()
    assert torch.equal(leaf.grad.view(torch.int32), (-advantages * weights).view(torch.int32))
    assert metrics["clipped"] == metrics["log_ratio_abs"] == 0


def test_token_weights():
    mean = token_weights([1, 0, 3], "token-mean")
    assert [w.tolist() for w in mean] == [[0.25], [], [0.25] * 3]
    per_sequence = token_weights([1, 0, 4], "sequence-mean")  # the empty response is no sequence
    assert [w.tolist() for w in per_sequence] == [[0.5], [], [0.125] * 4]
    assert all(w.dtype == np.float32 for w in mean + per_sequence)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [3, -1]])
@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
def test_token_weights_refuse_a_mean_over_nothing(lengths, aggregation):
    with pytest.raises(UsageError):
        token_weights(lengths, aggregation)


def test_token_weights_refuse_an_unknown_aggregation():
    with pytest.raises(ConfigError, match="token-sum"):
        token_weights([1], "token-sum")


def test_constant_length_weights():
    weights = token_weights([1, 0, 4], "constant-length", 8)  # the empty response is one of the three
    assert [w.tolist() for w in weights] == [[np.float32(1 / 24)], [], [np.float32(1 / 24)] * 4]
    with pytest.raises(ConfigError, match="max_new_tokens"):
        token_weights([1], "constant-length")


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual"),
    [(3.1, -1, True), (2.9, -1, False), (1000.0, -2, True), (3.1, 1, False), (0.5, -1, False)],
)
def test_dual_clip_bounds_a_growing_ratio_of_bad_tokens(ratio, advantage, dual):
    new = vector([math.log(ratio)], grad=True)
    loss, tokens = ppo_clip_loss(new, vector([0.0]), vector([advantage]), LOW, HIGH, 3.0)
    assert bool(tokens["clipped_dual"]) is dual
    if dual:
        loss.sum().backward()
        assert (loss.item(), new.grad.item()) == (-3.0 * advantage, 0.0)
    else:
        assert loss.item() == ppo_clip_loss(new, vector([0.0]), vector([advantage]), LOW, HIGH)[0].item()


def test_dual_clip_exactly_at_the_bound_keeps_the_gradient():
    new = vector([math.log(2.0)], torch.float32, grad=True)
    loss, tokens = ppo_clip_loss(new, torch.zeros(1), -torch.ones(1), LOW, HIGH, 2.0)
    loss.sum().backward()
    assert tokens["ratio"].item() == 2.0
    assert (bool(tokens["clipped_dual"]), loss.item(), new.grad.item()) == (False, 2.0, 2.0)


def test_dual_clip_survives_a_ratio_that_overflows():
    leaf = torch.zeros(2, requires_grad=True)
    loss, metrics = policy_loss(leaf, torch.tensor([0.0, -90.0]), -torch.ones(2), torch.ones(2), LOW, HIGH, 3.0)
    loss.backward()
    assert loss == 4
    assert leaf.grad.tolist() == [1.0, 0.0]
    assert (metrics["clipped"], metrics["clipped_high"], metrics["clipped_dual"], metrics["overflowed"]) == (1, 0, 1, 1)
