"""The whole model on the GPU: the ladder of `exactrl check`, and faults that it must find."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exactrl.algo.algorithm import get_algorithm
from exactrl.engine.engine import Engine
from exactrl.launch.checking import subject_with
from exactrl.parity import check as ladder
from exactrl.parity.subject import to_samples
from exactrl.train.trainer import Trainer
from tests.gpu.small_model import model_of, ops_of, requests_of


@pytest.mark.parametrize(("k_leaves", "residual", "peak"), [(1, "bfloat16", 1.0), (2, "float32", 8.0)])
def test_the_ladder_passes(k_leaves: int, residual: str, peak: float) -> None:
    ops = ops_of(k_leaves=k_leaves, residual_dtype=residual)
    subject = subject_with(lambda trainable: model_of(ops, trainable=trainable, peak=peak), "bfloat16", 0)
    results = ladder.check([subject], None, lambda result: None)
    assert [r.name for r in results] == ladder.rungs_on("cuda")
    assert [(r.name, r.detail) for r in results if r.status == "fail"] == []
    assert {r.status for r in results} == {"pass"}
    assert min(r.compared for r in results) > 0


def scored_with(see) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Logprobs of the engine, and of a trainer whose ops `see` may change."""
    ops, requests = ops_of(), requests_of([5, 64, 300], 20)
    completions = Engine(model_of(ops), kv_tokens=4096).generate(requests)
    samples = to_samples(requests, completions)
    trainer = Trainer(model_of(ops, trainable=True), get_algorithm("grpo"), lr=1e-2)
    trainer.see = see
    return [c.logprobs for c in completions], trainer.score(samples)


@pytest.mark.parametrize("op", ["", "layers.0.qkv_proj", "layers.0.k", "layers.1.attention", "layers.1.swiglu", "norm"])
def test_one_ulp_in_one_op_is_found(op: str) -> None:
    def see(name: str, x: torch.Tensor) -> torch.Tensor:
        if name == op:
            x = x.clone()
            x.view(torch.int16).flatten(1)[:, 3] ^= 1
        return x

    ours, theirs = scored_with(see)
    same = [a.tobytes() == b.tobytes() for a, b in zip(ours, theirs, strict=True)]
    assert all(same) == (op == "")


def test_a_product_that_splits_k_is_found() -> None:
    ops, requests = ops_of(), requests_of([5, 64, 300], 20)
    completions = Engine(model_of(ops), kv_tokens=4096).generate(requests)
    samples = to_samples(requests, completions)

    def halves(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype, leaves: int = 1) -> torch.Tensor:
        k = x.shape[1] // 2
        parts = [ops.product(x[:, a : a + k].contiguous(), w[:, a : a + k].contiguous(), torch.float32, 1)
                 for a in (0, k)]  # fmt: skip
        return (parts[0] + parts[1]).to(out_dtype)

    other = type(ops)(ops.contract, halves, ops.attention)
    scored = Trainer(model_of(other, trainable=True), get_algorithm("grpo"), lr=1e-2).score(samples)
    assert [x.tobytes() for x in scored] != [c.logprobs.tobytes() for c in completions]


def test_gradients_are_those_of_fp64() -> None:
    """The whole model's against transformers-like plain torch in fp64 on the host: the CPU trainer's reference."""
    from exactrl.contract import get_contract
    from exactrl.model.qwen3 import Qwen3
    from exactrl.model.weights import load_weights, named_masters
    from exactrl.ops import Ops

    gpu = model_of(ops_of(), trainable=True, peak=1.0)
    cpu = Qwen3(gpu.config, Ops(get_contract("exact-v1"), exact=False), torch.float32, trainable=True)
    load_weights(cpu, ((name, w.cpu()) for name, w in named_masters(gpu)), "the GPU's masters")
    requests = requests_of([5, 64, 130], 12)
    completions = Engine(model_of(ops_of(), peak=1.0), kv_tokens=4096).generate(requests)
    samples = to_samples(requests, completions)
    gradients = []
    for model in (gpu, cpu):
        trainer = Trainer(model, get_algorithm("grpo"), lr=0.0, grad_clip=1e9)
        logprobs, _, batch = trainer._forward(samples)
        weights = torch.linspace(-1, 1, len(logprobs), dtype=torch.float64).to(logprobs.device)
        (logprobs.double() * weights).sum().backward()
        gradients.append({name: g for name, g in grads(model)})
    assert len(batch.lengths) == 3
    for name, ours in gradients[0].items():
        theirs = gradients[1][name].double()
        error = (ours.cpu().double() - theirs).norm() / theirs.norm()
        assert error < 0.06, (name, float(error))  # bfloat16 activations against float32


def grads(model):
    from exactrl.model.weights import unique_weights

    return [(i, w.master.grad) for i, w in enumerate(unique_weights(model))]


def test_two_runs_of_three_steps_end_in_the_same_weights() -> None:
    ends = []
    for _ in range(2):
        ops, requests = ops_of(), requests_of([5, 64, 300, 17], 16)
        trainer = Trainer(model_of(ops, trainable=True), get_algorithm("gspo"), lr=1e-3, minibatches=2)
        engine = Engine(model_of(ops), kv_tokens=4096)
        for _ in range(3):
            engine.load_weights(trainer.named_weights(), trainer.version)
            completions = engine.generate(requests)
            samples = to_samples(requests, completions)
            trainer.step(samples, audit=False, observe=lambda *seen: None)
        assert engine.load_weights(trainer.named_weights(), trainer.version) == trainer.compute_digest()
        ends.append(trainer.master_digest())
    assert ends[0] == ends[1]
