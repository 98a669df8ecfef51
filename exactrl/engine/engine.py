"""The rollout engine: continuous batching over a paged KV cache, each token's logprob recorded while decoding."""

from __future__ import annotations

import gc
import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from exactrl.engine.allocator import BlockAllocator, FreeOrder
from exactrl.engine.decode_graphs import DecodeGraphs
from exactrl.engine.results import Computed, Results
from exactrl.engine.runner import Runner
from exactrl.engine.scheduler import Chunk, Scheduler
from exactrl.engine.sequence import Sequence as Generation
from exactrl.errors import EnvironmentProblem, ModelError, NonFiniteError, RequestError
from exactrl.model.attention_state import CacheState, paged_state
from exactrl.model.qwen3 import Probe, Qwen3, unchanged
from exactrl.model.weights import compute_digest, load_weights
from exactrl.ops.cpu.jit import require_denormals
from exactrl.types import Completion, EngineStats, Request

if TYPE_CHECKING:
    from exactrl.ops.cuda.binding import CudaOps

KV_SHARE_OF_MEMORY = {"cpu": 0.4, "cuda": 0.85}
"""Of the memory that is free at start, where kv_tokens is 0. A GPU's rest is for activations and graphs: while a
trainer works on the same GPU the cache sleeps."""


class Engine:
    """Implements protocols.RolloutEngine on one device.

    max_concurrent   sequences decoded together       }
    kv_tokens        size of the KV cache; 0: what fits } none of these changes a bit of any completion
    chunk_tokens     tokens computed per step          }
    overlap          a step is prepared and launched while the one before is computed; default: on a GPU }
    cuda_graphs      on a GPU, decode steps are captured once and replayed                                } nor do these
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
        page = model.ops.page_size
        self.model, self.weight_version = model, 0
        limit = max_model_tokens or model.config.max_positions
        num_blocks = (
            -(-kv_tokens // page) if kv_tokens else _blocks_that_fit(model, max_concurrent * limit, reserve_bytes)
        )
        _require_memory(num_blocks * _block_bytes(model), kv_tokens, model.ops.device)
        self.allocator = BlockAllocator(
            num_blocks,
            page,
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
        self._graphs = on_gpu and cuda_graphs and cast("CudaOps", model.ops).decodes_in_graphs(model.shape)
        self._launched: deque[tuple[list[Chunk], Computed]] = deque()
        self._see: Probe = see or unchanged
        self._runner: Runner | None = None
        self._weights_whole = True

    @property
    def see(self) -> Probe:
        """The probe. Where there is one, steps run op by op and one after the other."""
        return self._see

    @see.setter
    def see(self, value: Probe) -> None:
        self._see = self.runner.see = value

    @property
    def runner(self) -> Runner:
        """Cache and graphs, made when they are first needed, after a `sleep` anew."""
        if self._runner is None:
            model, limit, blocks = self.model, self.scheduler.max_model_tokens, self.allocator.num_blocks
            cache = paged_state(model.ops, model.config.num_layers, blocks, model.shape, model.dtype)
            results = Results(self.scheduler.max_concurrent, model.ops.device)
            graphs = DecodeGraphs(model, cache, results, limit) if self._graphs else None
            self._runner = Runner(model, cache, results, self._see, graphs)
        return self._runner

    @property
    def cache(self) -> CacheState:
        return self.runner.cache

    def sleep(self) -> None:
        """On a GPU, gives back the memory of KV cache and graphs; what comes next takes it again. Forgets the prefix
        cache. Raises RequestError while sequences are being generated."""
        if self.model.ops.device.type == "cuda":
            self._drop_runner()
            torch.cuda.empty_cache()

    def _drop_runner(self) -> None:
        if self.scheduler.has_work:
            raise RequestError("the engine cannot sleep while sequences are being generated")
        self.allocator.reset(self._root())
        self._runner = None

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
        position, when a sampled logprob is not finite. After any exception the engine is empty and usable again.
        Raises ModelError while the weights are half old, half new: after a load_weights that failed.
        """
        sequences: list[Generation] = []
        finished = 0
        with _garbage_collection_paused():
            for step in self._steps(requests, sequences):
                finished += len(step)
                if on_progress:
                    on_progress(finished, len(requests))
        return [self._completion(s) for s in sequences]

    def stream(self, requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        """(number of the request, its completion), in the order in which they finish. Raises as `generate`, once the
        first is asked for. Closed early, it gives up the rest; the engine is then empty and usable."""
        sequences: list[Generation] = []
        steps = self._steps(requests, sequences)
        number: dict[Generation, int] = {}
        try:
            while True:
                with _garbage_collection_paused():
                    finished = next(steps, None)
                if finished is None:
                    return
                number = number or {seq: i for i, seq in enumerate(sequences)}
                for seq in finished:
                    yield number[seq], self._completion(seq)
        finally:
            steps.close()

    def _steps(self, requests: Sequence[Request], sequences: list[Generation]) -> Generator[list[Generation]]:
        """Fills `sequences`, then yields what each step finished. Leaves the engine empty, however it ends."""
        if not self._weights_whole:
            raise ModelError("the last load_weights failed half-way; load complete weights before generating")
        try:
            sequences += [self.scheduler.add(self._valid(r)) for r in requests]
            self.model.reserve_positions(max((s.max_tokens for s in sequences), default=0))
            while self.scheduler.has_work:
                yield self.step()
        except BaseException:
            self.scheduler.abort_all()
            self._launched.clear()
            raise

    @torch.no_grad()
    def step(self) -> list[Generation]:
        """Launches the next step, then books the earliest that was launched; returns the sequences that it finished."""
        if chunks := self.scheduler.schedule():
            self._launched.append((chunks, self.runner.launch(chunks)))
            if self.overlap and len(self._launched) == 1 and self.see is unchanged:
                return []
        chunks, computed = self._launched.popleft()
        sampled = computed.wait()
        self._check_finite(sampled, [c.seq for c in chunks if c.samples])
        return self.scheduler.update(chunks, sampled)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> str:
        """Replaces all weights in place and forgets the prefix cache; returns the digest of what kernels now read."""
        if self.scheduler.has_work:
            raise RequestError("weights cannot change while sequences are being generated")
        self._weights_whole = False
        load_weights(self.model, weights, f"weight version {version}")
        self._weights_whole = True
        self.weight_version = version
        self.allocator.reset(self._root())
        return compute_digest(self.model)

    def reset_cache(self) -> None:
        """Forgets the prefix cache and the order of free blocks: what follows is scheduled as in a fresh engine."""
        if self.scheduler.has_work:
            raise RequestError("the cache cannot be reset while sequences are being generated")
        self.allocator.reset(self._root())

    def require_servable(self, request: Request) -> None:
        """Raises RequestError when the request could never be served: token ids, temperature, lengths, cache."""
        self.scheduler.require_servable(self._valid(request))

    def _root(self) -> tuple[int, str]:
        return self.weight_version, self.model.ops.contract.digest

    def _valid(self, request: Request) -> Request:
        vocab = self.model.config.vocab_size
        for i, token in enumerate(request.token_ids):
            if not 0 <= token < vocab:
                raise RequestError(
                    f"request {request.id!r}: token id {token} at position {i} is not in 0 … {vocab - 1}"
                )
        t = request.params.temperature
        if not (t == 0 or 1e-3 <= t < math.inf):
            raise RequestError(f"request {request.id!r}: temperature {t} must be 0 (greedy) or at least 0.001")
        return request

    def _check_finite(self, sampled: list[tuple[int, float]], sequences: list[Generation]) -> None:
        for (token, logprob), seq in zip(sampled, sequences, strict=True):
            if (token < 0 or not math.isfinite(logprob)) and seq.finish_reason is None:
                raise NonFiniteError(
                    f"request {seq.request.id!r}: logprob {logprob} at position {seq.num_tokens}; the model's logits "
                    f"are not finite there (weight version {self.weight_version})"
                )

    def _completion(self, seq: Generation) -> Completion:
        assert seq.finish_reason is not None, seq
        logprobs = np.array(seq.logprobs, np.float32)
        return Completion(
            seq.request.id, seq.generated_ids, logprobs, seq.finish_reason, self.weight_version,
            seq.num_cached, seq.num_preemptions,
        )  # fmt: skip


def _require_memory(size: int, kv_tokens: int, device: torch.device) -> None:
    """Raises EnvironmentProblem for a cache larger than the device's memory, before any of it is set up."""
    free = _free_memory(device)
    if size > (limit := free if device.type == "cuda" else 2 * free):
        raise EnvironmentProblem(
            f"a KV cache of {kv_tokens} tokens takes {size / 2**30:,.1f} GiB, this {_where(device)} has about "
            f"{limit / 2**30:,.0f} GiB; lower rollout.kv_tokens (--kv-tokens), or 0 for what fits"
        )


def _block_bytes(model: Qwen3) -> int:
    """Memory of one block of the KV cache over all layers."""
    c = model.config
    dim = c.head_dim + -(-c.head_dim // 16) * 16
    return model.ops.page_size * c.num_layers * c.num_kv_heads * dim * (4 if model.dtype == torch.float32 else 2)


def _blocks_that_fit(model: Qwen3, wanted_tokens: int, reserve_bytes: int) -> int:
    free = _free_memory(model.ops.device) - reserve_bytes
    fitting = int(free * KV_SHARE_OF_MEMORY[model.ops.device.type]) // _block_bytes(model)
    return max(1, min(-(-wanted_tokens // model.ops.page_size), fitting))


def _where(device: torch.device) -> str:
    return "GPU" if device.type == "cuda" else "machine"


def _free_memory(device: torch.device) -> int:
    """Bytes: what is available, or half of what the machine has where the system does not say (macOS, Windows)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):
        return 4 << 30


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
