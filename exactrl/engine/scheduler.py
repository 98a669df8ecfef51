"""Which tokens of which sequences are computed in the next step.

Continuous batching with chunked prefill under one token budget per step. Two rules keep it simple. Admission is first
come, first served and the victim of a preemption is always the last arrival, so every running sequence arrived before
every waiting one: both lists are in arrival order by construction. And a step serves running sequences in that order,
so a victim has never been scheduled in the step that preempts it.

Progress: the first arrival can take the blocks of all others and `add` refused it if it did not fit alone, so each step
computes at least one of its tokens. A later sequence that finds no block keeps what it has and waits: it computes
nothing in that step, and loses its blocks only when an earlier sequence needs them.

Looking ahead: `schedule` may be called once more before the `update` of the step that is being computed, so that the
host prepares a step while the device computes the one before. A token that step samples counts as there, its value
pending: the engine hands it on where it was sampled. What the value then ends (a stop token) or what a preemption took
the blocks of is computed in vain, and `update` books nothing for it but a preempted sequence's own sampled token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from exactrl.engine.allocator import BlockAllocator
from exactrl.engine.sequence import Sequence
from exactrl.errors import ConfigError, RequestError
from exactrl.types import EngineStats, Request


@dataclass(slots=True, eq=False)
class Chunk:
    """Tokens start … start + num_tokens - 1 of `seq`; with `samples`, the last row's logits give the next token.

    source       where the last of these tokens is pending: number of the sample of the step before; otherwise -1
    admission    how often the sequence had been preempted: its blocks are those of this chunk as long as that stands
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    source: int = -1
    admission: int = 0


