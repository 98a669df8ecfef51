"""The engine: a completion depends on weights, prompt, parameters and noise key, and on nothing else, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from exactrl.engine import memory
from exactrl.errors import ConfigError, EnvironmentProblem, ModelError, NonFiniteError, RequestError
from exactrl.model.weights import random_weights
from exactrl.ops.head import gumbel_uniforms
from exactrl.sync.memory import sync
from exactrl.types import EngineStats
from tests.model.test_qwen3 import build, config, forward_logits
from tests.train.helpers import (
    VOCAB,
    bit_list,
    make_engine,
    make_trainer,
    one_ulp,
    request,
    roll_out,
    tokens,
    trajectories,
    workload,
)

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=DTYPES, ids=["fp32", "bf16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def model(dtype):
    return build(config(), dtype=dtype, trainable=False)


@pytest.fixture(scope="module")
def expected(dtype):
    """The plainest run there is: one sequence at a time, whole prompts, no prefix cache, room for everything."""
    return trajectories(make_engine(dtype, max_concurrent=1, prefix_cache=False).generate(workload()))


@pytest.mark.parametrize(
    "limits",
    [
        {"max_concurrent": 1},
        {"max_concurrent": 3},
        {"max_concurrent": 16},
        {"max_concurrent": 64},
        {"chunk_tokens": 1},
        {"chunk_tokens": 7},
        {"chunk_tokens": 64},
        {"chunk_tokens": 2048},
        {"max_concurrent": 5, "chunk_tokens": 33, "block_order": "lifo"},
        {"block_order": "shuffled", "block_seed": 3, "kv_tokens": 320},
        {"prefix_cache": False, "kv_tokens": 320},
        {"overlap": True},
        {"overlap": True, "max_concurrent": 3, "chunk_tokens": 7, "kv_tokens": 320},
    ],
    ids=str,
)
def test_limits_change_no_bit(dtype, expected, limits):
    engine = make_engine(dtype, **limits)
    engine.cache.fill(float("nan"))
    assert trajectories(engine.generate(workload())) == expected
    together = min(limits.get("max_concurrent", 16), limits.get("chunk_tokens", 16))
    assert min(together, 3) <= engine.stats.peak_running <= limits.get("max_concurrent", 16)


def test_the_workload_tells_requests_apart(expected):
    assert len(set(expected.values())) == len(expected)
    assert {reason for _, _, reason in expected.values()} == {"stop", "length"}
    assert len({ids[0] for ids, _, _ in expected.values()}) > 4


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("order", ["fifo", "lifo", "shuffled"])
def test_preemption_changes_no_bit(dtype, expected, order, overlap):
    engine = make_engine(dtype, kv_tokens=160, block_order=order, block_seed=1, overlap=overlap)
    engine.cache.fill(float("nan"))
    completions = engine.generate(workload())
    assert trajectories(completions) == expected
    assert engine.stats.preemptions > 0
    assert sum(c.num_preemptions for c in completions) == engine.stats.preemptions
    assert engine.stats.recomputed_tokens > 0
    assert all(len(c.token_ids) == len(c.logprobs) for c in completions)


def test_A_45_one_logprob_per_token_under_preemption():
    """32 requests of 200 tokens in a cache for about four of them; the trainer computes every logprob anew."""
    requests = [request(f"r{i}", tokens(4, i), 200) for i in range(32)]
    engine = make_engine(kv_tokens=832)
    samples = roll_out(engine, requests)
    assert engine.stats.preemptions > 20
    assert [len(s.token_ids) for s in samples] == [len(s.logprobs) for s in samples] == [200] * 32
    scores = make_trainer().score(samples)
    assert [bit_list(lp) for lp in scores] == [bit_list(s.logprobs) for s in samples]


def test_prefix_cache_is_used_and_changes_no_bit(dtype, expected):
    engine = make_engine(dtype, max_concurrent=4)
    engine.cache.fill(float("nan"))
    first = engine.generate(workload())
    second = engine.generate(workload())  # now every prompt is cached
    assert engine.allocator.hits > 0
    assert sum(c.num_cached_tokens for c in second) > sum(c.num_cached_tokens for c in first) > 0
    assert trajectories(first) == trajectories(second) == expected
    off = make_engine(dtype, prefix_cache=False)
    assert {c.num_cached_tokens for c in off.generate(workload())} == {0}
    assert off.stats.cached_tokens == off.allocator.hits == 0


def test_request_order_changes_no_bit(dtype, expected):
    requests = workload()
    for seed in range(2):
        shuffled = [requests[i] for i in np.random.default_rng(seed).permutation(len(requests))]
        completions = make_engine(dtype, max_concurrent=4, chunk_tokens=50).generate(shuffled)
        assert [c.id for c in completions] == [r.id for r in shuffled]
        assert trajectories(completions) == expected


def test_A_50_short_and_long_prompts_together_and_alone(dtype):
    requests = [request("short", tokens(3, 1), 12), request("long", tokens(11, 2), 12)]
    together = trajectories(make_engine(dtype).generate(requests))
    for r in requests:
        assert trajectories(make_engine(dtype).generate([r]))[r.id] == together[r.id]


def test_another_noise_key_gives_another_trajectory(dtype, expected):
    requests = [replace(r, noise_key=r.noise_key ^ 1) for r in workload()]
    changed = trajectories(make_engine(dtype).generate(requests))
    for r in requests:
        greedy = r.params.temperature == 0
        assert (changed[r.id] == expected[r.id]) == greedy or len(changed[r.id][0]) < 3


def test_across_the_kv_split():
    c = config(max_positions=1200)
    requests = [request("a", tokens(505, 1), 20), request("b", tokens(70, 2), 10), request("c", tokens(530, 3), 6)]
    reference = trajectories(make_engine(c=c, max_concurrent=1, prefix_cache=False).generate(requests))
    for limits in ({"chunk_tokens": 100}, {"chunk_tokens": 2048}, {"kv_tokens": 560}):
        engine = make_engine(c=c, **limits)
        engine.cache.fill(float("nan"))
        assert trajectories(engine.generate(requests)) == reference


def test_each_token_is_the_canonical_draw_and_its_logprob_that_of_a_plain_forward(model, dtype):
    """Independent of the engine: logits of a whole forward, the documented noise, log_softmax at its own T (A-49).

    The noise of a token is counted by the position it will have. Greedy reports its logprob at temperature 1.
    """
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    checked = {t: 0 for t in (1.0, 0.6, 0.0)}
    for i, temperature in enumerate((1.0, 0.6, 0.0)):
        r = request(f"r{i}", tokens(9, 5), 16, temperature)
        (completion,) = make_engine(dtype, chunk_tokens=5).generate([r])
        with torch.no_grad():
            (logits,) = forward_logits(model, [torch.tensor([*r.token_ids, *completion.token_ids])])
        scaled = logits / (temperature or 1.0)
        for n, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            row = scaled[len(r.token_ids) - 1 + n]
            assert abs(torch.log_softmax(row, -1)[token] - logprob) < tolerance
            u = torch.from_numpy(gumbel_uniforms(r.noise_key, len(r.token_ids) + n, VOCAB)).double()
            score = row + (0 if temperature == 0 else -torch.log(-torch.log(u)))
            assert score.max() - score[token] < tolerance
            checked[temperature] += 1
    assert set(checked.values()) == {16}


def test_A_49_temperature_is_each_requests_own(dtype):
    prompt = tokens(12, 7)
    requests = [request("train", prompt, 8, 1.0), request("eval", prompt, 8, 0.6)]
    requests[1] = replace(requests[1], noise_key=requests[0].noise_key)
    together = trajectories(make_engine(dtype).generate(requests))
    alone = {r.id: trajectories(make_engine(dtype).generate([r]))[r.id] for r in requests}
    assert together == alone
    assert together["train"][1] != together["eval"][1]


def test_stop_tokens_and_finish_reasons():
    prompt = tokens(10, 3)
    (free,) = make_engine().generate([request("r", prompt, 20)])
    assert (free.finish_reason, len(free.token_ids)) == ("length", 20)
    for stop in ([free.token_ids[4]], [96 if 96 not in free.token_ids else 95, free.token_ids[7], free.token_ids[4]]):
        cut = min(free.token_ids.index(t) for t in stop if t in free.token_ids)
        (stopped,) = make_engine().generate([request("r", prompt, 20, stop=stop)])
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids == free.token_ids[: cut + 1]  # the stop token is part of the response
        assert bit_list(stopped.logprobs) == bit_list(free.logprobs)[: cut + 1]
    (last,) = make_engine().generate([request("r", prompt, 1, stop=[free.token_ids[0]])])
    assert (last.finish_reason, last.token_ids) == ("stop", free.token_ids[:1])


def test_A_36_new_weights_forget_the_prefix_cache(dtype):
    requests = [request(f"r{i}", tokens(40, 0), 10) for i in range(3)]
    engine = make_engine(dtype)
    old = trajectories(engine.generate(requests))
    engine.load_weights(random_weights(config(), 1), 1)
    completions = engine.generate(requests)
    assert {c.weight_version for c in completions} == {1}
    fresh = trajectories(make_engine(dtype, seed=1).generate(requests))
    assert trajectories(completions) == fresh
    assert fresh != old
    engine.load_weights(random_weights(config(), 0), 2)
    assert trajectories(engine.generate(requests)) == old


def test_loading_the_same_version_again_forgets_the_prefix_cache():
    engine = make_engine()
    requests = [request("r", tokens(40, 0), 5)]
    engine.generate(requests)
    engine.load_weights(random_weights(config(), 1), 0)
    assert trajectories(engine.generate(requests)) == trajectories(make_engine(seed=1).generate(requests))


def test_digest_of_loaded_weights_is_the_trainers(dtype):
    trainer, engine = make_trainer(dtype, seed=3), make_engine(dtype)
    before = engine.generate([request("r", [1, 2, 3], 4)])
    assert engine.load_weights(trainer.named_weights(), 7) == trainer.compute_digest()
    after = engine.generate([request("r", [1, 2, 3], 4)])
    assert (before[0].weight_version, after[0].weight_version) == (0, 7)
    assert sync(trainer, engine) == trainer.compute_digest()
    assert engine.weight_version == trainer.version


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("bad", [], 4), "empty prompt"),
        (request("bad", [1, VOCAB], 4), f"token id {VOCAB} at position 1"),
        (request("bad", [1, -1], 4), "token id -1"),
        (request("bad", [1] * 500, 13), "model's limit is 512"),
        (request("bad", [1] * 100, 100), "whole cache holds 160"),
        (request("bad", [1], 0), "max_new_tokens 0"),
        (request("bad", [1], 4, -1.0), "temperature -1.0"),
        (request("bad", [1], 4, float("nan")), "temperature nan"),
        (request("bad", [1], 4, float("inf")), "temperature inf"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hopeless_requests_are_refused_before_any_work(bad, message):
    engine = make_engine(kv_tokens=160)
    good = request("good", tokens(9, 0), 6)
    with pytest.raises(RequestError, match=message) as caught:
        engine.generate([good, bad])
    assert "'bad'" in str(caught.value)
    assert engine.stats == EngineStats()
    assert trajectories(engine.generate([good])) == trajectories(make_engine().generate([good]))


def test_repeated_ids_are_refused():
    engine = make_engine()
    with pytest.raises(RequestError, match="'a' is already in the queue"):
        engine.generate([request("a", [1], 2), request("a", [2], 2)])
    assert len(engine.generate([request("a", [1], 2)])) == 1


def test_limits_that_allow_nothing_are_refused():
    for limits in ({"max_concurrent": 0}, {"chunk_tokens": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            make_engine(**limits)


def test_the_largest_request_that_fits():
    engine = make_engine(kv_tokens=160)
    (c,) = engine.generate([request("r", tokens(100, 0), 61)])  # the last token needs no KV
    assert len(c.token_ids) == 61
    assert trajectories([c]) == trajectories(make_engine().generate([request("r", tokens(100, 0), 61)]))


def test_no_requests():
    assert make_engine().generate([]) == []


def test_nan_weights_name_request_and_position(dtype):
    weights = dict(random_weights(config(), 0))
    weights["model.embed_tokens.weight"][5] = float("nan")  # only prompts with token 5 are touched
    engine = make_engine(dtype)
    engine.load_weights(weights.items(), 1)
    good, bad = request("good", [1, 2], 3, stop=[5]), request("bad", [5] * 20, 3)
    with pytest.raises(NonFiniteError, match=r"request 'bad': logprob nan at position 20.*weight version 1"):
        engine.generate([good, bad])
    assert not engine.scheduler.has_work
    engine.load_weights(random_weights(config(), 0), 2)
    assert trajectories(engine.generate([good, bad])) == trajectories(make_engine(dtype).generate([good, bad]))


def test_an_interrupt_leaves_the_engine_usable(dtype, expected):
    engine = make_engine(dtype, kv_tokens=320, chunk_tokens=50)
    calls = []

    def interrupt(done: int, total: int) -> None:
        calls.append((done, total))
        if len(calls) == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(workload(), interrupt)
    assert not engine.scheduler.has_work
    engine.scheduler.check_invariants()
    assert trajectories(engine.generate(workload())) == expected


def test_a_fault_in_the_middle_of_a_forward_leaves_the_engine_usable(dtype, expected):
    countdown = [12]

    def see(name, x):
        if name == "layers.1.attention":
            countdown[0] -= 1
            if countdown[0] == 0:
                raise MemoryError
        return x

    engine = make_engine(dtype, see=see)
    with pytest.raises(MemoryError):
        engine.generate(workload())
    engine.scheduler.check_invariants()
    assert trajectories(engine.generate(workload())) == expected


def test_progress_reaches_the_total():
    seen = []
    make_engine(max_concurrent=3).generate(workload(), lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (16, 16)


def test_half_loaded_weights_are_never_rolled_out():
    engine = make_engine()
    weights = list(random_weights(config(), 1))
    with pytest.raises(ModelError, match="missing"):
        engine.load_weights(weights[:-1], 1)
    with pytest.raises(ModelError, match="weights"):
        engine.generate([request("r", [1, 2, 3], 4)])
    engine.load_weights(weights, 1)
    (c,) = engine.generate([request("r", [1, 2, 3], 4)])
    assert trajectories([c]) == trajectories(make_engine(seed=1).generate([request("r", [1, 2, 3], 4)]))


def test_statistics_add_up():
    engine = make_engine(kv_tokens=160)
    samples = roll_out(engine, workload())
    stats = engine.stats
    assert stats.generated_tokens == sum(len(s.token_ids) for s in samples)
    assert stats.prompt_tokens + stats.cached_tokens == sum(len(s.prompt_token_ids) for s in samples)
    engine.stats = EngineStats()
    engine.generate([request("r", [1, 2, 3], 4)])
    assert (engine.stats.generated_tokens, engine.stats.prompt_tokens, engine.stats.steps) == (4, 3, 4)


def test_a_one_ulp_fault_is_visible(dtype, expected):
    engine = make_engine(dtype, see=one_ulp("layers.1.swiglu"), max_concurrent=1, prefix_cache=False)
    assert trajectories(engine.generate(workload())) != expected


def test_a_cache_larger_than_memory_is_refused_at_once():
    from exactrl.errors import EnvironmentProblem
    from exactrl.launch import Engine

    with pytest.raises(EnvironmentProblem, match="GiB"):
        Engine("tiny", kv_tokens=10**14)


def test_a_cache_given_back_comes_back_and_changes_no_bit(dtype, expected, monkeypatch):
    """What `sleep` does on a GPU. On the CPU the memory stays."""
    engine = make_engine(dtype)
    engine.sleep()
    first, cache = engine.generate(workload()), engine.cache
    calls = []

    def give_back():
        calls.append("given back")
        cache.fill(float("nan"))

    def take_again():
        if len(calls) == 1:
            calls.append("full")
            raise torch.OutOfMemoryError("full")
        calls.append("taken")

    monkeypatch.setattr(cache, "give_back", give_back)
    monkeypatch.setattr(cache, "take_again", take_again)
    engine.sleep()
    engine.sleep()
    assert engine.allocator.match_prefix(list(workload()[0].token_ids)) == []
    with pytest.raises(EnvironmentProblem, match="no longer fits"):
        engine.generate(workload())
    assert trajectories(engine.generate(workload())) == trajectories(first) == expected
    assert engine.cache is cache
    assert calls == ["given back", "full", "taken"]
    rest = engine.stream(workload())
    next(rest)
    with pytest.raises(RequestError, match="cannot sleep"):
        engine.sleep()
    rest.close()


def test_A_38_a_sleeping_engine_wakes_up_with_the_weights_it_was_given(dtype, expected):
    engine = make_engine(dtype)
    engine.generate(workload())
    engine.sleep()
    weights = list(random_weights(config(), 1))
    engine.load_weights(weights, 1)
    fresh = make_engine(dtype)
    fresh.load_weights(weights, 1)
    assert trajectories(engine.generate(workload())) == trajectories(fresh.generate(workload())) != expected


def test_memory_that_others_will_take_is_left_to_them(monkeypatch, dtype):
    model = build(config(), dtype=dtype, trainable=False)
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000 * memory.block_bytes(model))
    at = {reserve: memory.num_blocks(model, 0, 10**9, reserve * memory.block_bytes(model)) for reserve in (0, 500)}
    assert at == {0: 400, 500: 200}
    with pytest.raises(EnvironmentProblem, match=r"no room for a KV cache.*of which the optimizer will take"):
        memory.num_blocks(model, 0, 10**9, 2000 * memory.block_bytes(model))
    memory.num_blocks(model, 1000 * model.ops.page_size, 1, 0)
    with pytest.raises(EnvironmentProblem, match=r"for the optimizer; lower rollout.kv_tokens"):
        memory.num_blocks(model, 1001 * model.ops.page_size, 1, 500 * memory.block_bytes(model))
