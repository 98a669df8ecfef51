"""The rollout engine: continuous batching over a paged KV cache, each token's logprob recorded while decoding."""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray

from exactrl.engine.allocator import BlockAllocator, FreeOrder
from exactrl.engine.capture import CudaCapture
from exactrl.engine.decode_graphs import DecodeGraphs
from exactrl.engine.memory import num_blocks
from exactrl.engine.piecewise_graphs import PiecewiseGraphs
from exactrl.engine.results import Computed, Results
from exactrl.engine.runner import Runner
from exactrl.engine.scheduler import Scheduler
from exactrl.engine.sequence import Sequence as Generation
from exactrl.engine.step import Step
from exactrl.errors import EnvironmentProblem, ExactRLError, ModelError, NonFiniteError, RequestError
from exactrl.model.attention_state import CacheState, paged_state
from exactrl.model.qwen3 import Probe, Qwen3, unchanged
from exactrl.model.weights import compute_digest, load_weights
from exactrl.ops.cpu.jit import require_denormals
from exactrl.types import Completion, EngineStats, Request

if TYPE_CHECKING:
    from exactrl.ops.cuda.binding import CudaOps


class Engine:
    """Implements protocols.RolloutEngine on one device.

    max_concurrent   sequences decoded together       }
    kv_tokens        size of the KV cache; 0: what fits } none of these changes a bit of any completion
    chunk_tokens     tokens computed per step          }
    overlap          a step is prepared and launched while the one before is computed; default: on a GPU }
    cuda_graphs      on a GPU, steps are captured once and replayed, prompts piecewise                    } nor do these
    reserve_bytes    memory that others will take while the engine generates (where kv_tokens is 0)
    max_model_tokens prompt + response limit; default: the model's own
    block_order      order of free KV blocks, and a seed for "shuffled" (parity checks)
    see              shown every op's output and may replace it (parity checks); "rows" are (arrival number, position)
    """

    def __init__(
        self,
        model: Qwen3,
        *,
        max_concurrent: int = 256,
        kv_tokens: int = 0,
        chunk_tokens: int = 2048,
        max_model_tokens: int | None = None,
        prefix_cache: bool = True,
        block_order: FreeOrder = "fifo",
        block_seed: int = 0,
        see: Probe | None = None,
        overlap: bool | None = None,
        cuda_graphs: bool = True,
        reserve_bytes: int = 0,
    ) -> None:
        """Raises ConfigError for a limit that allows nothing, EnvironmentProblem where denormals are flushed."""
        if model.ops.device.type == "cpu":
            require_denormals()
        self.model, self.weight_version = model, 0
        limit = max_model_tokens or model.config.max_positions
        blocks = num_blocks(model, kv_tokens, max_concurrent * limit, reserve_bytes)
        self.allocator = BlockAllocator(
            blocks,
            model.ops.page_size,
            root_key=self._root(),
            enable_prefix_cache=prefix_cache,
            order=block_order,
            seed=block_seed,
        )
        self.scheduler = Scheduler(
            self.allocator, max_concurrent=max_concurrent, chunk_tokens=chunk_tokens, max_model_tokens=limit
        )
        on_gpu = model.ops.device.type == "cuda"
        self.overlap = on_gpu if overlap is None else overlap
        self._captures = on_gpu and cuda_graphs
        self._launched: deque[tuple[Step, Computed]] = deque()
        self._see: Probe = see or unchanged
        self._runner: Runner | None = None
        self._asleep = False
        self._weights_whole = True

    @property
    def see(self) -> Probe:
        """The probe. Where there is one, steps run op by op and one after the other."""
        return self._see

    @see.setter
    def see(self, value: Probe) -> None:
        """Raises RequestError while sequences are being generated: a step may be under way without it."""
        self._require_idle("the probe cannot change")
        self._see = value
        if self._runner is not None:
            self._runner.see = value

    @property
    def runner(self) -> Runner:
        """Cache and graphs, made when they are first needed. After a `sleep` the cache takes its memory again."""
        if self._runner is not None and not self._asleep:
            return self._runner
        if self.model.ops.device.type == "cuda":
            torch.cuda.empty_cache()  # what a trainer left behind in pieces
        try:
            if self._runner is None:
                self._runner = self._new_runner()
            else:
                self._runner.cache.take_again()
        except torch.OutOfMemoryError as error:
            raise EnvironmentProblem(
                f"the KV cache of {self.allocator.num_blocks * self.model.ops.page_size} tokens no longer fits beside "
                "what else the GPU holds; lower rollout.kv_tokens (--kv-tokens)"
            ) from error
        self._asleep = False
        return self._runner

    def _new_runner(self) -> Runner:
        model, limit, blocks = self.model, self.scheduler.max_model_tokens, self.allocator.num_blocks
        cache = paged_state(model.ops, model.config.num_layers, blocks, model.shape, model.dtype)
        # A sequence that samples takes a block and a token of the step.
        results = Results(min(self.scheduler.max_concurrent, blocks, self.scheduler.chunk_tokens), model.ops.device)
        runner = Runner(model, cache, results, self._see)
        if self._captures:
            capture = CudaCapture()
            runner.pieces = PiecewiseGraphs(model, cache, limit, capture)
            if cast("CudaOps", model.ops).decodes_in_graphs(model.shape):
                runner.graphs = DecodeGraphs(model, cache, results, limit, capture)
        return runner

    @property
    def cache(self) -> CacheState:
        return self.runner.cache

    def sleep(self) -> None:
        """Forgets the prefix cache and, on a GPU, gives back the KV cache's memory; what comes next takes it again.
        Graphs stay, and with them what they compute in. Raises RequestError while sequences are being generated."""
        self._require_idle("the engine cannot sleep")
        self.allocator.reset(self._root())
        if self._runner is not None and not self._asleep:
            self._asleep = True  # first: a cache that was not given back is not taken again
            self._runner.cache.give_back()
        if self.model.ops.device.type == "cuda":
            torch.cuda.empty_cache()

    def _require_idle(self, what: str) -> None:
        if self.scheduler.has_work:
            raise RequestError(f"{what} while sequences are being generated")

    @property
    def stats(self) -> EngineStats:
        """Counters since construction or since the caller put a fresh EngineStats here."""
        return self.scheduler.stats

    @stats.setter
    def stats(self, value: EngineStats) -> None:
        self.scheduler.stats = value

    def generate(
        self, requests: Sequence[Request], on_progress: Callable[[int, int], None] | None = None
    ) -> list[Completion]:
        """Completions in request order; `on_progress(finished, total)` after every step.

        Raises RequestError for a request that can never be served, before any work; NonFiniteError, naming request and
        position, when a sampled logprob is not finite. After any exception the engine is empty and usable again; only
        where it was generating already it refuses the second call (RequestError) and goes on.
        Raises ModelError while the weights are half old, half new: after a load_weights that failed.
        """
        completions: dict[int, Completion] = {}
        with _garbage_collection_paused(), closing(self._steps(requests)) as steps:
            for step in steps:
                completions.update(step)
                if on_progress:
                    on_progress(len(completions), len(requests))
        return [completions[i] for i in range(len(requests))]

    def stream(self, requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        """(number of the request, its completion), in the order in which they finish. Raises as `generate`, once the
        first is asked for. Closed early, it gives up the rest; the engine is then empty and usable."""
        with closing(self._steps(requests)) as steps:
            while True:
                with _garbage_collection_paused():
                    step = next(steps, None)
                if step is None:
                    return
                yield from step

    def _steps(self, requests: Sequence[Request]) -> Generator[list[tuple[int, Completion]]]:
        """What each step finished. The engine is idle before the last is yielded, and however this ends before."""
        if not self._weights_whole:
            raise ModelError("the last load_weights failed half-way; load complete weights before generating")
        self._require_idle("one call at a time: finish or close the other one; nothing can be generated")
        left, generating = len(requests), True
        try:
            number = {self.scheduler.add(self._valid(r)): i for i, r in enumerate(requests)}
            self.model.reserve_positions(max((s.max_tokens for s in number), default=0))
            while left:
                finished = [(number[seq], self._completion(seq)) for seq in self.step()]
                left -= len(finished)
                while not left and self._launched:  # computed in vain, beyond the last stop token
                    self.step()
                generating = left > 0  # or what is closed late would end another call
                yield finished
        except BaseException as error:
            if generating:
                self._give_up(between_operations=isinstance(error, GeneratorExit | ExactRLError))
            raise

    def _give_up(self, between_operations: bool) -> None:
        """Drops all sequences; with an operation of the allocator perhaps half done (Ctrl-C) what is cached, too."""
        self.scheduler.abort_all()
        if not between_operations:
            self.allocator.clear()
        launched = [computed for _, computed in self._launched]
        self._launched.clear()
        for computed in launched:  # their buffers are used again by what comes next
            computed.wait()

    @torch.no_grad()
    def step(self) -> list[Generation]:
        """Launches the next step, then books the earliest that was launched; returns the sequences that it finished."""
        if not self.scheduler.has_work:
            return []
        if step := self.scheduler.schedule():
            self._launched.append((step, self.runner.launch(step)))
            if self.overlap and len(self._launched) == 1 and self.see is unchanged:
                return []
        step, computed = self._launched.popleft()
        tokens, logprobs = computed.wait()
        self._check_finite(tokens, logprobs, step)
        return self.scheduler.update(step, tokens.tolist(), logprobs.tolist())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> str:
        """Replaces all weights in place and forgets the prefix cache; returns the digest of what kernels now read."""
        self._require_idle("weights cannot change")
        self._weights_whole = False
        load_weights(self.model, weights, f"weight version {version}")
        self._weights_whole = True
        self.weight_version = version
        self.allocator.reset(self._root())
        return compute_digest(self.model)

    def reset_cache(self) -> None:
        """Forgets the prefix cache and the order of free blocks: what follows is scheduled as in a fresh engine."""
        self._require_idle("the cache cannot be reset")
        self.allocator.reset(self._root())

    def require_servable(self, request: Request) -> None:
        """Raises RequestError when the request could never be served: token ids, temperature, lengths, cache."""
        self.scheduler.require_servable(self._valid(request))

    def _root(self) -> tuple[int, str]:
        return self.weight_version, self.model.ops.contract.digest

    def _valid(self, request: Request) -> Request:
        vocab = self.model.config.vocab_size
        params = request.params
        if type(params.max_new_tokens) is not int:
            raise RequestError(f"request {request.id!r}: max_new_tokens {params.max_new_tokens!r} must be an integer")
        if not 0 <= request.noise_key < 2**64:
            raise RequestError(f"request {request.id!r}: noise_key {request.noise_key} is not in 0 … 2^64 - 1")
        for i, token in enumerate(request.token_ids):
            if not isinstance(token, int | np.integer) or isinstance(token, bool):
                raise RequestError(f"request {request.id!r}: token id {token!r} at position {i} is not an integer")
            if not 0 <= token < vocab:
                raise RequestError(
                    f"request {request.id!r}: token id {token} at position {i} is not in 0 … {vocab - 1}"
                )
        t = params.temperature
        if not (t == 0 or 1e-3 <= t < math.inf):
            raise RequestError(f"request {request.id!r}: temperature {t} must be 0 (greedy) or at least 0.001")
        return request

    def _check_finite(self, tokens: NDArray[np.int64], logprobs: NDArray[np.float32], step: Step) -> None:
        for i in np.flatnonzero((tokens < 0) | ~np.isfinite(logprobs)).tolist():
            seq = step.sampling[i]
            if seq.finish_reason is None:
                raise NonFiniteError(
                    f"request {seq.request.id!r}: logprob {logprobs[i]} at position {seq.num_tokens}; the model's "
                    f"logits are not finite there (weight version {self.weight_version})"
                )

    def _completion(self, seq: Generation) -> Completion:
        assert seq.finish_reason is not None, seq
        logprobs = np.array(seq.logprobs, np.float32)
        return Completion(
            seq.request.id, seq.generated_ids, logprobs, seq.finish_reason, self.weight_version,
            seq.num_cached, seq.num_preemptions,
        )  # fmt: skip


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Thousands of small objects per step make full collections cost tens of milliseconds; none of them are cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
