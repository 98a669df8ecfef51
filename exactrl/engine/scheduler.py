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

import numpy as np

from exactrl.engine.allocator import BlockAllocator
from exactrl.engine.counters import Counters, Integers
from exactrl.engine.sequence import Sequence
from exactrl.engine.step import Step
from exactrl.errors import ConfigError, RequestError
from exactrl.types import EngineStats, Request


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
        self.counters = Counters(min(max_concurrent, allocator.num_blocks))  # of `running`: each has a block
        self.waiting: deque[Sequence] = deque()  # arrival order
        self._ids: set[str] = set()
        self._stops: set[int] = set()  # of all requests since there was none
        self._num_arrived = 0
        self._num_admitted = 0
        self._block_shift = allocator.block_tokens.bit_length() - 1
        self._in_flight: deque[Step] = deque()
        self._starved = False  # waiting[0] did not fit, and no block has been given back since

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self._in_flight)

    def add(self, request: Request) -> Sequence:
        """Appends a request to the waiting queue. Raises RequestError for one that can never be served."""
        self.require_servable(request)
        if not self._ids:
            self._stops.clear()
        seq = Sequence(self._num_arrived, request)
        self._num_arrived += 1
        self._ids.add(request.id)
        self._stops |= seq.stop_token_ids
        self.waiting.append(seq)
        return seq

    def schedule(self) -> Step:
        """The next step. Takes the blocks it will fill. Empty only without work, or where all that is left waits for
        the step that is being computed.

        O(running) plus O(prompt) for each admission tried; a head of the queue that does not fit is not tried again
        until some sequence has given blocks back.
        """
        assert len(self._in_flight) < 2, "schedule() with two steps that were not updated"
        preemptions = self.stats.preemptions
        num_tokens = self._schedule_running()
        # Blocks that a preemption has just freed belong to the earlier sequences: admit nobody in the same step.
        if self.waiting and not self._starved and self.stats.preemptions == preemptions:
            admitted = self._admit(self.chunk_tokens - int(num_tokens.sum()))
            num_tokens = np.concatenate([num_tokens, np.array(admitted, np.int64)])
        step = self._issue(num_tokens)
        assert step or self._in_flight or not self.has_work, f"no progress: {self.running=}, {self.waiting=}"
        if step:
            self.stats.steps += 1
            self.stats.peak_running = max(self.stats.peak_running, len(self.running))
            self._in_flight.append(step)
        return step

    def update(self, step: Step, tokens: SequenceOf[int], logprobs: SequenceOf[float]) -> list[Sequence]:
        """Books the earliest scheduled step, now computed; returns the sequences that it finished (their blocks are
        released).

        `step` is what `schedule` returned; `tokens` and `logprobs` have an entry for each chunk that samples.
        """
        assert self._in_flight, "update() without schedule()"
        assert step is self._in_flight[0], "update() with a step that is not the earliest"
        sampling = step.sampling
        assert len(sampling) == len(tokens) == len(logprobs), f"{len(tokens)} tokens for {len(sampling)} that sample"
        self._in_flight.popleft()
        self._publish_filled(step)
        in_vain = 0
        for seq, token, logprob in zip(sampling, tokens, logprobs, strict=True):
            if seq.finish_reason is None:
                seq.token_ids.append(token)
                seq.logprobs.append(logprob)
            else:  # by the step before
                in_vain += 1
        self.stats.generated_tokens += len(tokens) - in_vain
        ends = set(step.final.tolist())  # samples that may end their sequences
        if not self._stops.isdisjoint(tokens):
            ends.update(i for i, token in enumerate(tokens) if token in self._stops)
        finished = [sampling[i] for i in sorted(ends) if _finish(sampling[i])]
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
        self.counters.resize(0)
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
        for seq in self.waiting:
            assert 0 <= seq.num_ahead - seq.num_tokens <= len(self._in_flight), seq
            assert (seq.block_ids, seq.admission) == ([], -1), seq
        self._check_counters()
        self.allocator.check_invariants(seq.block_ids for seq in self.running)

    def _check_counters(self) -> None:
        c, size, last = self.counters, self.allocator.block_tokens, self._in_flight[-1] if self._in_flight else None
        assert len(c.issued) == len(self.running)
        assert (np.diff(c.admission) > 0).all()
        for i, seq in enumerate(self.running):
            assert seq.num_tokens <= c.ahead[i] <= seq.num_tokens + len(self._in_flight), seq
            assert 0 <= c.issued[i] < c.ahead[i] <= c.limit[i] == seq.max_tokens, seq
            assert c.issued[i] <= c.room[i] == len(seq.block_ids) * size, seq
            assert (c.admission[i], c.prefill[i]) == (seq.admission, max(seq.num_prompt, seq.num_seen)), seq
            if last is not None:
                sample = last.sampling.index(seq) if seq in last.sampling else -1
                assert c.sample[i] == (sample if seq.admission in last.admission else -1), seq

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

    def _schedule_running(self) -> Integers:
        """Tokens that each running sequence computes, within the budget. Takes their blocks; may preempt from the end,
        and then counts only those that are left."""
        c = self.counters
        wanted = np.where(c.ahead < c.limit, c.ahead - c.issued, 0)  # a last token that is pending is never computed
        num_tokens = _shares(wanted, self.chunk_tokens)
        ends = c.issued + num_tokens
        growing = np.flatnonzero(ends > c.room)
        for row, end in zip(growing.tolist(), ends[growing].tolist(), strict=True):
            if row >= len(self.running):  # preempted for one before it
                break
            c.room[row] = room = self._grow(self.running[row], end)
            if room < end:
                num_tokens[row] -= end - room
        return num_tokens[: len(self.running)]

    def _admit(self, budget: int) -> list[int]:
        """Moves sequences from waiting to running while the budget, max_concurrent and the blocks allow; returns the
        tokens that each computes.

        A sequence is admitted only if all tokens it has now find room: otherwise one that was preempted would come
        straight back, take what its preemption freed and be preempted again.
        """
        allocator, shift = self.allocator, self._block_shift
        admitted: list[int] = []
        while budget and self.waiting and len(self.running) < self.max_concurrent:
            seq = self.waiting[0]
            assert seq.num_ahead == seq.num_tokens, f"admitted with a pending token: {seq}"
            matched = allocator.match_prefix(seq.token_ids)
            num_needed = ((seq.num_tokens - 1) >> shift) + 1 - len(matched)
            if num_needed > allocator.num_free_after(matched):
                self._starved = True
                break
            self.running.append(self.waiting.popleft())
            num_cached = self._take_cached(seq, matched)
            num_tokens = min(budget, seq.num_tokens - num_cached)
            self.counters.room[-1] = self._grow(seq, num_cached + num_tokens)
            admitted.append(num_tokens)
            budget -= num_tokens
        return admitted

    def _issue(self, num_tokens: Integers) -> Step:
        """The step in which each running sequence computes `num_tokens`, and what is certain of it booked."""
        c, rows = self.counters, np.flatnonzero(num_tokens)
        every = len(rows) == len(self.running)
        seqs = self.running.copy() if every else [self.running[i] for i in rows.tolist()]
        start, count = c.issued[rows], num_tokens[rows]
        end = start + count
        samples = end == c.ahead[rows]
        source = c.sample[rows] if self._in_flight else np.full(len(rows), -1, np.int64)
        for i in np.flatnonzero(start < c.prefill[rows]).tolist():
            self._count_prefill(seqs[i], int(start[i]), int(end[i]))
        c.issued[rows] = end
        c.ahead[rows] += samples
        sampling = rows[samples]
        if len(rows):  # without a step, what is pending stays so
            c.sample[:] = -1
            c.sample[sampling] = np.arange(len(sampling))
        final = np.flatnonzero(c.ahead[sampling] == c.limit[sampling])
        return Step(seqs, start, count, samples, source, final, c.admission[rows])

    def _take_cached(self, seq: Sequence, matched: list[int]) -> int:
        """Begins the sequence's row and its block table with what is cached of it; returns the tokens of that."""
        self.allocator.acquire(matched)
        seq.block_ids = matched
        seq.node = self.allocator.node_of(matched)
        seq.admission = self._num_admitted
        self._num_admitted += 1
        num_cached = len(matched) << self._block_shift
        if not seq.num_preemptions:
            seq.num_cached = num_cached
        self.stats.cached_tokens += max(0, num_cached - seq.num_seen)
        self.counters.append(
            issued=num_cached, ahead=seq.num_tokens, limit=seq.max_tokens, room=num_cached,
            prefill=max(seq.num_prompt, seq.num_seen), sample=-1, admission=seq.admission,
        )  # fmt: skip
        return num_cached

    def _grow(self, seq: Sequence, end: int) -> int:
        """Takes blocks until they hold `end` tokens, preempting later arrivals; returns how many they hold: fewer only
        where the sequence is the last."""
        blocks, shift = seq.block_ids, self._block_shift
        while len(blocks) << shift < end:
            block = self.allocator.allocate()
            if block is not None:
                blocks.append(block)
            elif self.running[-1] is not seq:
                self._preempt_last()
            else:
                break
        return len(blocks) << shift

    def _preempt_last(self) -> None:
        """By recomputation: blocks go, generated tokens and their logprobs stay."""
        seq, c = self.running.pop(), self.counters
        seq.num_seen = max(seq.num_seen, int(c.issued[-1]))
        seq.num_ahead = int(c.ahead[-1])
        seq.admission = -1
        seq.num_preemptions += 1
        c.resize(len(self.running))
        self._release(seq)
        self.waiting.appendleft(seq)
        self.stats.preemptions += 1

    def _release(self, seq: Sequence) -> None:
        self.allocator.release(seq.block_ids)
        seq.block_ids = []
        self._starved = False

    def _retire(self, finished: list[Sequence]) -> None:
        for seq in finished:
            self._release(seq)
            self._ids.remove(seq.request.id)
        self.counters.keep(np.array([seq.finish_reason is None for seq in self.running], np.bool_))
        self.running = [seq for seq in self.running if seq.finish_reason is None]
        for seq in finished:
            if seq.num_preemptions and seq in self.waiting:  # preempted while its last token was being sampled
                self.waiting.remove(seq)

    def _publish_filled(self, step: Step) -> None:
        """Caches the blocks that the step has filled, of the sequences that still have them."""
        first, last = step.start >> self._block_shift, (step.start + step.num_tokens) >> self._block_shift
        filling = np.flatnonzero(first != last)
        columns = (filling, first[filling], last[filling], step.admission[filling])
        publish = self.allocator.publish
        for i, begin, end, admission in zip(*(column.tolist() for column in columns), strict=True):
            seq = step.seqs[i]
            if seq.finish_reason is None and seq.admission == admission:
                for block in range(begin, end):
                    seq.node = publish(seq.token_ids, block, seq.block_ids[block], seq.node)

    def _count_prefill(self, seq: Sequence, start: int, end: int) -> None:
        """Books computed tokens start … end - 1, of which the first num_seen had been in the cache before."""
        seen = min(end, max(start, seq.num_seen))
        self.stats.recomputed_tokens += seen - start
        self.stats.prompt_tokens += max(0, min(end, seq.num_prompt) - seen)


def _shares(wanted: Integers, budget: int) -> Integers:
    """What each gets of the budget where they are served in order."""
    shares = np.minimum(np.cumsum(wanted), budget)
    shares[1:] -= shares[:-1].copy()
    return shares


def _finish(seq: Sequence) -> bool:
    """Whether the token booked last ends the sequence, which then has its finish_reason; one that had it stays out."""
    if seq.finish_reason is not None:
        return False
    if seq.token_ids[-1] in seq.stop_token_ids:
        seq.finish_reason = "stop"
    elif seq.num_tokens == seq.max_tokens:
        seq.finish_reason = "length"
    return seq.finish_reason is not None
