"""The check that every step passes: rollout, gradient forward and re-scoring forward agree bit for bit.

Equality is of bit patterns; the count of compared tokens is reported beside every difference; a value is never compared
with itself, since each side's arrays come from its own forward (docs/numerics.md, "The check that cannot be fooled").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from exactrl.errors import NonFiniteError, ParityError
from exactrl.types import Sample


class Oracle:
    """Compares one step's logprobs. `strict` (true-on-policy mode): the first mismatch stops the run.

    `bisect_command` is what a message tells the user to run next.
    """

    def __init__(self, *, strict: bool, bisect_command: str) -> None:
        self.strict, self.bisect_command = strict, bisect_command
        self.begin([])

    def begin(self, samples: Sequence[Sample]) -> None:
        """Starts a step. Raises ParityError for a missing rollout logprob or samples of several weight versions, which
        no trainer could compare at once; NonFiniteError for a logprob that is not finite."""
        self._step: dict[int, Sample] = {id(s): s for s in samples}
        self._train: dict[int, NDArray[np.float32]] = {}
        self._rescore: dict[int, NDArray[np.float32]] = {}
        if len(self._step) != len(samples):
            twice = next(s for i, s in enumerate(samples) if any(s is t for t in samples[:i]))
            raise ParityError(f"sample {twice.name} is in the step twice; it would be trained on twice, compared once")
        for s in samples:
            found = kind_of(s.logprobs)
            if found != f"float32 ({len(s.token_ids)},)":
                raise ParityError(
                    f"sample {s.name}: {len(s.token_ids)} tokens but its logprobs are {found}; "
                    "every sampled token needs the float32 logprob recorded while decoding"
                )
            self._require_finite("rollout", s, s.logprobs)
        other = next((s for s in samples if s.weight_version != samples[0].weight_version), None)
        if other is not None:
            raise ParityError(
                f"sample {other.name} was rolled out at weight version {other.weight_version}, sample "
                f"{samples[0].name} of the same step at {samples[0].weight_version}; a step's samples share one version"
            )

    def observe(
        self, kind: str, version: int, samples: Sequence[Sample], logprobs: Sequence[NDArray[np.float32]]
    ) -> None:
        """A trainer forward's logprobs of some of the step's samples; `kind` is "train" or "rescore".

        Raises ParityError (strict mode) naming the first mismatching token, and always for logprobs that cannot be
        compared: another weight version, another length, a sample that is not of this step or was seen before.
        """
        seen = {"train": self._train, "rescore": self._rescore}[kind]
        for sample, values in zip(samples, logprobs, strict=True):
            if id(sample) not in self._step or id(sample) in seen:
                raise ParityError(f"sample {sample.name}: not of this step, or given to the {kind} comparison twice")
            if sample.weight_version != version:
                raise ParityError(
                    f"sample {sample.name} was rolled out at weight version {sample.weight_version}, but the trainer "
                    f"is at {version}; its logprobs cannot be compared"
                )
            if kind_of(values) != kind_of(sample.logprobs):
                raise ParityError(
                    f"sample {sample.name}: the {kind} forward gave {kind_of(values)}, the rollout "
                    f"{kind_of(sample.logprobs)}"
                )
            key = id(sample)
            sides = {"rollout": sample.logprobs, "train": self._train.get(key), "rescore": self._rescore.get(key)}
            for side, other in sides.items():
                if other is not None and np.shares_memory(values, other):
                    raise ParityError(f"sample {sample.name}: the {kind} logprobs are the {side}'s own array")
            self._require_finite(kind, sample, values)
            seen[id(sample)] = values
            if self.strict:
                self._require_equal(kind, sample, values)

    def metrics(self) -> dict[str, float]:
        """The step's `train/...` parity metrics. What cannot be computed is absent.

        A token is compared when the gradient forward or the re-scoring forward gave its logprob at the rollout's weight
        version; compared + uncompared = all sampled tokens. Raises ParityError (strict mode) when none was compared.
        """
        total = sum(len(s.token_ids) for s in self._step.values())
        compared = {key: self._train.get(key, self._rescore.get(key)) for key in {**self._rescore, **self._train}}
        num_compared = sum(len(v) for v in compared.values() if v is not None)
        if self.strict and num_compared == 0:
            raise ParityError(f"none of the step's {total} sampled tokens was compared; parity is not shown")
        result: dict[str, float] = {
            "train/logprob_compared_tokens": num_compared,
            "train/logprob_uncompared_tokens": total - num_compared,
            "train/logprob_mismatch_tokens": self._mismatches(compared),
        }
        if num_compared:
            ordered = [key for key in self._step if key in compared]
            ours = np.concatenate([self._step[key].logprobs for key in ordered]).astype(np.float64)
            theirs = np.concatenate([compared[key] for key in ordered]).astype(np.float64)
            difference = np.abs(theirs - ours)
            result["train/train_rollout_logprob_abs_diff"] = float(difference.mean())
            result["train/logprob_abs_diff_max"] = float(difference.max())
        if self._rescore:
            result["train/rescore_mismatch_tokens"] = self._mismatches(self._rescore)
        return result

    def _mismatches(self, values: dict) -> int:
        return sum(int((bits(v) != bits(self._step[key].logprobs)).sum()) for key, v in values.items())

    def _require_finite(self, kind: str, sample: Sample, values: NDArray[np.float32]) -> None:
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            i = int(bad[0])
            raise NonFiniteError(f"sample {sample.name}: {kind} logprob of {where(sample, i)} is {values[i]}")

    def _require_equal(self, kind: str, sample: Sample, values: NDArray[np.float32]) -> None:
        different = np.flatnonzero(bits(values) != bits(sample.logprobs))
        if different.size:
            i = int(different[0])
            raise ParityError(
                f"rollout and {kind} logprob differ for {different.size} of {len(values)} tokens of sample "
                f"{sample.name} (weight version {sample.weight_version}). First: {where(sample, i)}: rollout "
                f"{show(sample.logprobs[i])}, {kind} {show(values[i])}. "
                f"To find the rung that breaks: {self.bisect_command}"
            )


def bits(values: NDArray[np.float32]) -> NDArray[np.int32]:
    """Integer view: equality of these is equality of every bit (-0 is not +0)."""
    return np.ascontiguousarray(values).view(np.int32)


def kind_of(values: object) -> str:
    """Type and shape, in words that compare."""
    return f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__


def where(sample: Sample, i: int) -> str:
    return f"response token {i} (id {sample.token_ids[i]}, position {len(sample.prompt_token_ids) + i})"


def show(value: np.float32) -> str:
    return f"{float(value):.9g} (0x{int(value.view(np.uint32)):08x})"
