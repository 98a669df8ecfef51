"""Policy losses on flat response tokens, and the weights that make their sum a mean over the whole minibatch.

Legend: N response tokens of one micro-batch, sequence after sequence; no prompt tokens, no padding. Which tokens count
is decided by lengths, never by token ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from exactrl.errors import ConfigError, NonFiniteError, UsageError


def token_weights(lengths: Sequence[int], aggregation: str, max_new_tokens: int = 0) -> list[NDArray[np.float32]]:
    """Weight of every token, float32 [length] per sequence.

    `lengths` are the response lengths (tokens) of the whole minibatch, over all micro-batches and ranks:
      "token-mean"       1 / total number of tokens (DAPO, arXiv:2503.14476, section 3.3)
      "sequence-mean"    1 / (number of sequences x length of the token's sequence) (GRPO, arXiv:2402.03300, eq. 3)
      "constant-length"  1 / (number of sequences x max_new_tokens), the longest response allowed (Dr. GRPO,
                         arXiv:2503.20783): a token weighs the same in every step of a run
    The weights of the first two add up to 1 over the minibatch; those of the last to the mean length / max_new_tokens.
    An empty response has an empty array. It is no sequence to "sequence-mean", whose mean it has no value for, but one
    to "constant-length", whose sum over it is 0. A truncated response counts like any other.
    Raises ConfigError for another aggregation or a missing max_new_tokens, UsageError for a negative length or a
    minibatch without any token.
    """
    _check_aggregation(aggregation, max_new_tokens)
    if any(length < 0 for length in lengths):
        raise UsageError(f"a response length is negative: {min(lengths)}")
    num_tokens = sum(lengths)
    if num_tokens == 0:
        raise UsageError(f"a minibatch of {len(lengths)} responses has no token, so its mean loss is undefined")
    num_sequences = sum(length > 0 for length in lengths)
    denominators = {
        "token-mean": [num_tokens] * len(lengths),
        "sequence-mean": [num_sequences * max(length, 1) for length in lengths],
        "constant-length": [len(lengths) * max_new_tokens] * len(lengths),
    }[aggregation]
    return [np.full(n, 1 / d, np.float32) for n, d in zip(lengths, denominators, strict=True)]


def _check_aggregation(aggregation: str, max_new_tokens: int) -> None:
    known = ("token-mean", "sequence-mean", "constant-length")
    if aggregation not in known:
        raise ConfigError(f"train.loss_aggregation must be one of {', '.join(known)}, not {aggregation!r}")
    if aggregation == "constant-length" and max_new_tokens < 1:
        raise ConfigError(f"constant-length needs rollout.max_new_tokens of at least 1, not {max_new_tokens}")


def counted_only(weights: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(which tokens have a weight, bool [N]; the values with 0 where a token has none, whatever was there, NaN too)."""
    counted = weights != 0
    return counted, [torch.where(counted, x, 0.0) for x in values]


def weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum_i weights_i * values_i, a float64 scalar; with `token_weights`, this micro-batch's part of the mean.

    A value of weight 0 is left out, not multiplied: 0 * NaN would be NaN. So is its gradient.
    """
    return (torch.where(weights != 0, values, 0.0) * weights).sum(dtype=torch.float64)


def ppo_clip_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) per token, ratio = exp(logprobs - old_logprobs).

    With dual_clip = c > 1 the objective of a token with A < 0 is at least c * A; 0 turns that off.
    All tensors [N]; logprobs and old_logprobs in nats. Returns the loss [N] and, without gradient, "ratio" [N] and
    "clipped_low", "clipped_high", "clipped_dual" bool [N]: tokens whose gradient the clip made zero. A ratio exactly on
    a bound is not clipped. Sources: PPO, arXiv:1707.06347, eq. 7; two bounds: DAPO "clip-higher", arXiv:2503.14476,
    section 3.1; dual clip: arXiv:1912.09729.

    The clip is decided before exp enters the graph: a clipped token, or one with A = 0, has gradient exactly 0 even
    where its ratio overflows to infinity (log-ratio above 88.7 in float32), instead of inf * 0 = NaN.
    Raises NonFiniteError for a NaN or infinite logprob or advantage, and for an infinite loss: without dual clip
    nothing bounds a growing ratio when A < 0.
    """
    shapes = [tuple(t.shape) for t in (logprobs, old_logprobs, advantages)]
    assert len(set(shapes)) == 1, shapes
    assert not any(t.requires_grad for t in (old_logprobs, advantages)), "old logprobs and advantages are constants"
    assert dual_clip == 0 or dual_clip > 1, dual_clip
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.detach().exp()
    low = (advantages < 0) & (ratio < 1 - clip_low)
    high = (advantages > 0) & (ratio > 1 + clip_high)
    dual = (advantages < 0) & (ratio > (dual_clip or torch.inf))
    chosen = torch.where(low | high | dual | (advantages == 0), 0.0, log_ratio).exp()
    for clipped, bound in ((low, 1 - clip_low), (high, 1 + clip_high), (dual, dual_clip)):
        chosen = chosen.masked_fill(clipped, bound)
    loss = -(chosen * advantages)
    require_finite(logprobs, old_logprobs, advantages, loss)
    return loss, {"ratio": ratio, "clipped_low": low, "clipped_high": high, "clipped_dual": dual}


def require_finite(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, loss: torch.Tensor
) -> None:
    """Raises NonFiniteError naming the first token with a NaN or infinite logprob, advantage or loss; all [N]."""
    finite = logprobs.isfinite() & old_logprobs.isfinite() & loss.isfinite()  # a bad advantage makes a bad loss
    if finite.all():
        return
    i = int(torch.nonzero(~finite)[0])
    new, old, advantage = float(logprobs.detach()[i]), float(old_logprobs[i]), float(advantages[i])
    what = f"response token {i} of the micro-batch: logprob {new}, old logprob {old}, advantage {advantage}"
    if np.isfinite([new, old, advantage]).all():
        raise NonFiniteError(
            f"the loss is infinite at {what}; the policy moved too far from the one that sampled, and the clip does "
            "not bound this side: lower train.lr or train.minibatches, or set train.dual_clip"
        )
    raise NonFiniteError(f"not finite: {what}; the run stops rather than treat the token as on-policy")


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    token_weights: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """sum_i token_weights_i * ppo_clip_loss_i (float64 scalar) and sums for metrics; all tensors [N].

    Sums over micro-batches and ranks, however the minibatch is split, add up to its loss; gradients likewise. Where a
    wrapper averages gradients over ranks, the caller multiplies by their number.
    Metrics are those of metric_sums; "clipped" are tokens whose gradient the clip made zero, dual clip included.
    Tokens of weight 0 count nowhere and may hold anything, NaN too. Raises what ppo_clip_loss raises for the others.
    """
    assert token_weights.shape == logprobs.shape, (token_weights.shape, logprobs.shape)
    counted, (logprobs, old_logprobs, advantages) = counted_only(token_weights, logprobs, old_logprobs, advantages)
    loss, tokens = ppo_clip_loss(logprobs, old_logprobs, advantages, clip_low, clip_high, dual_clip)
    low, high, dual = (tokens[f"clipped_{side}"] for side in ("low", "high", "dual"))
    sums = metric_sums(counted, tokens["ratio"], logprobs.detach() - old_logprobs, low, high | dual)
    sums |= {"clipped_high": high.sum(dtype=torch.float64), "clipped_dual": dual.sum(dtype=torch.float64)}
    return weighted_sum(loss, token_weights), sums


def metric_sums(
    counted: torch.Tensor, ratio: torch.Tensor, log_ratio: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Sums over the tokens of a micro-batch, float64 scalars without gradient that add up over micro-batches.

    "num_tokens", "clipped", "clipped_low", "clipped_high" (tokens clipped from below and from above), "overflowed"
    (tokens whose ratio is infinite) and "log_ratio_abs" (sum of |logprobs - old_logprobs|). All arguments [N].
    """
    sums = {
        "num_tokens": counted,
        "clipped": low | high,
        "clipped_low": low,
        "clipped_high": high,
        "overflowed": ratio.isinf(),
        "log_ratio_abs": log_ratio.abs(),
    }
    return {key: value.sum(dtype=torch.float64) for key, value in sums.items()}
