"""A scheduler with a fake model: it writes what it computes into a fake cache, and reads the prefix from there and
nowhere else. Shared by the tests of the scheduler."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable

from exactrl.engine.allocator import BlockAllocator
from exactrl.engine.scheduler import Scheduler
from exactrl.engine.sequence import Sequence
from exactrl.engine.step import Chunk, Step
from exactrl.types import Request, SamplingParams

VOCAB = 12
STALE = -1  # never a state: hashes below are made positive


def advance(state: int, token: int) -> int:
    """State after one more token. A state identifies the weights and the whole prefix."""
    return hash((state, token)) & (2**61 - 1)


def sample(state: int) -> tuple[int, float]:
    return state // 7 % VOCAB, -(state % 1000) / 1000


def alone(request: Request, weights: int) -> tuple[list[int], list[float], str]:
    """The definition: no cache, no batch."""
    state = weights
    for token in request.token_ids:
        state = advance(state, token)
    ids: list[int] = []
    logprobs: list[float] = []
    while True:
        token, logprob = sample(state)
        ids.append(token)
        logprobs.append(logprob)
        if token in request.params.stop_token_ids:
            return ids, logprobs, "stop"
        if len(ids) == request.params.max_new_tokens:
            return ids, logprobs, "length"
        state = advance(state, token)


class FakeEngine:
    """Scheduler + fake model. `weights` is the state of the empty prefix. Every step checks everything it can.

    With `lookahead` a step is scheduled and computed before the one before it is booked: the model then knows sampled
    tokens (`sampled`) that the scheduler does not.
    """

    def __init__(self, num_blocks: int, block_tokens: int = 4, *, chunk_tokens: int = 16, max_concurrent: int = 4,
                 cache: bool = True, order: str = "fifo", seed: int = 0, lookahead: bool = False) -> None:  # fmt: skip
        self.allocator = BlockAllocator(num_blocks, block_tokens, enable_prefix_cache=cache, order=order, seed=seed)  # type: ignore[arg-type]
        self.scheduler = Scheduler(
            self.allocator, max_concurrent=max_concurrent, chunk_tokens=chunk_tokens, max_model_tokens=1000
        )
        self.slots = [[STALE] * block_tokens for _ in range(num_blocks)]
        self.weights = 1
        self.num_computed = 0
        self.lookahead = lookahead
        self.in_flight: deque[tuple[Step, list[tuple[int, float]]]] = deque()
        self.sampled: list[tuple[int, float]] = []  # of the step computed last
        self.in_vain = 0
        self.ended_in_the_queue = 0
        self.preempted_in_flight = 0  # sequences whose sampled token was on its way when they lost their blocks

    def load_weights(self, weights: int, root_key: tuple[int, str]) -> None:
        self.weights = weights
        self.allocator.reset(root_key)

    def slot(self, seq: Sequence, position: int) -> tuple[list[int], int]:
        size = self.allocator.block_tokens
        return self.slots[seq.block_ids[position // size]], position % size

    def num_ahead(self, seq: Sequence) -> int:
        running = self.scheduler.running
        return int(self.scheduler.counters.ahead[running.index(seq)]) if seq in running else seq.num_ahead

    def num_issued(self, seq: Sequence) -> int:
        running = self.scheduler.running
        return int(self.scheduler.counters.issued[running.index(seq)]) if seq in running else 0

    def check_cache(self) -> None:
        """Every cached block that can be reached holds exactly the prefix that its chain of keys spells."""
        allocator = self.allocator
        states = {allocator._root: self.weights}
        for (parent, tokens), block in sorted(allocator._cached.items(), key=lambda row: allocator._node[row[1]]):
            if parent in states:  # parents are older than children; without one the block is out of reach
                state = states[parent]
                row = [state := advance(state, token) for token in tokens]
                assert self.slots[block] == row, f"block {block} is cached as what it does not hold"
                states[allocator._node[block]] = state

    def token(self, chunk: Chunk, position: int) -> int:
        known = chunk.seq.token_ids
        return known[position] if position < len(known) else self.sampled[chunk.source][0]

    def compute(self, chunks: Step) -> list[tuple[int, float]]:
        for chunk in chunks:
            assert (chunk.source >= 0) == (chunk.start + chunk.num_tokens > len(chunk.seq.token_ids))
            state = self.weights
            for position in range(chunk.start):
                state = advance(state, chunk.seq.token_ids[position])
                row, i = self.slot(chunk.seq, position)
                assert row[i] == state, f"{chunk.seq}: position {position} of the cache is not its own prefix"
        sampled = []
        for chunk in chunks:
            state = self.weights
            if chunk.start:
                row, i = self.slot(chunk.seq, chunk.start - 1)
                state = row[i]
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                state = advance(state, self.token(chunk, position))
                row, i = self.slot(chunk.seq, position)
                row[i] = state
            if chunk.samples:
                sampled.append(sample(state))
        self.sampled = sampled
        return sampled

    def step(self) -> list[Sequence]:
        scheduler = self.scheduler
        before, preemptions = set(scheduler.running), scheduler.stats.preemptions
        todo = [s for s in [*scheduler.running, *scheduler.waiting] if self.num_ahead(s) < s.max_tokens]
        chunks = scheduler.schedule()
        scheduler.check_invariants()
        self.preempted_in_flight += sum(seq.num_ahead - seq.num_tokens for seq in scheduler.waiting)
        assert not chunks or todo, "a step without work"
        assert chunks or not todo or self.in_flight, "work without a step"
        if chunks:
            self.check_chunks(chunks, min(todo, key=lambda seq: seq.index))
            if scheduler.stats.preemptions > preemptions:
                assert set(scheduler.running) <= before, "admission in a step with a preemption"
            self.num_computed += sum(chunk.num_tokens for chunk in chunks)
            self.in_flight.append((chunks, self.compute(chunks)))
            if self.lookahead and len(self.in_flight) == 1:
                return []
        chunks, sampled = self.in_flight.popleft()
        self.in_vain += sum(c.num_tokens for c in chunks if c.seq.finish_reason is not None)
        waiting = set(scheduler.waiting)
        finished = scheduler.update(chunks, *columns(sampled))
        self.ended_in_the_queue += len(waiting & set(finished))
        scheduler.check_invariants()
        self.check_cache()
        return finished

    def check_chunks(self, step: Step, first: Sequence) -> None:
        chunks = list(step)
        assert chunks[0].seq is first, "the first arrival that can advance does"
        assert sum(chunk.num_tokens for chunk in chunks) <= self.scheduler.chunk_tokens
        assert [chunk.seq.index for chunk in chunks] == sorted({chunk.seq.index for chunk in chunks})
        assert {chunk.seq for chunk in chunks} <= set(self.scheduler.running)
        for chunk in chunks:
            end = chunk.start + chunk.num_tokens
            assert chunk.num_tokens > 0
            assert end == self.num_issued(chunk.seq)
            ahead = self.num_ahead(chunk.seq)
            assert end == ahead - 1 if chunk.samples else end < ahead
            assert len(chunk.seq.block_ids) == -(-end // self.allocator.block_tokens), "exactly the blocks needed"

    def generate(self, requests: Iterable[Request], add_per_step: int = 10**9) -> dict[str, Sequence]:
        """Runs until every request has finished; each result is compared with the request run alone."""
        todo = list(requests)[::-1]
        wanted = {request.id: request for request in todo}
        done: dict[str, Sequence] = {}
        while todo or self.scheduler.has_work:
            for _ in range(min(add_per_step, len(todo))):
                self.scheduler.add(todo.pop())
            for seq in self.step():
                assert seq.request.id not in done
                done[seq.request.id] = seq
                expected = alone(wanted[seq.request.id], self.weights)
                assert (seq.generated_ids, seq.logprobs, seq.finish_reason) == expected
        assert done.keys() == wanted.keys()
        assert self.allocator.num_free == self.allocator.num_blocks, "blocks leaked"
        return done


def columns(sampled: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """As Scheduler.update takes them."""
    return [token for token, _ in sampled], [logprob for _, logprob in sampled]


def request(name: object, prompt: Iterable[int], max_new: int, stop: tuple[int, ...] = ()) -> Request:
    return Request(str(name), tuple(prompt), SamplingParams(max_new, stop_token_ids=stop))


def random_requests(rng: random.Random, capacity: int, count: int) -> list[Request]:
    """Prompts share prefixes of a few stems, or continue what another request generates (a second turn).
    Some are equal. The longest just fit the capacity."""
    stems = [[rng.randrange(VOCAB) for _ in range(capacity)] for _ in range(2)]
    requests = []
    while len(requests) < count:
        shared = rng.randint(0, capacity - 1)
        start = rng.choice(stems)[:shared]
        if requests and rng.random() < 0.3:
            turn = rng.choice(requests)
            start = [*turn.token_ids, *alone(turn, 1)[0]]
        prompt = start + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 3))]
        prompt = (prompt or [0])[:capacity]
        room = capacity + 1 - len(prompt)
        max_new = rng.choice([1, room, rng.randint(1, room)])
        stop = tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 1])))
        for _ in range(rng.choice([1, 1, 3])):
            requests.append(request(len(requests), prompt, max_new, stop))
    return requests


def random_engine(rng: random.Random) -> tuple[FakeEngine, int]:
    """An engine and the KV tokens of its longest request, which may fill its whole cache."""
    size = rng.choice([1, 2, 4, 4, 8])
    capacity = rng.randint(1, 32)
    num_blocks = -(-capacity // size) + rng.choice([0, 0, 1, 3, rng.randint(0, 20)])
    engine = FakeEngine(
        num_blocks, size, chunk_tokens=rng.choice([1, 2, 5, 16, 64]), max_concurrent=rng.choice([1, 2, 4, 8]),
        cache=rng.random() < 0.8, order=rng.choice(["fifo", "lifo", "shuffled"]), seed=rng.randrange(100),
    )  # fmt: skip
    return engine, capacity


def check_counters(engine: FakeEngine, sequences: Iterable[Sequence]) -> None:
    """Every computed token is booked once, as prompt, decoded or recomputed."""
    stats, sequences = engine.scheduler.stats, list(sequences)
    assert stats.prompt_tokens + stats.cached_tokens == sum(seq.num_prompt for seq in sequences)
    assert stats.generated_tokens == sum(seq.num_generated for seq in sequences)
    decoded = stats.generated_tokens - len(sequences)  # the last token of each is never computed
    assert engine.num_computed == stats.prompt_tokens + decoded + stats.recomputed_tokens
    assert stats.preemptions == sum(seq.num_preemptions for seq in sequences)
    assert stats.cached_tokens >= sum(seq.num_cached for seq in sequences)
    if not stats.preemptions:
        assert stats.recomputed_tokens == 0
        assert stats.cached_tokens == sum(seq.num_cached for seq in sequences)
