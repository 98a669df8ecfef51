"""A scheduler that prepares a step while the one before is computed: each request gets what it would get alone."""

from __future__ import annotations

import random

from exactrl.types import EngineStats
from tests.engine.fake_engine import VOCAB, FakeEngine, check_counters, random_engine, random_requests, request


def looking_ahead(rng: random.Random) -> tuple[FakeEngine, int]:
    engine, capacity = random_engine(rng)
    engine.lookahead = True
    return engine, capacity


def test_random_traces_equal_running_alone() -> None:
    preemptions = hits = in_vain = waiting = 0
    for seed in range(2500):
        rng = random.Random(50_000 + seed)
        engine, capacity = looking_ahead(rng)
        requests = random_requests(rng, capacity, rng.randint(1, 8))
        done = engine.generate(requests, add_per_step=rng.choice([1, 2, 10**9]))
        assert not engine.in_flight, "a computed step was not booked"
        if not engine.in_vain and not engine.scheduler.stats.preemptions:
            check_counters(engine, done.values())
        stats = engine.scheduler.stats
        assert stats.prompt_tokens + stats.cached_tokens == sum(seq.num_prompt for seq in done.values())
        assert stats.generated_tokens == sum(seq.num_generated for seq in done.values())
        preemptions += stats.preemptions
        hits += engine.allocator.hits
        in_vain += engine.in_vain
        waiting += any(seq.num_preemptions and seq.finish_reason == "stop" for seq in done.values())
    assert min(preemptions, hits, in_vain, 10 * waiting) > 300, "the traces no longer reach the interesting cases"


def test_traces_of_many_sequences_equal_running_alone() -> None:
    preemptions = 0
    for seed in range(8):
        rng = random.Random(70_000 + seed)
        engine = FakeEngine(
            rng.choice([120, 500]),
            4,
            chunk_tokens=rng.choice([48, 300]),
            max_concurrent=64,
            lookahead=rng.random() < 0.7,
        )
        engine.generate(random_requests(rng, 40, 120), add_per_step=rng.choice([5, 10**9]))
        assert engine.scheduler.stats.peak_running > 20
        preemptions += engine.scheduler.stats.preemptions
    assert preemptions > 30


def test_random_traces_across_weight_updates_and_aborts() -> None:
    for seed in range(300):
        rng = random.Random(60_000 + seed)
        engine, capacity = looking_ahead(rng)
        requests = random_requests(rng, capacity, 4)
        for weights in range(1, 4):
            if weights > 1:
                engine.load_weights(weights, (weights, "digest"))
            for one in requests:
                engine.scheduler.add(one)
            for _ in range(rng.randint(0, 6)):
                if engine.scheduler.has_work:
                    engine.step()
            engine.scheduler.abort_all()
            engine.in_flight.clear()
            engine.scheduler.check_invariants()
            assert engine.allocator.num_free == engine.allocator.num_blocks
            assert not engine.scheduler.has_work
            engine.generate(requests)


def test_steps_of_a_decode_are_as_many_as_without_and_one_is_in_flight() -> None:
    engine = FakeEngine(8, 4, lookahead=True)
    engine.scheduler.add(request("x", range(3), 4))
    assert engine.step() == []
    assert len(engine.in_flight) == 1
    while engine.scheduler.has_work:
        engine.step()
    assert engine.scheduler.stats == EngineStats(steps=4, prompt_tokens=3, generated_tokens=4, peak_running=1)
    assert engine.in_vain == 0


def test_what_follows_a_stop_token_is_computed_in_vain_and_not_booked() -> None:
    engine = FakeEngine(8, 4, lookahead=True)
    done = engine.generate([request("x", range(3), 20, tuple(range(VOCAB)))])
    assert done["x"].finish_reason == "stop"
    assert (done["x"].num_generated, engine.scheduler.stats.generated_tokens) == (1, 1)
    assert (engine.in_vain, engine.scheduler.stats.steps) == (1, 2)


def test_a_token_sampled_before_a_preemption_is_kept() -> None:
    """It may even be the one that ends the sequence, which then leaves the queue."""
    preempted = ended = 0
    for seed in range(300):
        rng = random.Random(seed)
        engine = FakeEngine(6, 2, chunk_tokens=8, max_concurrent=3, cache=False, lookahead=True)
        stop = tuple(rng.sample(range(VOCAB), 3))
        prompts = [[rng.randrange(VOCAB) for _ in range(3)] for _ in range(3)]
        engine.generate([request(i, prompt, 8, stop) for i, prompt in enumerate(prompts)])
        preempted += engine.preempted_in_flight
        ended += engine.ended_in_the_queue
    assert min(preempted, ended) > 10
