"""What a ladder is run on: one model in one dtype, ways to build engines and trainers, and the requests it serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from exactrl.contract import noise_key
from exactrl.types import Completion, Request, Sample, SamplingParams

if TYPE_CHECKING:
    from exactrl.engine.engine import Engine
    from exactrl.model.qwen3 import Qwen3
    from exactrl.train.trainer import Trainer

# Prompt lengths around page (16) and block (64) borders, and beyond the first split (512) where the model allows.
LENGTHS = (1, 2, 15, 16, 17, 33, 47, 63, 64, 65, 90, 130, 520)
NEW_TOKENS = 20
TRACED = (1, 17, 33, 65)  # those of LENGTHS that are also traced op by op
SHARED = 48  # leading tokens that every second prompt shares


@dataclass
class Subject:
    """rollout_model is shared by the engines that `make_engine` builds and never changed; `make_loop` builds an engine
    and a trainer with weights of their own."""

    rollout_model: Qwen3
    make_engine: Callable[..., Engine]
    make_trainer: Callable[..., Trainer]
    make_loop: Callable[[], tuple[Engine, Trainer]]
    dtype_name: str
    seed: int

    @cached_property
    def requests(self) -> list[Request]:
        limit, vocab = self.rollout_model.config.max_positions, self.rollout_model.config.vocab_size
        generator = np.random.default_rng(self.seed)
        common = generator.integers(0, vocab, SHARED).tolist()
        requests = []
        for i, n in enumerate(LENGTHS):
            if n + NEW_TOKENS > limit:
                continue
            ids = generator.integers(0, vocab, n).tolist()
            if i % 2:
                ids[: min(n, SHARED)] = common[:n]
            temperature = (1.0, 0.7, 0.0)[i % 3]
            params = SamplingParams(NEW_TOKENS, temperature, (int(generator.integers(0, vocab)),))
            requests.append(Request(f"r{i}", tuple(ids), params, noise_key(self.seed, "check", 0, 0, f"r{i}", 0)))
        return requests

    @cached_property
    def traced(self) -> list[Request]:
        """A few short requests: the memory of a trace grows with their tokens."""
        return [r for r in self.requests if len(r.token_ids) in TRACED]

    @cached_property
    def baseline(self) -> list[Completion]:
        """Trajectories that the engine rungs compare with: everything at once, ample cache."""
        return self.make_engine().generate(self.requests)

    @cached_property
    def samples(self) -> list[Sample]:
        return to_samples(self.requests, self.baseline)

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


def to_samples(requests: Sequence[Request], completions: Sequence[Completion]) -> list[Sample]:
    """Trainable samples of requests and what came of them, in order."""
    return [_sample(r, c, i) for i, (r, c) in enumerate(zip(requests, completions, strict=True))]


def _sample(request: Request, completion: Completion, i: int) -> Sample:
    """A trainable sample. Its advantage is made up, since parity does not depend on it; every third is 0, since tokens
    that teach nothing must be compared, too."""
    return Sample(
        prompt_id=request.id, sample_index=0, prompt_token_ids=request.token_ids, token_ids=completion.token_ids,
        logprobs=completion.logprobs, finish_reason=completion.finish_reason,
        weight_version=completion.weight_version, temperature=request.params.temperature or 1.0,
        advantage=(1.0, -1.0, 0.0)[i % 3],
    )  # fmt: skip
