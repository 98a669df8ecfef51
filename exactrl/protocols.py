"""What the loop needs from an engine, a trainer and a task, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from exactrl.types import Completion, EngineStats, Prompt, Request, Sample, Scored

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    LogprobArray = NDArray[np.float32]
    NamedTensors = Iterable[tuple[str, torch.Tensor]]


class RolloutEngine(Protocol):
    """Generates. A completion depends on weights, contract, prompt, params and noise key only."""

    weight_version: int
    stats: EngineStats

    def generate(
        self, requests: Sequence[Request], on_progress: Callable[[int, int], None] | None = None
    ) -> list[Completion]:
        """Completions in request order; on_progress(finished, total) now and then. Raises RequestError for a request
        that can never fit, before any work."""
        ...

    def load_weights(self, weights: NamedTensors, version: int) -> str:
        """Replaces all compute weights (Hugging Face names) and returns the compute digest of what kernels now read."""
        ...

    def sleep(self) -> None:
        """Gives back memory that only generating needs, for a trainer on the same device; the next `generate` takes it
        again. Forgets all cached prefixes where it does."""
        ...

    def reset_cache(self) -> None:
        """Forgets all cached prefixes: requests that follow are scheduled as in a fresh engine."""
        ...


# Called with ("train" | "rescore", weight version, samples, one float32 array of logprobs per sample).
Observer = Callable[[str, int, "Sequence[Sample]", "Sequence[LogprobArray]"], None]


class Trainer(Protocol):
    """Updates weights from samples."""

    version: int

    def step(self, samples: Sequence[Sample], *, audit: bool, observe: Observer) -> dict[str, float]:
        """One RL step: `minibatches` optimizer updates. Every gradient forward made at the samples' own version is
        passed to `observe` before the first optimizer step; on an audited step all samples are re-scored and observed
        too. `observe` may raise to stop the step before weights change. Returns the `train/...` metrics."""
        ...

    def score(self, samples: Sequence[Sample]) -> list[LogprobArray]:
        """Logprobs of every response token under the current weights, at each sample's own temperature."""
        ...

    def score_reference(self, samples: Sequence[Sample]) -> list[LogprobArray]:
        """The same under the frozen reference policy. Raises UsageError where there is none."""
        ...

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Compute weights under their Hugging Face names, in model order."""
        ...

    def master_digest(self) -> str: ...

    def compute_digest(self) -> str: ...


class Task(Protocol):
    """Prompts and rewards."""

    def train_prompts(self, start: int, count: int) -> list[Prompt]:
        """Prompts number start to start + count - 1 of an endless sequence that the run's seed fixes."""
        ...

    def eval_prompts(self) -> dict[str, list[Prompt]]:
        """Held-out prompts per table name."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def rewards(self, pairs: Sequence[tuple[Prompt, Sample]]) -> list[Scored]:
        """The rewards of samples, whose text is set, in order; what a reward function raises is in `error`."""
        ...
