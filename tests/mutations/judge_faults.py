"""Faults of the judges themselves, and of the hand-over of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

from exactrl.engine import engine as engine_module
from exactrl.engine.engine import Engine
from exactrl.errors import ModelError
from exactrl.ops.weight import Weight
from exactrl.parity import oracle as oracle_module
from exactrl.parity.oracle import Oracle
from exactrl.train.trainer import Trainer
from tests.mutations.fault import Apply, Fault, Hits, replacing, together
from tests.mutations.scenarios import ORACLE_FOREIGN, ORACLE_TRAIN, SYNC, Setup, rung, training

TIED = Setup(model={"tie_word_embeddings": True})
Tensors = Iterable[tuple[str, torch.Tensor]]
STALE = "model.layers.1.mlp.down_proj.weight"


def compared_as(change: Callable[[np.ndarray], np.ndarray]) -> Apply:
    """The oracle compares change(values) instead of bits."""

    def make(original: Callable, hits: Hits) -> Callable:
        def bits(values):
            hits()
            return change(values)

        return bits

    return replacing(oracle_module, "bits", make)


def rounded(values: np.ndarray) -> np.ndarray:
    return np.round(values.astype(np.float64), 5)


def not_a_number_is_zero(original: Callable, hits: Hits) -> Callable:
    def require_finite(self, kind, sample, values) -> None:
        hits()
        values[~np.isfinite(values)] = 0

    return require_finite


def never_strict(original: Callable, hits: Hits) -> Callable:
    def init(self, *, strict: bool, bisect_command: str) -> None:
        hits()
        original(self, strict=False, bisect_command=bisect_command)

    return init


def only_advantaged_counted(original: Callable, hits: Hits) -> Callable:
    """Tokens of samples without advantage are left out of the counts."""

    def metrics(self: Oracle) -> dict[str, float]:
        kept = {key: s for key, s in self._step.items() if s.advantage}
        if len(kept) < len(self._step):
            hits()
        for values in (self._train, self._rescore):
            for key in values.keys() - kept.keys():
                del values[key]
        self._step = kept
        return original(self)

    return metrics


def only_advantaged_judged(original: Callable, hits: Hits) -> Callable:
    """Samples are masked before the step is announced."""

    def begin(self: Oracle, samples) -> None:
        kept = list(samples)[1:]
        if samples:
            hits()
        original(self, kept)

    return begin


def own_array_allowed(original: Callable, hits: Hits) -> Callable:
    """The oracle copies what it is shown before it looks, and so cannot see whose it is."""

    def observe(self, kind, version, samples, logprobs) -> None:
        hits()
        original(self, kind, version, samples, [np.array(values) for values in logprobs])

    return observe


def any_version(original: Callable, hits: Hits) -> Callable:
    """The oracle does not look at the trainer's weight version."""

    def observe(self, kind, version, samples, logprobs) -> None:
        hits()
        original(self, kind, samples[0].weight_version, samples, logprobs)

    return observe


def nothing_loaded(original: Callable, hits: Hits) -> Callable:
    """The first hand-over arrives; later ones only change the version."""

    def load(model, tensors: Tensors, source: str) -> None:
        if source != "weight version 0":
            hits()
            return
        original(model, tensors, source)

    return load


def half_loaded(original: Callable, hits: Hits) -> Callable:
    """A hand-over breaks off, and its error is swallowed."""

    def load_weights(self: Engine, weights: Tensors, version: int) -> str:
        try:
            digest = original(self, weights if version == 0 else list(weights)[:-1], version)
        except ModelError:
            hits()
            self.weight_version = version
            return "the same"
        return digest

    return load_weights


def arriving(change: Callable[[dict[str, torch.Tensor], Engine], None]) -> Apply:
    """The tensors of every hand-over after the first are changed on their way."""

    def make(original: Callable, hits: Hits) -> Callable:
        def load_weights(self: Engine, weights: Tensors, version: int) -> str:
            tensors = dict(weights)
            if version:
                hits()
                change(tensors, self)
            return original(self, tensors.items(), version)

        return load_weights

    return replacing(Engine, "load_weights", make)


def one_stale(tensors: dict[str, torch.Tensor], engine: Engine) -> None:
    tensors[STALE] = engine.model.layers[1].down.value().clone()


def keys_and_values_swapped(tensors: dict[str, torch.Tensor], engine: Engine) -> None:
    k, v = (f"model.layers.1.self_attn.{x}_proj.weight" for x in "kv")
    tensors[k], tensors[v] = tensors[v], tensors[k]


def narrowed(tensors: dict[str, torch.Tensor], engine: Engine) -> None:
    tensors.update({name: t.bfloat16().float() for name, t in tensors.items()})


