"""Scheduler: whatever the budget, concurrency, cache size, paging order and arrivals, each request gets what it would
get alone. A fake model writes what it computes into a fake cache, and reads the prefix from there and nowhere else."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exactrl.engine.allocator import BlockAllocator
from exactrl.engine.scheduler import Chunk, Scheduler
from exactrl.engine.sequence import Sequence
from exactrl.errors import ConfigError, RequestError
from exactrl.types import EngineStats, Request, SamplingParams

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
    """Scheduler + fake model. `weights` is the state of the empty prefix. Every step checks everything it can."""

    def __init__(self, num_blocks: int, block_tokens: int = 4, *, chunk_tokens: int = 16, max_concurrent: int = 4,
                 cache: bool = True, order: str = "fifo", seed: int = 0) -> None:  # fmt: skip
        self.allocator = BlockAllocator(num_blocks, block_tokens, enable_prefix_cache=cache, order=order, seed=seed)  # type: ignore[arg-type]
        self.scheduler = Scheduler(
            self.allocator, max_concurrent=max_concurrent, chunk_tokens=chunk_tokens, max_model_tokens=1000
        )
        self.slots = [[STALE] * block_tokens for _ in range(num_blocks)]
        self.weights = 1
        self.num_computed = 0

    def load_weights(self, weights: int, root_key: tuple[int, str]) -> None:
        self.weights = weights
        self.allocator.reset(root_key)

    def slot(self, seq: Sequence, position: int) -> tuple[list[int], int]:
        size = self.allocator.block_tokens
        return self.slots[seq.block_ids[position // size]], position % size

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

    def compute(self, chunks: list[Chunk]) -> list[tuple[int, float]]:
        for chunk in chunks:
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
                state = advance(state, chunk.seq.token_ids[position])
                row, i = self.slot(chunk.seq, position)
                row[i] = state
            if chunk.samples:
                sampled.append(sample(state))
        return sampled

    def step(self) -> list[Sequence]:
        scheduler = self.scheduler
        before, preemptions = set(scheduler.running), scheduler.stats.preemptions
        first = min([*scheduler.running, *scheduler.waiting], key=lambda seq: seq.index)
        chunks = scheduler.schedule()
        scheduler.check_invariants()
        assert chunks[0].seq is first, "the first arrival always advances"
        assert sum(chunk.num_tokens for chunk in chunks) <= scheduler.chunk_tokens
        assert [chunk.seq.index for chunk in chunks] == sorted({chunk.seq.index for chunk in chunks})
        assert {chunk.seq for chunk in chunks} <= set(scheduler.running)
        if scheduler.stats.preemptions > preemptions:
            assert set(scheduler.running) <= before, "admission in a step with a preemption"
        for chunk in chunks:
            end = chunk.start + chunk.num_tokens
            assert chunk.num_tokens > 0
            assert chunk.start == chunk.seq.num_computed
            assert chunk.samples == (end == chunk.seq.num_tokens)
            assert len(chunk.seq.block_ids) == -(-end // self.allocator.block_tokens), "exactly the blocks needed"
        self.num_computed += sum(chunk.num_tokens for chunk in chunks)
        finished = scheduler.update(chunks, self.compute(chunks))
        scheduler.check_invariants()
        self.check_cache()
        return finished

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


def test_random_traces_equal_running_alone() -> None:
    preemptions = hits = evictions = recomputed = 0
    for seed in range(2500):
        rng = random.Random(seed)
        engine, capacity = random_engine(rng)
        requests = random_requests(rng, capacity, rng.randint(1, 8))
        done = engine.generate(requests, add_per_step=rng.choice([1, 2, 10**9]))
        check_counters(engine, done.values())
        preemptions += engine.scheduler.stats.preemptions
        recomputed += engine.scheduler.stats.recomputed_tokens
        hits += engine.allocator.hits
        evictions += engine.allocator.evictions
    assert min(preemptions, hits, evictions, recomputed) > 500, "the traces no longer reach the interesting cases"


def test_random_traces_across_weight_updates_and_aborts() -> None:
    """Equal prompts under new weights; root keys that come back; a call abandoned midway, inside a step or between."""
    for seed in range(500):
        rng = random.Random(10_000 + seed)
        engine, capacity = random_engine(rng)
        requests = random_requests(rng, capacity, 4)
        for weights in range(1, 5):
            if weights > 1 and rng.random() < 0.7:
                engine.load_weights(weights, (weights % 2, "digest"))
            if rng.random() < 0.4:
                for one in requests:
                    engine.scheduler.add(one)
                for _ in range(rng.randint(0, 6)):
                    if engine.scheduler.has_work:
                        engine.step()
                if rng.random() < 0.5:
                    engine.compute(engine.scheduler.schedule())
                engine.scheduler.abort_all()
                engine.scheduler.check_invariants()
                assert engine.allocator.num_free == engine.allocator.num_blocks
                assert not engine.scheduler.has_work
            engine.generate(requests)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 1), min_size=1, max_size=7), st.integers(1, 9)),
             min_size=1, max_size=6),
    st.integers(0, 6), st.sampled_from([1, 2, 4]), st.integers(1, 20), st.integers(1, 6),
)  # fmt: skip
def test_hypothesis_traces(rows: list, spare: int, size: int, chunk_tokens: int, max_concurrent: int) -> None:
    stem = [0, 1, 1, 0, 1, 0, 0, 0, 1]
    requests = [request(i, stem[:n] + tail, max_new) for i, (n, tail, max_new) in enumerate(rows)]
    need = max(len(one.token_ids) + one.params.max_new_tokens - 1 for one in requests)
    engine = FakeEngine(-(-need // size) + spare, size, chunk_tokens=chunk_tokens, max_concurrent=max_concurrent)
    check_counters(engine, engine.generate(requests).values())


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_prompts_at_block_boundaries(length: int) -> None:
    engine = FakeEngine(8, 16, chunk_tokens=64)
    prompt = [i % VOCAB for i in range(length)]
    assert engine.generate([request("cold", prompt, 3)])["cold"].num_cached == 0
    assert engine.generate([request("warm", prompt, 3)])["warm"].num_cached == (length - 1) // 16 * 16
    assert engine.allocator.hits == (length - 1) // 16


def test_generated_tokens_are_cached_too() -> None:
    engine = FakeEngine(8, 4)
    first = engine.generate([request("turn1", range(5), 8)])["turn1"]
    second = engine.generate([request("turn2", [*first.token_ids, 1], 2)])["turn2"]
    assert second.num_cached == 12  # of 13 tokens, 12 have keys and values: the last sampled one was never computed


@pytest.mark.parametrize("size", [1, 4, 16])
def test_cache_of_exactly_one_sequence(size: int) -> None:
    """Many sequences, each of which needs the whole cache: progress without livelock, in arrival order."""
    engine = FakeEngine(32 // size, size, chunk_tokens=7, max_concurrent=8)
    done = engine.generate([request(i, [i] * (i + 1), 32 - i) for i in range(8)])
    assert list(done) == [str(i) for i in range(8)]
    assert engine.scheduler.stats.steps <= engine.num_computed
    engine.scheduler.add(request("fits", [0] * 30, 3))
    with pytest.raises(RequestError, match=r"'large'.*33 KV tokens.*holds 32.*kv_tokens"):
        engine.scheduler.add(request("large", [0] * 30, 4))


def test_budget_of_one_token() -> None:
    engine = FakeEngine(8, 4, chunk_tokens=1)
    done = engine.generate([request(i, range(i, i + 5), 4) for i in range(3)])
    assert engine.scheduler.stats.steps == engine.num_computed == sum(seq.num_tokens - 1 for seq in done.values())


def test_recomputation_samples_at_the_last_token_only_and_keeps_logprobs() -> None:
    engine = FakeEngine(6, 4, chunk_tokens=3, max_concurrent=2, cache=False)
    engine.scheduler.add(request("early", range(8), 12))
    late = engine.scheduler.add(request("late", range(8), 12))
    while not late.num_preemptions:
        engine.step()
    kept = list(late.logprobs)
    assert kept
    assert (late.num_computed, late.block_ids) == (0, [])
    assert late.num_generated == len(kept)
    expected = late.num_tokens
    while late.num_generated == len(kept):
        engine.step()
    assert late.num_computed == expected
    assert late.logprobs[:-1] == kept
    assert engine.scheduler.stats.recomputed_tokens == late.num_seen >= 8


def test_a_later_sequence_without_a_block_waits_and_keeps_its_own() -> None:
    engine = FakeEngine(5, 4, max_concurrent=2, cache=False)
    engine.scheduler.add(request("early", range(9), 3))  # 3 blocks
    late = engine.scheduler.add(request("late", range(8), 6))  # 2 blocks, and a third for its second new token
    while engine.scheduler.running != [late]:
        engine.step()
        assert late.num_computed <= 8
    assert late.num_preemptions == 0
    while engine.scheduler.has_work:
        engine.step()
    assert engine.scheduler.stats.recomputed_tokens == 0


def test_arrival_order_and_mixed_steps() -> None:
    engine = FakeEngine(64, 4, chunk_tokens=8, max_concurrent=3)
    for i, length in enumerate([3, 12, 2, 2]):
        engine.scheduler.add(request(i, [i] * length, 9))
    steps = []
    for _ in range(4):
        chunks = engine.scheduler.schedule()
        steps.append([(chunk.seq.index, chunk.num_tokens, chunk.samples) for chunk in chunks])
        engine.scheduler.update(chunks, engine.compute(chunks))
    assert steps[:2] == [[(0, 3, True), (1, 5, False)], [(0, 1, True), (1, 7, True)]]
    assert steps[2:] == [[(0, 1, True), (1, 1, True), (2, 2, True)], [(0, 1, True), (1, 1, True), (2, 1, True)]]
    assert engine.scheduler.stats == EngineStats(steps=4, prompt_tokens=17, generated_tokens=9, peak_running=3)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("x", [], 4), "'x' has an empty prompt"),
        (request("x", [1], 0), "'x' has max_new_tokens 0"),
        (request("x", [1] * 990, 11), r"'x' may grow to 990 prompt \+ 11 new tokens.*1000"),
        (request("x", [1] * 30, 20), "'x' may need 49 KV tokens.*holds 32"),
        (request("first", [1], 1), "'first' is already in the queue"),
    ],
)
def test_hopeless_requests_are_named_and_change_nothing(bad: Request, message: str) -> None:
    engine = FakeEngine(8, 4)
    engine.scheduler.add(request("first", [1], 1))
    with pytest.raises(RequestError, match=message):
        engine.scheduler.add(bad)
    assert len(engine.scheduler.waiting) == 1
    engine.scheduler.check_invariants()


def test_limits_below_one_are_refused() -> None:
    for limits in ((0, 1), (1, 0)):
        with pytest.raises(ConfigError, match="must be at least 1"):
            Scheduler(BlockAllocator(1), max_concurrent=limits[0], chunk_tokens=limits[1], max_model_tokens=9)


def test_misuse_is_caught() -> None:
    engine = FakeEngine(8, 4)
    assert engine.scheduler.update(engine.scheduler.schedule(), []) == []
    engine.scheduler.add(request("x", [1], 2))
    chunks = engine.scheduler.schedule()
    with pytest.raises(AssertionError, match="before update"):
        engine.scheduler.schedule()
    with pytest.raises(AssertionError, match="did not return"):
        engine.scheduler.update(list(chunks), [(0, 0.0)])
    with pytest.raises(AssertionError, match="0 sampled tokens for 1"):
        engine.scheduler.update(chunks, [])
    engine.scheduler.update(chunks, [(0, 0.0)])
    assert engine.scheduler.has_work


def test_time_per_step_at_1024_sequences() -> None:
    """Printed (pytest -s), not asserted: other processes share the machine."""
    scheduler = Scheduler(BlockAllocator(30_000), max_concurrent=1024, chunk_tokens=8192, max_model_tokens=4096)
    for i in range(1024):
        scheduler.add(request(i, range(i, i + 100), 300, (7,)))
    times = []
    while scheduler.has_work and len(times) < 200:
        start = time.perf_counter()
        chunks = scheduler.schedule()
        scheduler.update(chunks, [(i, -1.0) for i in range(100, 100 + sum(chunk.samples for chunk in chunks))])
        if len(chunks) == 1024:
            times.append(time.perf_counter() - start)
    assert times
    print(f"\nscheduler at 1,024 running sequences: median {sorted(times)[len(times) // 2] * 1e3:.2f} ms per step")
