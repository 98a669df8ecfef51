"""Faults seen elsewhere that make a result depend on its company, through whole models (docs/cases.md).

Cases of single ops: tests/ops/test_real_sizes.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from exactrl import launch
from exactrl.engine.engine import Engine
from exactrl.errors import NonFiniteError, ParityError, RequestError
from exactrl.model.attention_state import PackedState
from exactrl.ops.linear import product
from exactrl.parity.oracle import Oracle
from exactrl.types import SamplingParams
from tests.cases.helpers import Called, World, berry_tokenizer
from tests.cases.test_group_a import refusal
from tests.model.test_qwen3 import EXACT, PLAIN, build, config, rows_of
from tests.ops.helpers import same_bits
from tests.test_launch import micro
from tests.train.helpers import (
    bit_list,
    make_engine,
    make_trainer,
    one_torch_thread,  # noqa: F401
    one_ulp,
    request,
    roll_out,
    tokens,
    trajectories,
    unobserved,
)

F32, BF16 = torch.float32, torch.bfloat16
ROOT = Path(__file__).parents[2]
SMALL = config(num_layers=1, hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1, head_dim=8,
               max_positions=9000)  # fmt: skip


@pytest.fixture(params=[F32, BF16], ids=["fp32", "bf16"])
def dtype(request):
    return request.param


def test_B_07_what_follows_a_token_does_not_change_its_logits(dtype):
    """10 tokens alone, and with pads up to 11, 64 and 1000 behind them; alone in the pack, and beside others."""
    c = config(max_positions=1000)
    model = build(c, dtype=dtype)
    model.reserve_positions(1000)
    ids = tokens(10, 0)

    def logits(sequences: list[list[int]]) -> torch.Tensor:
        """Of the first sequence's first 10 tokens, float32 [10, vocabulary]."""
        lengths = [len(s) for s in sequences]
        positions = torch.cat([torch.arange(n) for n in lengths])
        ids = torch.tensor([t for s in sequences for t in s])
        with torch.no_grad():
            hidden = model(ids, positions, PackedState(model.ops, rows_of(lengths, c)))
            return product(hidden[:10].contiguous(), model.head, F32)

    alone = logits([ids])
    for length in (11, 64, 1000):
        padded = [*ids, *[0] * (length - 10)]
        assert same_bits(logits([padded]), alone), f"padded to {length}"
        assert same_bits(logits([padded, tokens(33, 1), padded]), alone), f"padded to {length}, beside others"


