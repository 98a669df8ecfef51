"""The trainer with the supervised loss: right gradients, response tokens only, no rollout logprobs, repeatable."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from exactrl.algo.sft import SFT
from exactrl.errors import NonFiniteError
from exactrl.model.weights import named_masters, places, refresh
from exactrl.tasks.supervised import NO_LOGPROBS, NO_VERSION
from exactrl.train.trainer import Trainer
from exactrl.types import Sample
from tests.model.test_qwen3 import build, config
from tests.ops.helpers import same_bits
from tests.train.helpers import captured_gradients, one_torch_thread, tokens, unobserved  # noqa: F401

SHAPES = [(4, 6), (1, 1), (30, 9), (2, 41), (7, 1)]  # prompt and response lengths


def example(prompt: list[int], response: list[int]) -> Sample:
    return Sample("made", 0, tuple(prompt), response, NO_LOGPROBS, "stop", NO_VERSION, 1.0)


@pytest.fixture(scope="module")
def examples() -> list[Sample]:
    return [example(tokens(p, 2 * i), tokens(r, 2 * i + 1)) for i, (p, r) in enumerate(SHAPES)]


def make(dtype: torch.dtype = torch.float32, **settings) -> Trainer:
    settings = {"lr": 1e-2, "grad_clip": 1e9, **settings}
    return Trainer(build(config(), dtype=dtype, trainable=True), SFT, **settings)


def reference(trainer: Trainer, examples: list[Sample], aggregation: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by transformers' model and cross entropy in fp64, one example at a time."""
    skip = ("architectures", "model_type")
    c = transformers.Qwen3Config(**{k: v for k, v in trainer.model.config.to_json().items() if k not in skip})
    model = transformers.Qwen3ForCausalLM(c).double()
    model.load_state_dict({name: t.double() for name, t in named_masters(trainer.model)})
    count = sum(len(e.token_ids) for e in examples)
    total = 0.0
    for e in examples:
        ids = torch.tensor([[*e.prompt_token_ids, *e.token_ids]])
        logits = model(ids).logits[0, len(e.prompt_token_ids) - 1 : -1]
        nats = torch.nn.functional.cross_entropy(logits, torch.tensor(e.token_ids), reduction="sum")
        loss = nats / count if aggregation == "token-mean" else nats / len(e.token_ids) / len(examples)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
@pytest.mark.parametrize("budget", [16, 8192])
def test_loss_and_gradients_are_those_of_fp64_cross_entropy(examples, aggregation, budget):
    trainer = make(loss_aggregation=aggregation, max_tokens_per_microbatch=budget)
    loss, expected = reference(trainer, examples, aggregation)
    gradients = captured_gradients(trainer)
    where = {id(m): name for name, m in trainer.model.named_modules()}
    metrics = trainer.step(examples, audit=False, observe=unobserved)
    assert abs(metrics["train/loss"] - loss) < 1e-5
    for name, weight, first, rows in places(trainer.model):
        ours = gradients[0][where[id(weight)] + ".master"][first : first + rows].double()
        error = (ours - expected[name]).abs().max() / expected[name].abs().max()
        assert error < 2e-5, f"{name}: {error:.2e}"
    norm = math.sqrt(sum(float((g**2).sum()) for g in expected.values()))
    assert abs(metrics["train/grad_norm"] - norm) < 1e-4 * norm


def test_the_gradient_is_the_slope_of_the_loss(examples):
    """Along the gradient the loss rises by its squared norm: a central difference of the trainer's own loss."""
    trainer = make()
    gradients = captured_gradients(trainer)
    trainer.step(examples, audit=False, observe=unobserved)
    gradient = gradients[0]
    size = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradient.values()))
    losses = []
    for sign in (1, -1):
        moved = make(lr=0.0)
        with torch.no_grad():
            for name, p in moved.model.named_parameters():
                p += sign * 1e-2 * gradient[name] / size
        refresh(moved.model)
        losses.append(moved.step(examples, audit=False, observe=unobserved)["train/loss"])
    assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(size, rel=1e-3)


def test_only_response_tokens_are_learnt():
    """An id that occurs in prompts alone gets gradient in the head only from being unlikely, never from being a target;
    one that is a target gets a large negative one."""
    prompt_only, target = 90, 91
    pair = [example([prompt_only] * 6, [target, 5]), example([3, prompt_only], [target])]
    trainer = make()
    gradients = captured_gradients(trainer)
    loss = trainer.step(pair, audit=False, observe=unobserved)["train/loss"]
    scores = np.concatenate(make().score(pair))
    assert len(scores) == 3
    assert loss == pytest.approx(-scores.astype(np.float64).mean(), rel=1e-6)
    head = gradients[0]["head.master"]
    assert head[target].norm() > 5 * head[prompt_only].norm() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_logprobs_are_needed_or_made(examples, dtype):
    """Those that samples happen to have change nothing, and no pass recomputes them."""
    lied = [replace(e, logprobs=np.full(len(e.token_ids), np.nan, np.float32)) for e in examples]
    found = []
    for rows, recompute in ((examples, False), (lied, False), (examples, True)):
        trainer = make(dtype, recompute_old_logprobs=recompute)
        trainer.score = None  # type: ignore[assignment]
        metrics = trainer.step(rows, audit=False, observe=unobserved)
        found.append((metrics, trainer.master_digest(), trainer.compute_digest()))
    assert found[0] == found[1] == found[2]
    assert set(found[0][0]) == {"train/loss", "train/entropy", "train/grad_norm", "train/lr"}  # nothing can be clipped


def test_a_split_changes_gradients_within_rounding_and_a_repetition_no_bit(examples):
    def gradients(budget):
        trainer = make(max_tokens_per_microbatch=budget)
        found = captured_gradients(trainer)
        trainer.step(examples, audit=False, observe=unobserved)
        return found[0]

    whole, again, split = gradients(8192), gradients(8192), gradients(16)
    for name, gradient in whole.items():
        assert same_bits(gradient, again[name]), name
        error = (gradient - split[name]).abs().max() / gradient.abs().max()
        assert error < 1e-5, f"{name}: {error:.2e}"


def test_it_learns_by_heart(examples):
    trainer = make(lr=1e-2, grad_clip=1.0)
    losses = [trainer.step(examples, audit=False, observe=unobserved)["train/loss"] for _ in range(40)]
    assert losses[-1] < 0.05 < 1 < losses[0]


def test_a_broken_weight_stops_before_an_update(examples):
    trainer = make()
    with torch.no_grad():
        trainer.model.norm.master[3] = math.nan
    refresh(trainer.model)
    before = trainer.master_digest()
    with pytest.raises(NonFiniteError, match="response token 0"):
        trainer.step(examples, audit=False, observe=unobserved)
    assert trainer.master_digest() == before
