"""The engine on a model folder, with text prompts: `exactrl generate` and exactrl.Engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from exactrl.contract import get_contract, noise_key
from exactrl.engine.engine import Engine as NativeEngine
from exactrl.errors import ConfigError, ModelError
from exactrl.launch.build import DTYPES
from exactrl.launch.device import make_ops
from exactrl.launch.events import Progress
from exactrl.model.config import find_model, read_config
from exactrl.model.folder import load_model
from exactrl.tasks.tokenizer import Tokenizer, eos_ids, load_tokenizer
from exactrl.types import Completion, Request, SamplingParams


class Engine(NativeEngine):
    """The rollout engine on a model folder or bundled name, with text prompts.

        engine = exactrl.Engine("tiny")
        engine.generate(["1+2"], SamplingParams(max_new_tokens=32))

    Without stop_token_ids the model's own end tokens are used. See engine.engine.Engine for the other arguments.
    """

    def __init__(
        self, model: str, *, dtype: str = "bfloat16", true_on_policy: bool = True, device: str = "cpu", **limits: Any
    ) -> None:
        """Raises as make_ops for a device that cannot be used."""
        folder = find_model(model)
        self.tokenizer, self.eos_ids = load_tokenizer(folder), eos_ids(folder)
        ops = make_ops(device, get_contract("exact-v1"), true_on_policy, dtype, read_config(folder))
        super().__init__(load_model(folder, ops, DTYPES[dtype], trainable=False), **limits)

    def encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Token ids of a prompt; ids pass through. Raises ModelError for text without a tokenizer."""
        if not isinstance(prompt, str):
            return tuple(prompt)
        if self.tokenizer is None:
            raise ModelError("this model folder has no tokenizer.json; give prompts as token ids")
        return tuple(self.tokenizer.encode(prompt))

    def generate(  # type: ignore[override]
        self,
        prompts: Sequence[Request | str | Sequence[int]],
        params: SamplingParams | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        seed: int = 0,
    ) -> list[Completion]:
        """Completions in order. Prompts are text, token ids (both need `params`), or whole Requests."""
        return super().generate(self._requests(prompts, params, seed), on_progress)

    def stream(
        self, prompts: Sequence[Request | str | Sequence[int]], params: SamplingParams | None = None, *, seed: int = 0
    ) -> Iterator[tuple[int, Completion]]:
        """(number of the prompt, its completion) as they finish; otherwise as `generate`."""
        return super().stream(self._requests(prompts, params, seed))

    def _requests(
        self, prompts: Sequence[Request | str | Sequence[int]], params: SamplingParams | None, seed: int
    ) -> list[Request]:
        if not 0 <= seed < 2**63:
            raise ConfigError(f"seed {seed} is not in 0 … 2^63 - 1")
        requests = []
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, Request):
                requests.append(prompt)
                continue
            if params is None:
                raise ConfigError("Engine.generate needs SamplingParams for prompts given as text or ids")
            stop = params.stop_token_ids or self.eos_ids
            sampling = SamplingParams(params.max_new_tokens, params.temperature, stop)
            key = noise_key(seed, "generate", 0, 0, str(i), 0)
            requests.append(Request(str(i), self.encode(prompt), sampling, key))
        return requests


def generate(
    model: str,
    prompts: Sequence[tuple[str, str | list[int]]],
    *,
    samples: int,
    seed: int,
    temperature: float,
    max_new_tokens: int,
    max_concurrent: int,
    kv_tokens: int,
    chunk_tokens: int,
    dtype: str,
    true_on_policy: bool,
    device: str = "cpu",
    on_progress: Progress,
) -> Iterator[dict[str, Any]]:
    """Rows of `exactrl generate`, prompt-major, each as soon as it and all before it are there: id, sample, token_ids,
    text (None without tokenizer), logprobs (float32 array), finish_reason. max_concurrent, kv_tokens and chunk_tokens
    change no bit."""
    engine = Engine(
        model, dtype=dtype, true_on_policy=true_on_policy, device=device, max_concurrent=max_concurrent,
        kv_tokens=kv_tokens, chunk_tokens=chunk_tokens,
    )  # fmt: skip
    params = SamplingParams(max_new_tokens, temperature, engine.eos_ids)
    order = [(name, i, engine.encode(prompt)) for name, prompt in prompts for i in range(samples)]
    requests = [
        Request(f"{name}#{i}", ids, params, noise_key(seed, "generate", 0, 0, name, i)) for name, i, ids in order
    ]
    begin, tokens, next_row = time.perf_counter(), 0, 0
    found: dict[int, Completion] = {}
    on_progress("generate", 0, len(order))
    for done, (i, completion) in enumerate(engine.stream(requests), 1):
        found[i] = completion
        tokens += len(completion.token_ids)
        on_progress(f"generate, {tokens / (time.perf_counter() - begin):,.0f} tokens/s", done, len(order))
        while next_row in found:
            yield _row(engine.tokenizer, *order[next_row][:2], found.pop(next_row))
            next_row += 1


def _row(tokenizer: Tokenizer | None, name: str, sample: int, c: Completion) -> dict[str, Any]:
    return {
        "id": name, "sample": sample, "token_ids": c.token_ids,
        "text": tokenizer.decode_response(c.token_ids) if tokenizer else None,
        "logprobs": c.logprobs, "finish_reason": c.finish_reason,
    }  # fmt: skip