@pytest.mark.parametrize("prefix", [15, 16, 17, 32])
def test_B_08_prefixes_around_the_block_size(dtype, prefix):
    """Blocks of 16: the whole prompt is the shared prefix, or goes on by 1 or 16 tokens; several requests at once."""
    common = tokens(prefix, 0)
    rest = [[], [5], tokens(16, 1), tokens(16, 2), [], [5]]
    requests = [request(f"r{i}", common + tail, 10) for i, tail in enumerate(rest)]
    expected = trajectories(make_engine(dtype, prefix_cache=False).generate(requests))
    engine = make_engine(dtype, max_concurrent=3)
    assert engine.allocator.block_tokens == 16
    engine.cache.fill(float("nan"))
    assert trajectories(engine.generate(requests)) == expected
    warm = engine.generate(requests)
    assert trajectories(warm) == expected
    assert [c.num_cached_tokens for c in warm][:2] == [(prefix - 1) // 16 * 16, prefix // 16 * 16]


def test_B_09_cold_and_warm_prefill(dtype):
    """400 tokens: sent, sent again, and again after the cache was flushed by loading the same weights."""
    engine, prompt = make_engine(dtype), request("r", tokens(400, 0), 16)
    (cold,), (warm,) = engine.generate([prompt]), engine.generate([prompt])
    engine.load_weights(make_trainer(dtype).named_weights(), 1)
    (flushed,) = engine.generate([prompt])
    assert [c.num_cached_tokens for c in (cold, warm, flushed)] == [0, 384, 0]
    assert bit_list(cold.logprobs) == bit_list(warm.logprobs) == bit_list(flushed.logprobs)
    assert cold.token_ids == warm.token_ids == flushed.token_ids


def test_B_11_torch_itself_is_left_alone():
    """No op of torch is replaced: mean in all its forms, after and inside an exact forward."""
    x = torch.tensor([1.0, 2.0, 3.0, 6.0])
    found = []

    def see(name, value):
        found.append([x.mean(), x.mean(dim=[]), x.mean(dim=None), x.mean(0), torch.mean(x), x.mean(0, keepdim=True)[0]])
        return value

    roll_out(make_engine(see=see), [request("r", [1, 2, 3], 2)])
    see("", x)
    assert len(found) > 20
    assert {float(m) for means in found for m in means} == {3.0}
    assert x.mean(0, keepdim=True).shape == (1,)


def test_B_13_long_greedy_generations():
    """30 prompts, batches of 16 and of 12 in another order. 1,024 tokens each instead of 4,096, which takes 20 s."""
    requests = [request(f"r{i}", tokens(5 + i, i), 1024, 0.0) for i in range(30)]
    first = trajectories(make_engine(BF16, c=SMALL, kv_tokens=40000, max_concurrent=16).generate(requests))
    shuffled = [requests[i] for i in np.random.default_rng(0).permutation(30)]
    engine = make_engine(BF16, c=SMALL, kv_tokens=40000, max_concurrent=12)
    second = trajectories(engine.generate(shuffled))
    assert engine.stats.peak_running == 12
    assert [name for name in first if first[name] != second[name]] == []
    assert len({ids for ids, _, _ in first.values()}) == 30
    assert {len(ids) for ids, _, _ in first.values()} == {1024}


# Moving numbers about is all that torch does in an exact forward; whatever computes is a kernel of ops/.
MOVES = {
    f"aten::{name}"
    for name in (
        "_to_copy", "_unsafe_view", "alias", "clone", "copy_", "detach", "empty", "empty_like", "index", "index_select",
        "lift_fresh", "slice", "split", "split_with_sizes", "t", "transpose", "unsqueeze", "view",
    )
}  # fmt: skip


def computed(called: Called) -> set[str]:
    """Ops on floating-point tensors that are not mere moves."""
    return {name for name, floats in called.ops if floats and name not in MOVES}


@pytest.mark.parametrize("ops", [EXACT, PLAIN], ids=["exact", "plain"])
def test_B_14_every_computation_goes_through_our_kernels(ops, dtype):
    """Prefill, decode of 3, 2 and 1 rows, sampling; scoring, the gradient forward. Plain ops show that it catches."""
    engine = Engine(build(config(), ops, dtype, trainable=False), kv_tokens=512)
    trainer = make_trainer(dtype)
    trainer.model = build(config(), ops, dtype)
    for model in (engine.model, trainer.model):
        model.reserve_positions(64)  # tables are built once, in fp64, outside any forward
    with Called() as rolled:
        samples = roll_out(engine, [request(f"r{i}", tokens(20 + i, i), 4 + 4 * i, 0.7 * i) for i in range(3)])
    with Called() as trained:
        trainer._forward(samples)
    with Called() as scored:
        trainer.score(samples)
    for called in (rolled, trained, scored):
        assert len(called.ops) > 20
        if ops.exact:
            assert computed(called) == set()
        else:
            assert computed(called) >= {"aten::mm", "aten::_log_softmax"}


@pytest.mark.parametrize("key", ["train.compile", "model.torch_compile", "rollout.compilation_config"])
def test_B_20_compiled_forwards_are_refused(key):
    assert "forwards are never compiled or swapped" in refusal(key, True)
    assert "forwards are never compiled or swapped" in refusal("model.attn_implementation", "flex_attention")


def test_B_21_zero_difference_is_a_gate_of_every_change():
    """The one-step check on the bundled model, compared exactly; CI runs the whole suite, so it runs this."""
    for dtype in ("float32", "bfloat16"):
        for result in launch.check("tiny", dtypes=[dtype], rungs=["engine_vs_trainer"]):
            assert (result.status, result.mismatched, result.detail) == ("pass", 0, ""), result
            assert result.compared > 100
    for dtype in (F32, BF16):
        (row,) = World(berry_tokenizer(), SamplingParams(8), dtype=dtype).run(1)
        assert row.metrics["train/train_rollout_logprob_abs_diff"] == row.metrics["train/logprob_abs_diff_max"] == 0.0
        assert row.metrics["train/logprob_mismatch_tokens"] == row.metrics["train/rescore_mismatch_tokens"] == 0
        assert row.metrics["train/logprob_compared_tokens"] == 96
    ci, recipe = (ROOT / ".ci/run").read_text(), (ROOT / "Makefile").read_text()
    assert re.search(r"^set -euo pipefail$", ci, re.M)
    assert re.search(r"^make test$", ci, re.M)
    assert re.search(r"^test:.*\n\t\$\(BIN\)/python -m pytest -n 2$", recipe, re.M)  # nothing is deselected


@pytest.mark.parametrize("op", ["embed", "layers.0.attention", "layers.1.swiglu", "norm"])
def test_B_21_the_gate_closes_for_one_ulp(op):
    """The gate's own mutation: one element a row, in one op of the engine, is one unit in the last place off."""
    world = World(berry_tokenizer(), SamplingParams(8))
    world.engine.see = one_ulp(op)
    with pytest.raises(ParityError, match="rollout and rescore logprob differ"):
        world.run(1)
    loose = World(berry_tokenizer(), SamplingParams(8), strict=False)
    loose.engine.see = one_ulp(op)
    (row,) = loose.run(1)
    assert row.metrics["train/logprob_mismatch_tokens"] > 0
    assert 0 < row.metrics["train/train_rollout_logprob_abs_diff"] < 1e-3  # any tolerance would let it pass


def prompts_of_case_23() -> list:
    return [request(f"r{i}", tokens(5 + i % 40, i), 128) for i in range(100)]


def test_B_23_100_prompts_of_128_tokens():
    """All 100 together, 7 at a time, scored one by one; decoded alone every fourth, as all of them take over 10 s."""
    requests = prompts_of_case_23()
    samples = roll_out(make_engine(c=SMALL, kv_tokens=20000), requests)
    together = {s.prompt_id: (s.token_ids, bit_list(s.logprobs)) for s in samples}
    assert {len(ids) for ids, _ in together.values()} == {128}
    for count, chosen in ((7, requests), (1, requests[::4])):
        engine = make_engine(c=SMALL, kv_tokens=20000, max_concurrent=count)
        for c in engine.generate(chosen):
            assert (c.token_ids, bit_list(c.logprobs)) == together[c.id], f"{c.id}, {count} at a time"
        assert engine.stats.peak_running == count
    scores = make_trainer(c=SMALL, max_tokens_per_microbatch=1).score(samples)
    assert [bit_list(lp) for lp in scores] == [together[r.id][1] for r in requests]


def test_B_23_the_first_divergence_is_named():
    """A fault that shows at token 125 of one prompt only: the message has sample, token, both values, what to run."""
    requests, trainer = prompts_of_case_23()[:5], make_trainer(c=SMALL)
    samples = roll_out(make_engine(c=SMALL, kv_tokens=20000), requests)
    samples[3].logprobs[125] = np.nextafter(samples[3].logprobs[125], np.float32(0))
    oracle = Oracle(strict=True, bisect_command="exactrl check model")
    oracle.begin(samples)
    token, position = samples[3].token_ids[125], len(requests[3].token_ids) + 125
    message = (
        rf"1 of 128 tokens of sample r3#0 .* response token 125 \(id {token}, position {position}\): rollout .*, train"
    )
    with pytest.raises(ParityError, match=message + r".* exactrl check model"):
        trainer.step(samples, audit=False, observe=oracle.observe)
    (layer,) = launch.check("tiny", dtypes=["bfloat16"], true_on_policy=False, rungs=["layer"])
    assert (layer.status, "layers." in layer.detail) == ("fail", True)  # the ladder names the op


@pytest.mark.parametrize("side", ["rollout", "train"])
@pytest.mark.parametrize("size", [2, 4])
def test_B_25_tensor_parallel_sizes_are_refused(side, size):
    text = refusal(f"{side}.tensor_parallel", size)
    assert (
        text == f"my.toml: {side}.tensor_parallel = {size} is not allowed: tensor parallelism is not built yet; use 1"
    )
    assert launch.plan(micro("runs/unused"))["layout"]["tensor_parallel"] == 1


@pytest.mark.parametrize("ops", [EXACT, PLAIN], ids=["exact", "plain"])
def test_B_26_prompts_of_one_to_three_tokens(ops, dtype):
    engine = Engine(build(config(), ops, dtype, trainable=False), kv_tokens=512)
    if ops.exact:  # the plain path multiplies what it does not attend to by 0
        engine.cache.fill(float("nan"))
    requests = [request(f"{n}/{t}", tokens(n, n), 12, t) for n in (1, 2, 3) for t in (1.0, 0.0)]
    samples = roll_out(engine, requests)
    assert all(np.isfinite(s.logprobs).all() and (s.logprobs <= 0).all() for s in samples)
    for r, s in zip(requests, samples, strict=True):
        assert len(s.token_ids) == 12
        if ops.exact:
            alone = Engine(build(config(), ops, dtype, trainable=False), kv_tokens=512).generate([r])
            assert trajectories(alone)[r.id][:2] == (tuple(s.token_ids), bit_list(s.logprobs))
    if ops.exact:
        scores = make_trainer(dtype).score(samples)
        assert [bit_list(lp) for lp in scores] == [bit_list(s.logprobs) for s in samples]
    samples[0].logprobs[0] = np.nan
    with pytest.raises(NonFiniteError, match="logprob nan"):
        make_trainer(dtype).step(samples[:3], audit=False, observe=unobserved)


def test_B_28_a_prompt_of_8192_tokens():
    """Prefix cache off; the cache is as large as was asked for, and one too small is named before any work."""
    prompt = request("long", tokens(8192, 0), 8)
    engine = make_engine(c=SMALL, kv_tokens=8208, prefix_cache=False)
    assert (engine.allocator.num_blocks, engine.scheduler.chunk_tokens) == (8208 // 16, 2048)
    samples = roll_out(engine, [prompt])
    assert (engine.allocator.num_blocks, engine.stats.prompt_tokens) == (8208 // 16, 8192)
    (score,) = make_trainer(c=SMALL).score(samples)
    assert bit_list(score) == bit_list(samples[0].logprobs)
    small = make_engine(c=SMALL, kv_tokens=4096, prefix_cache=False)
    with pytest.raises(
        RequestError, match=r"need 8199 KV tokens, but the whole cache holds 4096; raise rollout\.kv_to"
    ):
        small.generate([prompt])
    assert (small.stats.steps, small.allocator.num_blocks) == (0, 256)
