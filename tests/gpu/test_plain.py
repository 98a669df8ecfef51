"""Exactness off on the GPU: close to the exact kernels, not equal to them, and fit for a captured graph."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():  # before kernels are imported, which tests/ops/cuda wants to run interpreted
    pytest.skip("needs an H100 or H200", allow_module_level=True)
from exactrl.algo.algorithm import get_algorithm
from exactrl.contract import get_contract
from exactrl.engine.engine import Engine
from exactrl.ops.cuda.attention import AttentionRows
from exactrl.ops.cuda.plain import plain_ops
from exactrl.parity.subject import to_samples
from exactrl.train.trainer import Trainer
from tests.gpu.small_model import model_of, ops_of, requests_of

needs_fa3 = pytest.mark.skipif(find_spec("flash_attn_interface") is None, reason="needs Flash Attention 3")
HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64


def attention_inputs(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray]:
    """q of one row each, k and v pages, shuffled tables as wide as the longest of all tests needs."""
    g = torch.Generator("cuda").manual_seed(0)
    tables = np.random.default_rng(0).permutation(len(lengths) * 64).reshape(len(lengths), 64).astype(np.int32)
    size = (tables.size, PAGE, KV_HEADS, DIM)
    k, v = (torch.randn(size, generator=g, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(len(lengths), HEADS, DIM, generator=g, device="cuda", dtype=torch.bfloat16)
    return q, k, v, tables


def test_logprobs_are_close_to_the_exact_ones_and_not_the_same() -> None:
    exact, off = ops_of(), plain_ops(get_contract("exact-v1"))
    assert (exact.exact, off.exact) == (True, False)
    requests = requests_of([5, 64, 300, 700, 1500], 40)
    engine = Engine(model_of(off, peak=1.0), kv_tokens=8192, chunk_tokens=256)
    completions = engine.generate(requests)
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.num_captured > 0
    ours = np.concatenate([c.logprobs for c in completions])
    samples = to_samples(requests, completions)
    for ops, same in ((exact, False), (off, False)):
        scored = Trainer(model_of(ops, trainable=True, peak=1.0), get_algorithm("grpo"), lr=1e-3).score(samples)
        difference = np.abs(np.concatenate(scored) - ours)
        assert difference.mean() < 0.05, (ops.exact, float(difference.mean()))
        assert (difference.max() == 0) == same


@needs_fa3
def test_a_captured_graph_reads_new_lengths_at_replay() -> None:
    from exactrl.ops.cuda.plain import fa3_paged
    from exactrl.parity.gpu_timing import capture

    before, after = [70, 1, 1000, 3000], [4096, 513, 64, 65]
    q, k, v, tables = attention_inputs(before)
    ones = np.ones(len(before), np.int64)
    rows = AttentionRows.build(ones, np.array(before), tables, most_keys=np.full(len(before), 4096))
    out = torch.empty_like(q)

    def step(q: torch.Tensor) -> None:
        rows.refresh()
        out.copy_(fa3_paged(q, k, v, rows))

    graph = capture(step, [q], torch.cuda.graph_pool_handle())
    for lengths in (before, after):
        rows.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        assert (out.float() - causal(q, k, v, tables, lengths)).abs().max() < 0.02
    eager = fa3_paged(q, k, v, AttentionRows.build(ones, np.array(after), tables))
    assert (out.float() - eager.float()).abs().max() < 0.02


@needs_fa3
def test_decode_rows_beside_chunks() -> None:
    from exactrl.ops.cuda.plain import fa3_paged

    lengths, counts = [70, 300, 1000], [1, 300, 64]
    _, k, v, tables = attention_inputs(lengths)
    q = torch.randn(sum(counts), HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    out = fa3_paged(q, k, v, AttentionRows.build(np.array(counts), np.array(lengths), tables))
    last = np.cumsum(counts) - 1
    assert (out[last].float() - causal(q[last], k, v, tables, lengths)).abs().max() < 0.02


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: np.ndarray, lengths: list[int]) -> torch.Tensor:
    """fp32, the last row of each sequence."""
    outs = []
    for x, pages, length in zip(q, torch.from_numpy(tables).long().cuda(), lengths, strict=True):
        keys, values = (c[pages].flatten(0, 1)[:length].float().repeat_interleave(HEADS // KV_HEADS, 1) for c in (k, v))
        weights = (torch.einsum("hd,khd->hk", x.float(), keys) * DIM**-0.5).softmax(1)
        outs.append(torch.einsum("hk,khd->hd", weights, values))
    return torch.stack(outs)


def test_gradients_are_close_to_the_exact_ones() -> None:
    from exactrl.model.weights import unique_weights

    requests = requests_of([5, 64, 130], 12)
    gradients = []
    for ops in (ops_of(), plain_ops(get_contract("exact-v1"))):
        if not gradients:
            samples = to_samples(requests, Engine(model_of(ops, peak=1.0), kv_tokens=4096).generate(requests))
        trainer = Trainer(model_of(ops, trainable=True, peak=1.0), get_algorithm("grpo"), lr=0.0, grad_clip=1e9)
        logprobs, _, _ = trainer._forward(samples)
        (logprobs * torch.linspace(-1, 1, len(logprobs), device="cuda")).sum().backward()
        gradients.append([w.master.grad for w in unique_weights(trainer.model)])
    for i, (a, b) in enumerate(zip(*gradients, strict=True)):
        assert (a - b).norm() / a.norm() < 0.05, i
