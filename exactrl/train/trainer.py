"""The trainer: packed micro-batches through the same model that rolls out, fp32 masters, AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from exactrl.algo.algorithm import Algorithm, TokenBatch
from exactrl.algo.losses import token_weights, weighted_sum
from exactrl.errors import ConfigError, UsageError
from exactrl.model.attention_state import PackedState
from exactrl.model.qwen3 import Probe, Qwen3
from exactrl.model.weights import compute_digest, master_digest, named_weights, refresh, unique_weights
from exactrl.protocols import Observer
from exactrl.train.optimizer import clip_gradients, make_optimizer
from exactrl.train.packing import MicroBatch, pack
from exactrl.types import Sample

LogprobArray = NDArray[np.float32]


class Trainer:
    """Implements protocols.Trainer on one device.

    In true-on-policy mode the rollout's logprobs are the old logprobs: parity is proven, so no pass recomputes them.
    `recompute_old_logprobs` runs that pass, as frameworks without parity must.

    `lr_at` gives the learning rate of RL step 1, 2, ...; without it, it is always `lr`. `max_new_tokens` is for the
    aggregation "constant-length" only.
    """

    def __init__(
        self,
        model: Qwen3,
        algorithm: Algorithm,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
        minibatches: int = 1,
        max_tokens_per_microbatch: int = 8192,
        loss_aggregation: str = "token-mean",
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        entropy_coef: float = 0.0,
        max_new_tokens: int = 0,
        lr_at: Callable[[int], float] | None = None,
        recompute_old_logprobs: bool = False,
        see: Probe | None = None,
    ) -> None:
        self.model, self.algorithm, self.version = model, algorithm, 0
        self.minibatches, self.budget, self.aggregation = minibatches, max_tokens_per_microbatch, loss_aggregation
        self.clip = (clip_low, clip_high)
        self.grad_clip, self.lr, self.lr_at = grad_clip, lr, lr_at
        self.entropy_coef, self.max_new_tokens = entropy_coef, max_new_tokens
        self.recompute_old_logprobs = recompute_old_logprobs
        self.parameters = [w.master for w in unique_weights(model) if w.master is not None]
        if not self.parameters:
            raise UsageError("the trainer needs a model with master weights (trainable=True)")
        if entropy_coef and not model.ops.exact:
            raise ConfigError("entropy_coef needs exact ops: the plain ones report entropy without a gradient")
        self.optimizer = make_optimizer(self.parameters, lr, betas, weight_decay)
        self._see = (see,) if see else ()

    def step(self, samples: Sequence[Sample], *, audit: bool, observe: Observer) -> dict[str, float]:
        """One RL step; see protocols.Trainer. "train/loss" is what is minimised, entropy bonus included.

        Raises UsageError when the samples hold no response token.
        """
        self._set_lr()
        self.optimizer.zero_grad(set_to_none=True)
        old = self._old_logprobs(samples)
        if audit:
            observe("rescore", self.version, samples, self.score(samples))
        sums: dict[str, float] = {}
        norms = []
        if len(samples) < self.minibatches:
            raise UsageError(f"{len(samples)} samples are left for train.minibatches = {self.minibatches}")
        for part in np.array_split(np.arange(len(samples)), self.minibatches):
            self._accumulate(part.tolist(), samples, old, observe, sums)
            norms.append(clip_gradients(self.parameters, self.grad_clip))
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            refresh(self.model)
            self.version += 1
        return self._metrics(sums, norms)

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> list[LogprobArray]:
        """float32 logprobs of every response token, one array per sample, without gradient."""
        result: list[LogprobArray] = []
        for indices in pack(samples, self.budget):
            logprobs, _, batch = self._forward([samples[i] for i in indices])
            result += _split(logprobs, batch)
        return result

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return named_weights(self.model)

    def master_digest(self) -> str:
        return master_digest(self.model)

    def compute_digest(self) -> str:
        return compute_digest(self.model)

    def _set_lr(self) -> None:
        if self.lr_at is None:
            return
        self.lr = self.lr_at(self.version // self.minibatches + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr

    def _old_logprobs(self, samples: Sequence[Sample]) -> Sequence[LogprobArray]:
        if not self.algorithm.needs_old_logprobs:
            return [np.zeros(0, np.float32)] * len(samples)
        return self.score(samples) if self.recompute_old_logprobs else [s.logprobs for s in samples]

    def _forward(self, samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor, MicroBatch]:
        """(logprobs [N], entropy [N], the micro-batch)."""
        batch = MicroBatch.build(samples, self.model.shape)
        self.model.reserve_positions(int(batch.positions.max()) + 1)
        state = PackedState(self.model.ops, batch.rows)
        hidden = self.model(batch.ids, batch.positions, state, *self._see)
        predicting = hidden.index_select(0, batch.predict)
        logprobs, entropy = self.model.ops.logprobs(predicting, self.model.head, batch.targets, batch.temperatures)
        return logprobs, entropy, batch

    def _accumulate(
        self,
        part: list[int],
        samples: Sequence[Sample],
        old: Sequence[LogprobArray],
        observe: Observer,
        sums: dict[str, float],
    ) -> None:
        """Gradients of one minibatch, micro-batch by micro-batch. Every forward made before the step's first update is
        observed: the weights are then those of the rollout."""
        lengths = [len(samples[i].token_ids) for i in part]
        weights = token_weights(lengths, self.aggregation, self.max_new_tokens)
        version = self.version
        for indices in pack([samples[i] for i in part], self.budget):
            chosen = [samples[part[i]] for i in indices]
            logprobs, entropy, batch = self._forward(chosen)
            if all(s.weight_version == version for s in chosen):
                observe("train", version, chosen, _split(logprobs.detach(), batch))
            tokens = self._token_batch(
                logprobs, batch, chosen, [old[part[i]] for i in indices], [weights[i] for i in indices]
            )
            loss, metrics = self.algorithm.loss(tokens, *self.clip)
            if self.entropy_coef:
                loss = loss - self.entropy_coef * weighted_sum(entropy, tokens.token_weights)
            loss.backward()
            found = {"loss": loss.detach(), "entropy": entropy.detach().sum(dtype=torch.float64), **metrics}
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + float(value)

    def _token_batch(
        self,
        logprobs: torch.Tensor,
        batch: MicroBatch,
        samples: Sequence[Sample],
        old: Sequence[LogprobArray],
        weights: Sequence[LogprobArray],
    ) -> TokenBatch:
        advantages = np.repeat(np.array([s.advantage for s in samples], np.float32), batch.lengths)
        return TokenBatch(
            logprobs=logprobs,
            old_logprobs=torch.from_numpy(np.concatenate(old)),
            advantages=torch.from_numpy(advantages),
            token_weights=torch.from_numpy(np.concatenate(weights)),
            sequence_ids=batch.sequence_ids,
            num_sequences=len(samples),
        )

    def _metrics(self, sums: dict[str, float], norms: list[float]) -> dict[str, float]:
        tokens = sums["num_tokens"]
        clipped = {"train/pg_clipfrac": sums["clipped"] / tokens} if "clipped" in sums else {}
        return {
            "train/loss": sums["loss"] / self.minibatches,
            **clipped,
            "train/entropy": sums["entropy"] / tokens,
            "train/grad_norm": sum(norms) / len(norms),
            "train/lr": self.lr,
        }


def _split(logprobs: torch.Tensor, batch: MicroBatch) -> list[LogprobArray]:
    return np.split(logprobs.numpy(), np.cumsum(batch.lengths)[:-1])
