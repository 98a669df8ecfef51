"""Scheduler: whatever the budget, concurrency, cache size, paging order and arrivals, each request gets what it would
get alone."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exactrl.engine.allocator import BlockAllocator
from exactrl.engine.scheduler import Scheduler
from exactrl.errors import ConfigError, RequestError
from exactrl.types import EngineStats, Request
from tests.engine.fake_engine import VOCAB, FakeEngine, check_counters, columns, random_engine, random_requests, request


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
    assert (engine.num_issued(late), late.block_ids) == (0, [])
    assert late.num_generated == len(kept)
    expected = late.num_tokens
    while late.num_generated == len(kept):
        engine.step()
    assert engine.num_issued(late) == expected
    assert late.logprobs[:-1] == kept
    assert engine.scheduler.stats.recomputed_tokens == late.num_seen >= 8


def test_a_later_sequence_without_a_block_waits_and_keeps_its_own() -> None:
    engine = FakeEngine(5, 4, max_concurrent=2, cache=False)
    engine.scheduler.add(request("early", range(9), 3))  # 3 blocks
    late = engine.scheduler.add(request("late", range(8), 6))  # 2 blocks, and a third for its second new token
    while engine.scheduler.running != [late]:
        engine.step()
        assert engine.num_issued(late) <= 8
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
        engine.scheduler.update(chunks, *columns(engine.compute(chunks)))
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
    assert len(engine.scheduler.schedule()) == 0
    with pytest.raises(AssertionError, match="without schedule"):
        engine.scheduler.update(engine.scheduler.schedule(), [], [])
    engine.scheduler.add(request("x", [1], 3))
    chunks, ahead = engine.scheduler.schedule(), engine.scheduler.schedule()
    with pytest.raises(AssertionError, match="two steps that were not updated"):
        engine.scheduler.schedule()
    with pytest.raises(AssertionError, match="not the earliest"):
        engine.scheduler.update(ahead, [0], [0.0])
    with pytest.raises(AssertionError, match="0 tokens for 1"):
        engine.scheduler.update(chunks, [], [])
    engine.scheduler.update(chunks, [0], [0.0])
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
        scheduler.update(chunks, list(range(100, 100 + len(chunks.sampling))), [-1.0] * len(chunks.sampling))
        if len(chunks) == 1024:
            times.append(time.perf_counter() - start)
    assert times
    print(f"\nscheduler at 1,024 running sequences: median {sorted(times)[len(times) // 2] * 1e3:.2f} ms per step")
