"""Captured decode steps and steps launched ahead: the same tokens and logprobs as op by op, one after the other."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from exactrl.engine.engine import Engine
from exactrl.model.weights import random_weights
from exactrl.ops.cuda.mapped_memory import MappedMemory
from exactrl.types import Completion, SamplingParams
from tests.gpu.small_model import CONFIG, model_of, ops_of, requests_of

PLAIN = {"cuda_graphs": False, "overlap": False}


def bits(completions: list[Completion]) -> list[tuple[list[int], bytes, str]]:
    return [(c.token_ids, c.logprobs.tobytes(), c.finish_reason) for c in completions]


def ragged(count: int, new_tokens: int = 40):
    """Ends by length here and there, and by a stop token that is soon met."""
    requests = requests_of([1 + 37 * i % 700 for i in range(count)], new_tokens, common=100)
    return [
        replace(r, params=SamplingParams(1 + (i * 13) % new_tokens, (1.0, 0.0, 0.7)[i % 3], tuple(range(i % 5 * 40))))
        for i, r in enumerate(requests)
    ]


@pytest.fixture(scope="module")
def model():
    return model_of(ops_of())


@pytest.mark.parametrize("count", [1, 2, 3, 7, 33, 256])
def test_all_paths_give_the_same_bits(model, count: int) -> None:
    requests = ragged(count)
    expected = bits(Engine(model, kv_tokens=1 << 18, **PLAIN).generate(requests))
    assert len({reason for _, _, reason in expected}) == 2 or count < 7
    for limits in ({}, {"overlap": False}, {"cuda_graphs": False}, {"kv_tokens": 4096}, {"max_concurrent": 5}):
        engine = Engine(model, **{"kv_tokens": 1 << 18, **limits})
        engine.cache.fill(float("nan"))
        assert bits(engine.generate(requests)) == expected, limits
        assert bits(engine.generate(requests[::-1]))[::-1] == expected, limits
        for graphs in (engine.runner.graphs, engine.runner.pieces if count > 1 else engine.runner.graphs):
            assert (graphs is not None and graphs.num_captured > 0) == limits.get("cuda_graphs", True), limits
        assert engine.stats.preemptions > 0 or count < 256 or limits != {"kv_tokens": 4096}


def test_contexts_to_16k_grow_through_several_graphs(model) -> None:
    requests = requests_of([16000, 8150, 4090, 1020, 500, 3], 60)
    expected = bits(Engine(model, kv_tokens=40_000, chunk_tokens=4096, **PLAIN).generate(requests))
    engine = Engine(model, kv_tokens=40_000, chunk_tokens=4096)
    assert bits(engine.generate(requests)) == expected
    assert bits([c for r in requests for c in engine.generate([r])]) == expected
    assert engine.runner.graphs.num_captured >= 5


def test_sequences_that_come_while_others_decode(model) -> None:
    """Most steps hold prompts beside decoding: whole ones, chunks of them, and more tokens than pieces are for."""
    requests = ragged(120)
    expected = bits(Engine(model, kv_tokens=1 << 18, **PLAIN).generate(requests))
    for chunk_tokens in (100, 700, 4096):
        engine = Engine(model, kv_tokens=1 << 18, max_concurrent=24, chunk_tokens=chunk_tokens)
        engine.cache.fill(float("nan"))
        assert bits(engine.generate(requests)) == expected, chunk_tokens
        pieces = engine.runner.pieces
        assert pieces is not None
        assert pieces.num_captured > (1 if chunk_tokens == 100 else 3)
        assert engine.runner.num_captured == pieces.num_captured + engine.runner.graphs.num_captured


def test_A_37_weights_change_in_place_and_graphs_stay() -> None:
    model, requests = model_of(ops_of()), ragged(20)
    engine = Engine(model, kv_tokens=1 << 16)
    before = bits(engine.generate(requests))
    captured = engine.runner.num_captured
    other = list(random_weights(CONFIG, 1, peak=4.0, embed=0.1, device=model.ops.device))
    digest = engine.load_weights(other, 1)
    after = bits(engine.generate(requests))
    assert engine.runner.num_captured == captured
    assert after != before
    fresh = Engine(model_of(ops_of()), kv_tokens=1 << 16, **PLAIN)
    assert fresh.load_weights(other, 1) == digest
    assert bits(fresh.generate(requests)) == after


def test_an_engine_that_slept_has_given_its_memory_back_and_goes_on() -> None:
    """With new weights, the graphs that it had, and whatever the trainer wrote into the memory meanwhile."""
    model, requests = model_of(ops_of()), ragged(60)
    engine = Engine(model, kv_tokens=1 << 20, max_concurrent=24)
    expected = bits(engine.generate(requests))
    captured = engine.runner.num_captured
    memory = engine.cache._memory
    assert memory.size >= 2 * (1 << 20) * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * 2
    for _ in range(3):
        engine.sleep()
        engine.sleep()
        assert not memory.taken
        trainer = torch.full((1 << 32,), 0xFF, dtype=torch.uint8, device="cuda")  # NaN
        del trainer
        assert bits(engine.generate(requests)) == expected
        assert engine.runner.num_captured == captured, "graphs were captured anew"
    other = list(random_weights(CONFIG, 1, peak=4.0, embed=0.1, device=model.ops.device))
    engine.sleep()
    engine.load_weights(other, 1)
    after = bits(engine.generate(requests))
    assert after != expected
    fresh = Engine(model, kv_tokens=1 << 20, **PLAIN)
    assert bits(fresh.generate(requests)) == after


def test_memory_that_is_mapped_and_given_back() -> None:
    memory = MappedMemory(100 << 20)
    assert memory.size >= 100 << 20
    x = memory.tensor()
    assert (x.data_ptr(), x.numel(), x.device.type) == (memory.address, memory.size, "cuda")
    for value in (1, 2):
        x.fill_(value)
        assert x.long().sum().item() == value * memory.size
        for _ in range(2):
            memory.give_back()
        for _ in range(2):
            memory.take()
    forgotten = memory._finalizer
    del memory
    gc.collect()
    assert x.sum(dtype=torch.int64).item() >= 0, "a tensor keeps its memory"
    assert forgotten.alive
    del x
    gc.collect()
    assert not forgotten.alive
    with pytest.raises(torch.OutOfMemoryError, match="bytes of GPU memory are not free"):
        MappedMemory(1 << 42)


def test_memory_goes_with_its_engine(model) -> None:
    engine = Engine(model, kv_tokens=1 << 20)
    engine.generate(ragged(3))
    forgotten = engine.cache._memory._finalizer
    assert forgotten.alive
    del engine
    gc.collect()
    assert not forgotten.alive


def test_a_failed_first_capture_leaves_the_engine_usable(model) -> None:
    engine = Engine(model, kv_tokens=1 << 16)

    def fails(cut):
        if torch.cuda.is_current_stream_capturing():
            raise MemoryError

    with pytest.raises(MemoryError):
        engine.runner.pieces._capture(fails)
    assert len(engine.generate(ragged(3))) == 3


def test_closed_streams_leave_the_engine_usable(model) -> None:
    engine, requests = Engine(model, kv_tokens=1 << 16), ragged(30)
    expected = bits(Engine(model, kv_tokens=1 << 16, **PLAIN).generate(requests))
    for taken in (1, 5):
        completions = engine.stream(requests)
        for _ in range(taken):
            next(completions)
        completions.close()
        assert engine.allocator.num_free == engine.allocator.num_blocks
    assert bits(engine.generate(requests)) == expected
