"""Faults of other frameworks (docs/cases.md, group B) that GPU kernels could have, at sizes where they were seen."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from exactrl.engine.engine import Engine
from exactrl.parity.compare import Tally, differing
from tests.gpu.small_model import model_of, ops_of, requests_of

BF16 = torch.bfloat16


def spiky(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    """Outliers of both signs, so that the order of a sum matters."""
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, generator=g, device="cuda")
    return torch.where(torch.rand(shape, generator=g, device="cuda") < 0.02, 40 * x, x).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not differing(a, b).any()


def equal(a, b) -> None:
    tally = Tally()
    tally.trajectories(a, b, "")
    assert tally.compared > 0
    assert (tally.mismatched, tally.first) == (0, "")


@pytest.mark.parametrize("hidden", [1024, 2560, 4096])
def test_B_01_norm_across_256_rows(hidden: int) -> None:
    from exactrl.ops.cuda.norm import add_rms_norm, rms_norm

    h, x, w = spiky(4096, hidden), spiky(4096, hidden, seed=1), spiky(hidden, seed=2)
    whole, (total, normed) = rms_norm(h, w, 1e-6), add_rms_norm(h, x, w, 1e-6)
    for rows in (1, 4, 255, 256, 257):
        assert same(rms_norm(h[:rows], w, 1e-6), whole[:rows])
        a, b = add_rms_norm(h[:rows], x[:rows], w, 1e-6)
        assert same(a, total[:rows])
        assert same(b, normed[:rows])


def test_B_06_split_attention_without_grouped_heads() -> None:
    from exactrl.contract import AttentionShape
    from exactrl.ops.cuda.attention import attention_implementations
    from tests.gpu.attention_inputs import draw, run

    data = draw([1, 513, 700, 2100, 64, 511, 1024, 3000], 16, 16, 128, 64, 4.0, 0)
    found = attention_implementations()
    out, lse = run(found["reference"], data.q, data.k, data.v, data.packed())
    shape, every = AttentionShape(16, 16, 128, 64), np.arange(len(data.lengths))
    served = [i for i in found.values() if i.serves(shape)]
    assert {i.kind for i in served} == {"split", "in_order"}
    for implementation in served:
        counts = data.lengths if implementation.kind == "in_order" else np.ones_like(data.lengths)
        number, rows = data.last(counts, data.lengths, every)
        number = torch.from_numpy(number).cuda()
        found_out, found_lse = run(implementation, data.q[number], data.k_pages, data.v_pages, rows)
        assert same(found_out, out[number]), implementation.name
        assert same(found_lse, lse[:, number]), implementation.name


def test_B_08_cached_prefixes_around_a_page() -> None:
    ops = ops_of()
    page, model = ops.page_size, model_of(ops)
    for n in (page - 1, page, page + 1, 2 * page):
        requests = requests_of([n + 9, n + 1, n + 30, n], 8, common=n)
        cold = Engine(model, kv_tokens=8192, prefix_cache=False).generate(requests)
        engine = Engine(model, kv_tokens=8192, max_concurrent=1)
        equal(engine.generate(requests), cold)
        equal(engine.generate(requests), cold)
        assert engine.stats.cached_tokens > 0


def test_B_09_cold_and_warm_prefill() -> None:
    engine, requests = Engine(model_of(ops_of()), kv_tokens=8192), requests_of([400], 16)
    cold = engine.generate(requests)
    warm = engine.generate(requests)
    assert warm[0].num_cached_tokens > 0
    engine.reset_cache()
    equal(warm, cold)
    equal(engine.generate(requests), cold)


def test_B_13_long_greedy_generations() -> None:
    model, requests = model_of(ops_of()), requests_of(np.arange(1, 31).tolist(), 1024, 0.0)
    whole = Engine(model, max_concurrent=16, kv_tokens=65536).generate(requests)
    equal(Engine(model, max_concurrent=12, kv_tokens=65536).generate(requests[::-1])[::-1], whole)


@pytest.mark.parametrize(("k", "n"), [(1024, 3072), (2560, 9728)])
def test_B_15_another_kernel_for_one_row(k: int, n: int) -> None:
    """Every implementation but cuBLAS, of which nobody says that it passes."""
    from exactrl.contract import LinearShape
    from exactrl.ops.cuda.matmul import implementations

    x, w = spiky(64, k), spiky(n, k, seed=1) / math.sqrt(k)
    found = implementations()
    expected = found["reference"].product(x, w, BF16, 1)
    for name, implementation in found.items():
        for m in (1, 2, 3, 8, 64):
            if name != "cublas" and implementation.serves(LinearShape(n, k), m):
                assert same(implementation.product(x[:m], w, BF16, 1), expected[:m]), (name, m)


def test_B_17_swiglu_is_one_implementation() -> None:
    """In training, where gradients flow, and in the engine, where none do."""
    from exactrl.ops.cuda.swiglu import swiglu

    x = spiky(300, 2 * 3072)
    assert same(swiglu(x.clone().requires_grad_()).detach(), swiglu(x))
    assert same(swiglu(x[5:9].contiguous()), swiglu(x)[5:9])


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_B_18_sampler_and_loss(dtype: torch.dtype) -> None:
    from exactrl.ops.cuda.head import logprobs_exact
    from exactrl.ops.cuda.sampling import sample_exact

    logits = (4 * spiky(4, 151936, dtype=torch.float32)).to(dtype).float()
    eye = torch.eye(4, device="cuda", dtype=torch.float32)
    keys, temperatures = torch.arange(1, 5, device="cuda"), torch.tensor([1.0, 0.7, 1.3, 0.0], device="cuda")
    for draw in range(8):
        tokens, sampled, _ = sample_exact(logits, temperatures, keys, torch.full_like(keys, draw))
        scored, _ = logprobs_exact(
            eye, logits.T.contiguous(), tokens, torch.where(temperatures == 0, 1.0, temperatures),
            lambda x, w, out_dtype, leaves=1: logits,
        )  # fmt: skip
        assert same(scored, sampled)


def test_B_23_a_hundred_prompts_one_at_a_time() -> None:
    """The whole hundred together, every fifth alone."""
    model = model_of(ops_of())
    requests = requests_of(np.random.default_rng(0).integers(1, 200, 100).tolist(), 128)
    together = Engine(model, max_concurrent=100, kv_tokens=65536).generate(requests)
    equal(Engine(model, max_concurrent=1, kv_tokens=65536).generate(requests[::5]), together[::5])


def test_B_26_prompts_of_one_to_three_tokens() -> None:
    found = Engine(model_of(ops_of()), kv_tokens=8192).generate(requests_of([1, 2, 3], 8))
    assert all(np.isfinite(c.logprobs).all() for c in found)
    alone = [Engine(model_of(ops_of()), kv_tokens=8192).generate([r])[0] for r in requests_of([1, 2, 3], 8)]
    equal(alone, found)


def test_B_28_one_long_prompt() -> None:
    engine = Engine(model_of(ops_of()), kv_tokens=16384, prefix_cache=False)
    requests = requests_of([8192], 4)
    whole = engine.generate(requests)
    pieces = Engine(model_of(ops_of()), kv_tokens=16384, chunk_tokens=500, prefix_cache=False).generate(requests)
    equal(pieces, whole)


@pytest.mark.parametrize("vocab", [40960, 151936])
def test_B_30_log_softmax_with_outliers(vocab: int) -> None:
    from exactrl.ops.cuda.triton_logprob import blocks, logprob_digests, merge

    logits = spiky(2048, vocab, dtype=torch.float32)
    temperatures, targets = torch.ones(2048, device="cuda"), torch.arange(2048, device="cuda") * 19
    whole = merge(blocks(logits, temperatures), logits, temperatures, targets)
    digests = logprob_digests(logits, temperatures, whole[1])
    for i in range(0, 2048, 205):
        one = slice(i, i + 1)
        found = merge(blocks(logits[one], temperatures[one]), logits[one], temperatures[one], targets[one])
        assert same(found[0], whole[0][one])
        assert same(found[1], whole[1][one])
        assert same(logprob_digests(logits[one], temperatures[one], found[1]), digests[one])
