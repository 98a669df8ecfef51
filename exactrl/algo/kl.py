"""Estimators of KL(policy || reference) from sampled tokens.

Source: J. Schulman, "Approximating KL Divergence", 2020, joschu.net/blog/kl-approx.html. With d = logprob - reference
logprob of tokens that the policy sampled:
  k1  d                   unbiased, high variance, may be negative
  k2  d^2 / 2             biased, low variance, never negative
  k3  exp(-d) - 1 + d     unbiased, low variance, never negative
"""

from __future__ import annotations

import torch

from exactrl.errors import ConfigError, NonFiniteError


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """The estimate at each token, [N] in nats; for a penalty in the reward, or to report.

    Its own derivative is that of KL only for k2: E[grad k1] = 0, and E[grad k3] is the gradient of KL(reference ||
    policy). A loss takes `kl_loss`. Raises ConfigError for another estimator, NonFiniteError where k3 overflows.
    """
    d = logprobs - reference
    if estimator not in ("k1", "k2", "k3"):
        raise ConfigError(f'train.kl_estimator must be "k1", "k2" or "k3", not {estimator!r}')
    kl = {"k1": lambda: d, "k2": lambda: d * d / 2, "k3": lambda: torch.expm1(-d) + d}[estimator]()
    if not kl.isfinite().all():
        i = int(torch.nonzero(~kl.isfinite())[0])
        at = f"response token {i} with logprob {float(logprobs[i])}, reference logprob {float(reference[i])}"
        raise NonFiniteError(f"the {estimator} estimate of KL is not finite at {at}")
    return kl


def kl_loss(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """Value of the estimator, gradient of KL, [N].

    The gradient of KL(policy || reference) over sampled tokens is E[d * grad logprob] (the score function's own mean is
    0), which is the derivative of k2, whatever estimates the value: Tang and Munos, arXiv:2506.09477. Token by token,
    as every loss here, it leaves out that a token also decides which later ones are compared: a partial gradient of the
    KL of whole responses. A penalty in the reward has no such gap.
    """
    value = kl_estimate(logprobs, reference, estimator).detach()
    with_gradient = kl_estimate(logprobs, reference, "k2")
    return with_gradient - with_gradient.detach() + value
