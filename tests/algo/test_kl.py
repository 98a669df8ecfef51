"""KL estimators: their means and their mean gradients against an exact KL over a small vocabulary, in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exactrl.algo.kl import kl_estimate, kl_loss
from exactrl.errors import ConfigError, NonFiniteError


def log_softmax(x):
    return x - np.log(np.exp(x).sum())


def policies(seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=6), log_softmax(rng.normal(size=6))


def exact_kl(logits, reference):
    lp = log_softmax(logits)
    return float((np.exp(lp) * (lp - reference)).sum())


def mean_and_gradient(function, logits, reference, estimator):
    """Over all tokens of the vocabulary with the policy's own probabilities: what sampling converges to."""
    leaf = torch.tensor(logits, requires_grad=True)
    logprobs = torch.log_softmax(leaf, -1)
    probabilities = logprobs.detach().exp()
    mean = (probabilities * function(logprobs, torch.from_numpy(reference), estimator)).sum()
    mean.backward()
    return float(mean.detach()), leaf.grad.numpy()


def slope(f, logits):
    steps = 1e-6 * np.eye(len(logits))
    return np.array([(f(logits + s) - f(logits - s)) / 2e-6 for s in steps])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_value_and_gradient(seed, estimator):
    logits, reference = policies(seed)
    mean, gradient = mean_and_gradient(kl_loss, logits, reference, estimator)
    d = log_softmax(logits) - reference
    expected = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[estimator]
    np.testing.assert_allclose(mean, (np.exp(log_softmax(logits)) * expected).sum(), rtol=1e-12)
    if estimator != "k2":  # the biased one
        np.testing.assert_allclose(mean, exact_kl(logits, reference), rtol=1e-9)
    np.testing.assert_allclose(gradient, slope(lambda x: exact_kl(x, reference), logits), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("seed", range(3))
def test_own_derivatives_of_the_estimators_are_documented(seed):
    """k1: 0 on average. k2: that of KL. k3: that of the KL the other way round."""
    logits, reference = policies(seed)

    def other_way(x):
        return float((np.exp(reference) * (reference - log_softmax(x))).sum())

    expected = {
        "k1": np.zeros(6),
        "k2": slope(lambda x: exact_kl(x, reference), logits),
        "k3": slope(other_way, logits),
    }
    for estimator, theirs in expected.items():
        _, mine = mean_and_gradient(kl_estimate, logits, reference, estimator)
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-8, err_msg=estimator)


def test_equal_policies_have_no_kl():
    lp = torch.tensor([-1.0, -2.5], requires_grad=True)
    for estimator in ("k1", "k2", "k3"):
        value = kl_loss(lp, lp.detach(), estimator)
        (gradient,) = torch.autograd.grad(value.sum(), lp)
        assert not value.any()
        assert not gradient.any()


def test_small_differences_keep_k3_positive():
    d = torch.tensor([1e-4, -1e-4, 3e-4])
    assert (kl_estimate(d, torch.zeros(3), "k3") >= 0).all()


def test_unknown_estimators_and_overflow_are_refused():
    with pytest.raises(ConfigError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(NonFiniteError, match="token 1 with logprob -1000"):
        kl_estimate(torch.tensor([0.0, -1000.0]), torch.zeros(2), "k3")
