"""Records that cross rooms. They hold plain Python and numpy values, never torch tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled.

    temperature 0 means greedy; its logprobs are then those at temperature 1.
    stop_token_ids end a response; the stop token is part of the response and of its logprobs.
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. `noise_key` (64 bit) is `contract.noise_key(...)`: all its randomness."""

    id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    noise_key: int = 0


@dataclass(slots=True)
class Completion:
    """What the engine returns for a request, in request order.

    token_ids   generated ids, stop token included
    logprobs    float32 [len(token_ids)], recorded while decoding, at the request's own temperature
    finish_reason  "stop" (a stop token) or "length" (max_new_tokens reached)
    weight_version the version of the weights that produced every token
    """

    id: str
    token_ids: list[int]
    logprobs: NDArray[np.float32]
    finish_reason: str
    weight_version: int
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row of a data set, tokenised once. `id` is unique within the data set; `metadata` are its other columns."""

    id: str
    text: str
    token_ids: tuple[int, ...]
    label: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Sample:
    """One response to a prompt, exactly as the engine returned it (ids are never re-tokenised).

    token_ids, logprobs: the response only, float32 [len(token_ids)]; prompt_token_ids come before them.
    reward is None until it is known, and stays None where the reward function failed (reward_error says how) and the
    sample is dropped; reward_reason is a grader's word for its verdict. advantage is one number for the whole response;
    token_advantages, float32 [len(token_ids)], take its place where an algorithm gives each token its own.
    reference_logprobs, float32 [len(token_ids)]: those of the reference policy. in_loss: False keeps the sample out of
    the loss; its tokens are compared like all others.
    """

    prompt_id: str
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: list[int]
    logprobs: NDArray[np.float32]
    finish_reason: str
    weight_version: int
    temperature: float
    text: str | None = None
    label: str = ""
    reward: float | None = None
    reward_error: str = ""
    reward_reason: str = ""
    advantage: float = 0.0
    token_advantages: NDArray[np.float32] | None = None
    reference_logprobs: NDArray[np.float32] | None = None
    in_loss: bool = True

    @property
    def name(self) -> str:
        return f"{self.prompt_id}#{self.sample_index}"


@dataclass(frozen=True, slots=True)
class Scored:
    """The reward of one sample. `reason` is the grader's word for its verdict where it has one, else ""; `error` is set
    where there is no reward, and `value` is then 0.0."""

    value: float
    reason: str = ""
    error: Exception | None = None


@dataclass(slots=True)
class Group:
    """All samples of one prompt in one step."""

    prompt: Prompt
    samples: list[Sample]


@dataclass(slots=True)
class EngineStats:
    """Counters of one `generate` call (or several, summed)."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    peak_running: int = 0