def panels_kept(trainable: bool, gathered: bool) -> Apply:
    """The panels of one side's weights (tied head: the embedding; else matrices) stay as they were first packed."""

    def make(original: Callable, hits: Hits) -> Callable:
        def set_(self: Weight, value: torch.Tensor) -> None:
            before = None if self.panels is None else self.panels.clone()
            original(self, value)
            stays = (self.master is not None) == trainable and self.gathered == gathered
            if before is not None and self.panels is not None and stays and before.any():
                if not torch.equal(before, self.panels):
                    hits()
                self.panels.copy_(before)

        return set_

    return replacing(Weight, "_set", make)


def _constant(original: Callable, hits: Hits) -> Callable:
    return lambda *args: "the same"


BLIND = together(replacing(engine_module, "compute_digest", _constant), replacing(Trainer, "compute_digest", _constant))


def version_kept(original: Callable, hits: Hits) -> Callable:
    """The engine takes new weights but goes on calling them by the old number."""

    def load_weights(self: Engine, weights: Tensors, version: int) -> str:
        digest = original(self, weights, version)
        if version:
            hits()
            self.weight_version = version - 1
        return digest

    return load_weights


FAULTS = [
    Fault("tolerance/rounded", "logprobs are compared to five decimals", compared_as(rounded),
          rung("oracle", "one logprob was one ulp off, but train/logprob_mismatch_tokens is 0")),
    Fault("tolerance/first-token", "only the first token of a sample is compared", compared_as(lambda v: v[:1]),
          rung("oracle", "one logprob was one ulp off")),
    Fault("sign_of_zero/equal", "-0 equals +0", compared_as(lambda v: v), rung("oracle", r"the oracle let pass: \+0")),
    Fault("nan/zero", "what is not finite counts as 0", replacing(Oracle, "_require_finite", not_a_number_is_zero),
          rung("oracle", ".*the oracle let pass: a NaN of the rollout")),
    Fault("strictness/never", "a mismatch is counted but stops nothing", replacing(Oracle, "__init__", never_strict),
          rung("oracle", "the oracle let pass: one ulp")),
    Fault("count/masked-left-out", "tokens without advantage are left out of the count",
          replacing(Oracle, "metrics", only_advantaged_counted),
          rung("after_update", "the oracle accounts for")),
    Fault("count/masked-before", "masked samples are not announced", replacing(Oracle, "begin", only_advantaged_judged),
          ORACLE_FOREIGN),
    Fault("itself/unseen", "the oracle cannot see that an array is the rollout's own",
          replacing(Oracle, "observe", own_array_allowed), rung("oracle", "the oracle let pass: the rollout's own")),
    Fault("old_samples/version-ignored", "the oracle ignores the weight version",
          replacing(Oracle, "observe", any_version), rung("oracle", "the oracle let pass: another weight version")),
    Fault("stale_weights/all", "the engine keeps its weights but counts the version on",
          replacing(engine_module, "load_weights", nothing_loaded), SYNC),
    Fault("stale_weights/one", "one tensor stays that of the version before", arriving(one_stale), SYNC),
    Fault("stale_weights/all-blind", "stale weights, and digests that say nothing",
          together(BLIND, replacing(engine_module, "load_weights", nothing_loaded)), ORACLE_TRAIN),
    Fault("stale_weights/one-blind", "one stale tensor, and digests that say nothing",
          together(BLIND, arriving(one_stale)), ORACLE_TRAIN),
    Fault("stale_weights/half", "a hand-over breaks off and nobody is told",
          together(BLIND, replacing(Engine, "load_weights", half_loaded)),
          training("engine, half-loaded weights", "ModelError: the last load_weights failed half-way")),
    Fault("stale_weights/panels", "panels of the first version", panels_kept(trainable=False, gathered=False), SYNC),
    Fault("stale_weights/version-not-counted", "new weights under the old version", 
          replacing(Engine, "load_weights", version_kept),
          training("oracle, nothing compared", "ParityError: none of the step's")),
    Fault("wrong_weights/keys-and-values", "k_proj and v_proj are swapped", arriving(keys_and_values_swapped), SYNC),
    Fault("wrong_weights/narrowed", "weights travel as bfloat16", arriving(narrowed), SYNC),
    Fault("tied_head/engine", "the engine's tied head keeps the old embedding",
          panels_kept(trainable=False, gathered=True), SYNC, TIED),
    Fault("tied_head/trainer", "the trainer's tied head keeps the old embedding",
          panels_kept(trainable=True, gathered=True), SYNC, TIED),
]  # fmt: skip
