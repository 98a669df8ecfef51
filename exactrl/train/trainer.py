"""The trainer: packed micro-batches through the same model that rolls out, fp32 masters, AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from exactrl.algo.algorithm import Algorithm, TokenBatch
from exactrl.algo.kl import kl_loss
from exactrl.algo.losses import counted_only, token_weights, weighted_sum
from exactrl.errors import ConfigError, UsageError
from exactrl.model.attention_state import packed_state
from exactrl.model.qwen3 import Probe, Qwen3, unchanged
from exactrl.model.weights import compute_digest, master_digest, named_weights, refresh, unique_weights
from exactrl.ops.cuda.determinism import deterministic_algorithms
from exactrl.ops.transfer import on_device
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
    aggregation "constant-length" only. `reference` is a frozen model that `score_reference` scores with; kl_coef weighs
    the KL to it in the loss, from the reference_logprobs that samples carry.
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
        kl_coef: float = 0.0,
        kl_estimator: str = "k3",
        reference: Qwen3 | None = None,
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
        self.kl_coef, self.kl_estimator, self.reference = kl_coef, kl_estimator, reference
        self.recompute_old_logprobs = recompute_old_logprobs
        self.parameters = [w.master for w in unique_weights(model) if w.master is not None]
        if not self.parameters:
            raise UsageError("the trainer needs a model with master weights (trainable=True)")
        if entropy_coef and not model.ops.exact:
            raise ConfigError("entropy_coef needs exact ops: the plain ones report entropy without a gradient")
        self.optimizer = make_optimizer(self.parameters, lr, betas, weight_decay)
        # Shown every op's output and may replace it; "rows" are (sample of the micro-batch, position).
        self.see: Probe = see or unchanged

    def step(self, samples: Sequence[Sample], *, audit: bool, observe: Observer) -> dict[str, float]:
        """One RL step; see protocols.Trainer. "train/loss" is what is minimised, entropy bonus and KL included.

        A sample that is not `in_loss` goes through the forward, so that its tokens are compared, with weight 0. A
        minibatch of such samples alone makes no optimizer update: momentum and weight decay rest, too.
        Raises UsageError when the samples hold no response token.
        """
        with deterministic_algorithms(self.model.ops.device):
            return self._step(samples, audit, observe)

    def _step(self, samples: Sequence[Sample], audit: bool, observe: Observer) -> dict[str, float]:
        self._set_lr()
        self.optimizer.zero_grad(set_to_none=True)
        old = self._old_logprobs(samples)
        if audit:
            observe("rescore", self.version, samples, self.score(samples))
        sums: dict[str, float] = {}
        norms = []
        if len(samples) < self.minibatches:
            raise UsageError(
                f"{len(samples)} samples are left for train.minibatches = {self.minibatches}; lower it, or raise "
                "train.max_sampling_rounds"
            )
        for part in np.array_split(np.arange(len(samples)), self.minibatches):
            self._accumulate(part.tolist(), samples, old, observe, sums)
            if any(samples[i].in_loss for i in part):
                norms.append(clip_gradients(self.parameters, self.grad_clip))
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            refresh(self.model)
            self.version += 1
        return self._metrics(sums, norms)

    def score(self, samples: Sequence[Sample]) -> list[LogprobArray]:
        """float32 logprobs of every response token, one array per sample, without gradient."""
        return self._score(self.model, samples)

    def score_reference(self, samples: Sequence[Sample]) -> list[LogprobArray]:
        """`score` under the frozen reference policy: the same contract, the samples' own temperatures."""
        if self.reference is None:
            raise UsageError("this trainer has no reference policy to score with")
        return self._score(self.reference, samples)

    @torch.no_grad()
    def _score(self, model: Qwen3, samples: Sequence[Sample]) -> list[LogprobArray]:
        result: list[LogprobArray] = []
        for indices in pack(samples, self.budget):
            logprobs, _, batch = self._forward([samples[i] for i in indices], model)
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

    def _forward(
        self, samples: Sequence[Sample], model: Qwen3 | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, MicroBatch]:
        """(logprobs [N], entropy [N], the micro-batch), of the trained model unless another is given; only the trained
        model's forward is shown to `see`."""
        model = model or self.model
        see = self.see if model is self.model else unchanged
        batch = MicroBatch.build(samples, model.shape, model.ops)
        model.reserve_positions(int(batch.positions.max()) + 1)
        batch, state = on_device(batch, model.ops.device), packed_state(model.ops, batch.rows)
        if see is not unchanged:
            see("rows", batch.rows.owners(torch.arange(len(samples))))
        hidden = model(batch.ids, batch.positions, state, see)
        predicting = hidden.index_select(0, see("predicting", batch.predict))
        logprobs, entropy = model.ops.logprobs(predicting, model.head, batch.targets, batch.temperatures)
        return see("logprob", logprobs), entropy, batch

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
        weights = self._weights([samples[i] for i in part])
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
            loss = loss + self._penalties(tokens, entropy, chosen)
            loss.backward()
            _, (counted_entropy,) = counted_only(tokens.token_weights, entropy.detach())
            found = {"loss": loss.detach(), "entropy": counted_entropy.sum(dtype=torch.float64), **metrics}
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + float(value)

    def _weights(self, samples: Sequence[Sample]) -> list[LogprobArray]:
        """Token weights of a minibatch, float32 [length] each: 0 for samples that are not in the loss."""
        kept = [len(s.token_ids) for s in samples if s.in_loss]
        given = iter(token_weights(kept, self.aggregation, self.max_new_tokens) if kept else ())
        return [next(given) if s.in_loss else np.zeros(len(s.token_ids), np.float32) for s in samples]

    def _penalties(self, tokens: TokenBatch, entropy: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor | float:
        """Entropy bonus (negative) and KL to the reference policy, averaged like the loss; 0.0 without either."""
        weights = tokens.token_weights
        result: torch.Tensor | float = 0.0
        if self.entropy_coef:
            result = result - self.entropy_coef * weighted_sum(entropy, weights)
        if self.kl_coef:
            reference = self._on_device(np.concatenate([_reference(s) for s in samples]))
            _, (ours, theirs) = counted_only(weights, tokens.logprobs, reference)
            result = result + self.kl_coef * weighted_sum(kl_loss(ours, theirs, self.kl_estimator), weights)
        return result

    def _token_batch(
        self,
        logprobs: torch.Tensor,
        batch: MicroBatch,
        samples: Sequence[Sample],
        old: Sequence[LogprobArray],
        weights: Sequence[LogprobArray],
    ) -> TokenBatch:
        advantages = np.concatenate([_advantages(s) for s in samples])
        return TokenBatch(
            logprobs=logprobs,
            old_logprobs=self._on_device(np.concatenate(old)),
            advantages=self._on_device(advantages),
            token_weights=self._on_device(np.concatenate(weights)),
            sequence_ids=batch.sequence_ids,
            num_sequences=len(samples),
        )

    def _on_device(self, values: LogprobArray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.model.ops.device)

    def _metrics(self, sums: dict[str, float], norms: list[float]) -> dict[str, float]:
        """Means over the tokens in the loss; without any of them only "train/lr"."""
        if not norms:
            return {"train/lr": self.lr}
        tokens = sums["num_tokens"]
        clipped = {"train/pg_clipfrac": sums["clipped"] / tokens} if "clipped" in sums else {}
        return {
            "train/loss": sums["loss"] / len(norms),
            **clipped,
            "train/entropy": sums["entropy"] / tokens,
            "train/grad_norm": sum(norms) / len(norms),
            "train/lr": self.lr,
        }


def _advantages(sample: Sample) -> LogprobArray:
    """float32 [len(token_ids)]."""
    if sample.token_advantages is not None:
        return sample.token_advantages
    return np.full(len(sample.token_ids), sample.advantage, np.float32)


def _reference(sample: Sample) -> LogprobArray:
    if sample.reference_logprobs is None:
        raise UsageError(f"sample {sample.name} has no reference logprobs, which kl_coef needs: see score_reference")
    return sample.reference_logprobs


def _split(logprobs: torch.Tensor, batch: MicroBatch) -> list[LogprobArray]:
    return np.split(logprobs.cpu().numpy(), np.cumsum(batch.lengths)[:-1])