class Scheduler:
    """Owns all sequences of an engine. Call `schedule`, compute the chunks, call `update`; repeat while `has_work`.
    Two steps may be scheduled before the first of them is updated.

    max_concurrent    running sequences
    chunk_tokens      tokens computed per step
    max_model_tokens  prompt + generated tokens of one sequence
    stats             counters since construction; the engine may put a fresh EngineStats here at any time.
                      prompt_tokens + cached_tokens is the length of all prompts served: each token of a prompt counts
                      once, as computed or as taken from the cache. What is computed again is in recomputed_tokens.
    """

    def __init__(
        self, allocator: BlockAllocator, *, max_concurrent: int, chunk_tokens: int, max_model_tokens: int
    ) -> None:
        """Raises ConfigError for a limit below 1."""
        for name, value in (("max_concurrent", max_concurrent), ("chunk_tokens", chunk_tokens)):
            if value < 1:
                raise ConfigError(f"rollout.{name} is {value}; it must be at least 1")
        self.allocator = allocator
        self.max_concurrent = max_concurrent
        self.chunk_tokens = chunk_tokens
        self.max_model_tokens = max_model_tokens
        self.stats = EngineStats()
        self.running: list[Sequence] = []  # arrival order, all before waiting[0]
        self.waiting: deque[Sequence] = deque()  # arrival order
        self._ids: set[str] = set()
        self._num_arrived = 0
        self._block_shift = allocator.block_tokens.bit_length() - 1
        self._in_flight: deque[list[Chunk]] = deque()
        self._starved = False  # waiting[0] did not fit, and no block has been given back since

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self._in_flight)

    def add(self, request: Request) -> Sequence:
        """Appends a request to the waiting queue. Raises RequestError for one that can never be served."""
        self.require_servable(request)
        seq = Sequence(self._num_arrived, request)
        self._num_arrived += 1
        self._ids.add(request.id)
        self.waiting.append(seq)
        return seq

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, in arrival order. Takes the blocks they will fill. Empty only without work, or
        where all that is left waits for the step that is being computed.

        O(running) plus O(prompt) for each admission tried; a head of the queue that does not fit is not tried again
        until some sequence has given blocks back.
        """
        assert len(self._in_flight) < 2, "schedule() with two steps that were not updated"
        chunks: list[Chunk] = []
        preemptions = self.stats.preemptions
        budget = self._schedule_running(chunks)
        # Blocks that a preemption has just freed belong to the earlier sequences: admit nobody in the same step.
        if self.waiting and not self._starved and self.stats.preemptions == preemptions:
            self._admit(chunks, budget)
        assert chunks or self._in_flight or not self.has_work, f"no progress: {self.running=}, {self.waiting=}"
        if not chunks:
            return chunks
        self._issue(chunks)
        self.stats.steps += 1
        self.stats.peak_running = max(self.stats.peak_running, len(self.running))
        self._in_flight.append(chunks)
        return chunks

    def update(self, chunks: list[Chunk], sampled: SequenceOf[tuple[int, float]]) -> list[Sequence]:
        """Books the earliest scheduled step, now computed; returns the sequences that it finished (their blocks are
        released).

        `chunks` is the list that `schedule` returned; `sampled` has one (token id, logprob) per chunk that samples.
        """
        assert self._in_flight, "update() without schedule()"
        assert chunks is self._in_flight[0], "update() with chunks that are not those of the earliest step"
        num_samples = sum([chunk.samples for chunk in chunks])
        assert num_samples == len(sampled), f"{len(sampled)} sampled tokens for {num_samples} chunks that sample"
        self._in_flight.popleft()
        shift = self._block_shift
        finished: list[Sequence] = []
        samples = iter(sampled)
        for chunk in chunks:
            seq, start = chunk.seq, chunk.start
            if seq.finish_reason is not None:  # by the step before: computed in vain
                if chunk.samples:
                    next(samples)
                continue
            if chunk.admission == seq.num_preemptions:
                seq.num_computed = end = start + chunk.num_tokens
                if start >> shift != end >> shift:
                    self._publish(seq, start >> shift, end >> shift)
            if chunk.samples:
                seq.num_pending -= 1
                token, logprob = next(samples)
                seq.token_ids.append(token)
                seq.logprobs.append(logprob)
                self.stats.generated_tokens += 1
                if token in seq.stop_token_ids:
                    seq.finish_reason = "stop"
                elif len(seq.token_ids) == seq.max_tokens:
                    seq.finish_reason = "length"
                else:
                    continue
                finished.append(seq)
        if finished:
            self._retire(finished)
        return finished

    def abort_all(self) -> None:
        """Drops every sequence, also in the middle of a step, and releases all blocks.

        What was published stays cached: only blocks of booked steps are. Not for normal use; nothing is returned.
        """
        for seq in self.running:
            self._release(seq)
        self.running.clear()
        self.waiting.clear()
        self._ids.clear()
        self._in_flight.clear()

    def check_invariants(self) -> None:
        """Asserts that sequences, queues and blocks agree. O(everything): for tests."""
        everyone = [*self.running, *self.waiting]
        indices = [seq.index for seq in everyone]
        assert indices == sorted(set(indices)), f"not in arrival order: {indices}"
        assert self._ids == {seq.request.id for seq in everyone}
        assert len(self.running) <= self.max_concurrent
        for seq in everyone:
            assert seq.finish_reason is None, seq
            assert seq.num_generated == len(seq.logprobs) < seq.request.params.max_new_tokens, seq
            assert seq.num_computed <= seq.num_issued < seq.num_ahead <= seq.max_tokens, seq
            assert seq.num_pending <= len(self._in_flight), seq
            assert seq.num_issued <= len(seq.block_ids) * self.allocator.block_tokens, seq
        assert not any(seq.block_ids or seq.num_issued for seq in self.waiting)
        self.allocator.check_invariants(seq.block_ids for seq in self.running)

    def require_servable(self, request: Request) -> None:
        """Raises RequestError for a request that can never be served, whatever else is running."""
        num_prompt, max_new = len(request.token_ids), request.params.max_new_tokens
        who = f"request {request.id!r}"
        if request.id in self._ids:
            raise RequestError(f"{who} is already in the queue; give every request its own id")
        if not num_prompt:
            raise RequestError(f"{who} has an empty prompt; give it at least one token")
        if max_new < 1:
            raise RequestError(f"{who} has max_new_tokens {max_new}; it must be at least 1")
        if num_prompt + max_new > self.max_model_tokens:
            raise RequestError(
                f"{who} may grow to {num_prompt} prompt + {max_new} new tokens, but the model's limit is "
                f"{self.max_model_tokens}; shorten the prompt or lower max_new_tokens"
            )
        capacity = self.allocator.num_blocks * self.allocator.block_tokens
        if num_prompt + max_new - 1 > capacity:  # the last sampled token needs no KV
            raise RequestError(
                f"{who} may need {num_prompt + max_new - 1} KV tokens, but the whole cache holds {capacity}; "
                "raise rollout.kv_tokens (--kv-tokens) or lower max_new_tokens"
            )

    def _schedule_running(self, chunks: list[Chunk]) -> int:
        """Appends chunks of running sequences; returns what is left of the budget. May preempt from the end."""
        budget = self.chunk_tokens
        shift = self._block_shift
        for seq in self.running:  # a preemption pops the end of this list, behind the iterator's position
            start, num_ahead = seq.num_issued, len(seq.token_ids) + seq.num_pending
            if num_ahead == seq.max_tokens:  # its last token is pending, and is never computed
                continue
            num_tokens = num_ahead - start
            if num_tokens > budget:
                num_tokens = budget
            if start + num_tokens > len(seq.block_ids) << shift:
                num_tokens = self._grow(seq, num_tokens)
                if not num_tokens:
                    break
            chunks.append(Chunk(seq, start, num_tokens, start + num_tokens == num_ahead))
            budget -= num_tokens
            if not budget:
                break
        return budget

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        """Moves sequences from waiting to running while the budget, max_concurrent and the blocks allow.

        A sequence is admitted only if all tokens it has now find room: otherwise one that was preempted would come
        straight back, take what its preemption freed and be preempted again.
        """
        allocator, shift = self.allocator, self._block_shift
        while budget and self.waiting and len(self.running) < self.max_concurrent:
            seq = self.waiting[0]
            assert not seq.num_pending, f"admitted with a pending token: {seq}"
            matched = allocator.match_prefix(seq.token_ids)
            num_needed = ((seq.num_tokens - 1) >> shift) + 1 - len(matched)
            if num_needed > allocator.num_free_after(matched):
                self._starved = True
                return
            self.running.append(self.waiting.popleft())
            self._take_cached(seq, matched)
            num_tokens = self._grow(seq, min(budget, seq.num_tokens - seq.num_issued))
            end = seq.num_issued + num_tokens
            chunks.append(Chunk(seq, seq.num_issued, num_tokens, end == seq.num_tokens))
            budget -= num_tokens

    def _issue(self, chunks: list[Chunk]) -> None:
        """Books what is certain of a step before it is computed."""
        num_samples = 0
        for chunk in chunks:
            seq, start = chunk.seq, chunk.start
            chunk.admission = seq.num_preemptions
            if start < seq.num_prompt or start < seq.num_seen:
                self._count_prefill(seq, start, start + chunk.num_tokens)
            seq.num_issued = start + chunk.num_tokens
            if seq.num_issued > len(seq.token_ids):
                chunk.source = seq.pending_sample
            if chunk.samples:
                seq.num_pending += 1
                seq.pending_sample = num_samples
                num_samples += 1

    def _take_cached(self, seq: Sequence, matched: list[int]) -> None:
        self.allocator.acquire(matched)
        seq.block_ids = matched
        seq.node = self.allocator.node_of(matched)
        seq.num_computed = seq.num_issued = len(matched) << self._block_shift
        if not seq.num_preemptions:
            seq.num_cached = seq.num_computed
        self.stats.cached_tokens += max(0, seq.num_computed - seq.num_seen)

    def _grow(self, seq: Sequence, num_tokens: int) -> int:
        """Takes blocks for `num_tokens` more tokens, preempting later arrivals; returns how many tokens have room."""
        wanted = ((seq.num_issued + num_tokens - 1) >> self._block_shift) + 1
        while len(seq.block_ids) < wanted:
            block = self.allocator.allocate()
            if block is not None:
                seq.block_ids.append(block)
            elif self.running[-1] is not seq:
                self._preempt_last()
            else:
                return min(num_tokens, (len(seq.block_ids) << self._block_shift) - seq.num_issued)
        return num_tokens

    def _preempt_last(self) -> None:
        """By recomputation: blocks go, generated tokens and their logprobs stay."""
        seq = self.running.pop()
        self._release(seq)
        seq.num_preemptions += 1
        self.waiting.appendleft(seq)
        self.stats.preemptions += 1

    def _release(self, seq: Sequence) -> None:
        self.allocator.release(seq.block_ids)
        seq.block_ids = []
        seq.num_seen = max(seq.num_seen, seq.num_issued)
        seq.num_computed = seq.num_issued = 0
        self._starved = False

    def _retire(self, finished: list[Sequence]) -> None:
        for seq in finished:
            self._release(seq)
            self._ids.remove(seq.request.id)
        self.running = [seq for seq in self.running if seq.finish_reason is None]
        for seq in finished:
            if seq.num_preemptions and seq in self.waiting:  # preempted while its last token was being sampled
                self.waiting.remove(seq)

    def _publish(self, seq: Sequence, first: int, last: int) -> None:
        """Caches blocks first … last - 1, which the step has filled."""
        for i in range(first, last):
            seq.node = self.allocator.publish(seq.token_ids, i, seq.block_ids[i], seq.node)

    def _count_prefill(self, seq: Sequence, start: int, end: int) -> None:
        """Books computed tokens start … end - 1, of which the first num_seen had been in the cache before."""
        seen = min(end, max(start, seq.num_seen))
        self.stats.recomputed_tokens += seen - start
        self.stats.prompt_tokens += max(0, min(end, seq.num_prompt) - seen)
