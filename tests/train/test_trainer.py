"""The trainer: its forwards give the rollout's bits in any micro-batch; its gradients are right and repeatable."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers

from exactrl.errors import NonFiniteError, ParityError, UsageError
from exactrl.model.weights import compute_digest, named_masters, places
from exactrl.ops import Ops
from exactrl.ops.cpu.jit import forced_threads
from exactrl.parity.oracle import Oracle
from exactrl.sync.memory import sync
from exactrl.train.packing import MicroBatch, pack
from exactrl.types import Sample
from tests.model.test_qwen3 import config
from tests.ops.helpers import CONTRACT, make_weight, same_bits
from tests.train.helpers import (
    Recorder,
    bit_list,
    captured_gradients,
    make_engine,
    make_trainer,
    one_torch_thread,  # noqa: F401
    one_ulp,
    recorded,
    request,
    roll_out,
    tokens,
    unobserved,
    workload,
)

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=DTYPES, ids=["fp32", "bf16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def samples(dtype) -> list[Sample]:
    """Rolled out under preemption, chunked, with prefix hits: everything that must not matter."""
    engine = make_engine(dtype, kv_tokens=160, chunk_tokens=50)
    return roll_out(engine, workload())


def sample(prompt: list[int], response: list[int], *, advantage: float = 1.0, temperature: float = 1.0) -> Sample:
    logprobs = np.full(len(response), -2.0, np.float32)
    return Sample("made", 0, tuple(prompt), response, logprobs, "length", 0, temperature, advantage=advantage)


@pytest.mark.parametrize("budget", [64, 200, 8192])
def test_rollout_score_and_gradient_forward_agree(dtype, samples, budget):
    trainer = make_trainer(dtype, max_tokens_per_microbatch=budget)
    scored = {s.name: bit_list(lp) for s, lp in zip(samples, trainer.score(samples), strict=True)}
    assert scored == recorded(samples)
    recorder = Recorder()
    trainer.step(samples, audit=True, observe=recorder)
    assert recorder.seen["train"] == recorder.seen["rescore"] == recorded(samples)
    assert recorder.versions == {0}


def test_scores_of_single_samples_and_of_any_order_agree(dtype, samples):
    trainer = make_trainer(dtype)
    for s in samples:
        (alone,) = trainer.score([s])
        assert bit_list(alone) == bit_list(s.logprobs)
    for s, again in zip(samples[::-1], trainer.score(samples[::-1]), strict=True):
        assert bit_list(again) == bit_list(s.logprobs)


def test_threads_change_no_bit_of_a_score(dtype, samples):
    trainer, before = make_trainer(dtype), torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            with forced_threads(threads):
                scores = trainer.score(samples)
        finally:
            torch.set_num_threads(before)
        assert [bit_list(lp) for lp in scores] == [bit_list(s.logprobs) for s in samples]


def test_parity_holds_after_updates(dtype):
    trainer, engine = make_trainer(dtype, max_tokens_per_microbatch=200), make_engine(dtype, kv_tokens=320)
    digests, seen = [trainer.master_digest()], []
    for step in range(4):
        assert sync(trainer, engine) == trainer.compute_digest()
        samples = roll_out(engine, workload())
        assert {s.weight_version for s in samples} == {step}
        oracle, recorder = Oracle(strict=True, bisect_command="check"), Recorder()
        oracle.begin(samples)
        trainer.step(samples, audit=False, observe=recorder)
        assert recorder.seen["train"] == recorded(samples)
        assert recorder.versions == {step}
        digests.append(trainer.master_digest())
        seen.append(tuple(recorded(samples).items()))
    assert len(set(digests)) == 5
    assert len(set(seen)) == 4


def test_a_one_ulp_fault_on_either_side_is_seen(dtype, samples):
    faulty = make_trainer(dtype, see=one_ulp("layers.1.swiglu"))
    recorder = Recorder()
    faulty.step(samples, audit=True, observe=recorder)
    for kind in ("train", "rescore"):
        assert recorder.seen[kind] != recorded(samples)


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_panels_that_went_stale_are_noticed(dtype, side):
    """Kernels read packed panels, and the digest is theirs: right weights beside wrong panels cannot pass."""
    trainer, engine = make_trainer(dtype), make_engine(dtype)
    sync(trainer, engine)
    model = trainer.model if side == "trainer" else engine.model
    before = compute_digest(model)
    weight = model.layers[1].down
    weight.panels[3] += 1
    assert compute_digest(model) != before
    if side == "trainer":
        with pytest.raises(ParityError, match="kernels read"):
            sync(trainer, engine)
    else:
        assert sync(trainer, engine) == before  # loading packs anew


def test_A_09_temperature_is_applied():
    """Logits [2, 1, 0] at T = 0.7: log_softmax is -0.260118 (unscaled -0.407606), in sampler and loss the same bits."""
    ops = Ops(CONTRACT)
    weight = make_weight((3, 3), torch.float32, torch.Generator(), trainable=True)
    weight.assign(torch.eye(3))
    hidden, temperatures = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0.7])
    logprobs, _ = ops.logprobs(hidden, weight, torch.tensor([0]), temperatures)
    assert abs(float(logprobs.detach()[0]) - -0.260118) < 1e-6
    draws = {}
    for key in range(100):
        token, lp = ops.sample(hidden, weight, temperatures, torch.tensor([key]), torch.tensor([1]))
        draws[int(token)] = lp
    assert same_bits(draws[0], logprobs)
    (gradient,) = torch.autograd.grad(logprobs.sum(), weight.master)
    p = torch.softmax(hidden[0] / 0.7, -1)
    expected = (torch.tensor([1.0, 0.0, 0.0]) - p)[:, None] * hidden / 0.7
    assert (gradient - expected).abs().max() < 1e-6


def test_A_33_positions_restart_for_each_packed_sample(dtype):
    twin = sample(tokens(4, 0), tokens(6, 1))
    trainer = make_trainer(dtype)
    batch = MicroBatch.build([twin, twin], trainer.model.shape, trainer.model.ops)
    assert batch.positions.tolist() == [*range(9), *range(9)]  # the last of 10 tokens is predicted, never an input
    assert batch.predict.tolist() == [*range(3, 9), *range(12, 18)]
    assert batch.sequence_ids.tolist() == [0] * 6 + [1] * 6
    first, second = trainer.score([twin, replace(twin, sample_index=1)])
    (alone,) = trainer.score([twin])
    assert bit_list(first) == bit_list(second) == bit_list(alone)


@pytest.mark.parametrize("eos", [0, 5])
def test_A_18_a_pad_that_equals_eos_changes_nothing(eos):
    """Responses of 4 (ends with eos) and 7 tokens; the prompts hold the pad id 0. Lengths decide, ids never."""
    pair = [sample([0, 0, 7], [1, 2, 3, eos]), sample([9, 0, 8], [4, 0, 6, 11, 0, 12, 13])]
    trainer = make_trainer(max_tokens_per_microbatch=64)
    batch = MicroBatch.build(pair, trainer.model.shape, trainer.model.ops)
    assert batch.targets.tolist() == [1, 2, 3, eos, 4, 0, 6, 11, 0, 12, 13]
    scores = trainer.score(pair)
    assert [len(s) for s in scores] == [4, 7]
    other = trainer.score([replace(pair[0], prompt_token_ids=(0, 1, 7)), pair[1]])
    assert bit_list(other[0]) != bit_list(scores[0])  # a pad id in a prompt is attended to
    assert bit_list(other[1]) == bit_list(scores[1])
    gradients = captured_gradients(trainer)
    trainer.step([replace(s, logprobs=lp) for s, lp in zip(pair, scores, strict=True)], audit=False, observe=unobserved)
    head = gradients[0]["head.master"]
    assert head[eos].abs().max() > 0.01  # the eos token is learnt


def reference_gradients(trainer, samples: list[Sample], aggregation: str) -> dict[str, torch.Tensor]:
    """fp64 autograd through transformers' model, one sample at a time; on-policy, so every ratio is 1."""
    skip = ("architectures", "model_type")
    c = transformers.Qwen3Config(**{k: v for k, v in trainer.model.config.to_json().items() if k not in skip})
    model = transformers.Qwen3ForCausalLM(c).double()
    model.load_state_dict({name: t.double() for name, t in named_masters(trainer.model)})
    count = sum(len(s.token_ids) for s in samples)
    for s in samples:
        ids = torch.tensor([[*s.prompt_token_ids, *s.token_ids]])
        logits = model(ids).logits[0, len(s.prompt_token_ids) - 1 : -1] / s.temperature
        logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(s.token_ids)[:, None])
        weight = 1 / count if aggregation == "token-mean" else 1 / (len(samples) * len(s.token_ids))
        (-s.advantage * weight * logprobs.sum()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
@pytest.mark.parametrize("budget", [64, 8192])
def test_gradients_are_those_of_fp64_autograd(aggregation, budget):
    trainer = make_trainer(loss_aggregation=aggregation, max_tokens_per_microbatch=budget, grad_clip=1e9)
    samples = roll_out(make_engine(), workload())
    reference = reference_gradients(trainer, samples, aggregation)
    gradients = captured_gradients(trainer)
    where = {id(m): name for name, m in trainer.model.named_modules()}
    metrics = trainer.step(samples, audit=False, observe=unobserved)
    for name, weight, first, rows in places(trainer.model):
        ours = gradients[0][where[id(weight)] + ".master"][first : first + rows].double()
        error = (ours - reference[name]).abs().max() / reference[name].abs().max()
        assert error < 2e-5, f"{name}: {error:.2e}"
    norm = math.sqrt(sum(float((g**2).sum()) for g in reference.values()))
    assert abs(metrics["train/grad_norm"] - norm) < 1e-4 * norm


def test_entropy_bonus_and_constant_length_gradients_are_those_of_fp64_autograd():
    """Equal rewards, so that the bonus is all there is: -0.3 x the entropies' sum / (4 responses x 40 tokens)."""
    samples = [replace(s, advantage=0.0) for s in roll_out(make_engine(), workload()[::5])]
    trainer = make_trainer(
        loss_aggregation="constant-length", max_new_tokens=40, entropy_coef=0.3, max_tokens_per_microbatch=130,
        grad_clip=1e9,
    )  # fmt: skip
    skip = ("architectures", "model_type")
    c = transformers.Qwen3Config(**{k: v for k, v in trainer.model.config.to_json().items() if k not in skip})
    model = transformers.Qwen3ForCausalLM(c).double()
    model.load_state_dict({name: t.double() for name, t in named_masters(trainer.model)})
    total = 0.0
    for s in samples:
        logits = model(torch.tensor([[*s.prompt_token_ids, *s.token_ids]])).logits[0, len(s.prompt_token_ids) - 1 : -1]
        lp = torch.log_softmax(logits / s.temperature, -1)
        loss = 0.3 * (lp.exp() * lp).sum() / (len(samples) * 40)
        loss.backward()
        total += loss.item()
    reference = {name: p.grad for name, p in model.named_parameters()}
    gradients = captured_gradients(trainer)
    where = {id(m): name for name, m in trainer.model.named_modules()}
    metrics = trainer.step(samples, audit=False, observe=unobserved)
    assert abs(metrics["train/loss"] - total) < 1e-5
    for name, weight, first, rows in places(trainer.model):
        ours = gradients[0][where[id(weight)] + ".master"][first : first + rows].double()
        error = (ours - reference[name]).abs().max() / reference[name].abs().max()
        assert error < 2e-5, f"{name}: {error:.2e}"


def test_the_learning_rate_follows_the_step_and_is_reported():
    """Two minibatches share a step's rate; without momentum an update moves a weight by lr wherever it moves it."""
    trainer = make_trainer(minibatches=2, lr_at=lambda step: step / 1024, betas=(0.0, 0.0))
    samples = [sample(tokens(4, 0), tokens(6, 1)), sample(tokens(4, 2), tokens(6, 3))]
    for step in (1, 2, 3):
        before = [p.detach().clone() for p in trainer.parameters]
        assert trainer.step(samples, audit=False, observe=unobserved)["train/lr"] == step / 1024
        moved = max(float((p.detach() - b).abs().max()) for p, b in zip(trainer.parameters, before, strict=True))
        assert moved * 1024 == pytest.approx(2 * step, rel=1e-2)


def step_gradients(samples, **settings) -> dict[str, torch.Tensor]:
    trainer = make_trainer(grad_clip=1e9, **settings)
    gradients = captured_gradients(trainer)
    trainer.step(samples, audit=False, observe=unobserved)
    return gradients[0]


def test_gradients_do_not_depend_on_the_split_and_repeat_bit_for_bit():
    samples = roll_out(make_engine(), workload())
    whole, again = (step_gradients(samples, max_tokens_per_microbatch=8192) for _ in range(2))
    split = step_gradients(samples, max_tokens_per_microbatch=130)
    for name, gradient in whole.items():
        assert same_bits(gradient, again[name]), name
        error = (gradient - split[name]).abs().max() / gradient.abs().max()
        assert error < 1e-5, f"{name}: {error:.2e}"


def test_two_trainers_stay_equal_bit_for_bit(dtype, samples):
    a, b = make_trainer(dtype), make_trainer(dtype)
    for _ in range(2):
        assert a.step(samples, audit=False, observe=unobserved) == b.step(samples, audit=False, observe=unobserved)
    assert (a.master_digest(), a.compute_digest()) == (b.master_digest(), b.compute_digest())


@pytest.mark.parametrize(("audit", "minibatches"), [(False, 1), (False, 2), (True, 4)])
def test_minibatches(samples, dtype, audit, minibatches):
    trainer = make_trainer(dtype, minibatches=minibatches, max_tokens_per_microbatch=200)
    oracle = Oracle(strict=True, bisect_command="check")
    oracle.begin(samples)
    trainer.step(samples, audit=audit, observe=oracle.observe)
    assert trainer.version == minibatches
    metrics = oracle.metrics()
    lengths = [len(s.token_ids) for s in samples]
    observed = sum(lengths) if audit else sum(lengths[: len(lengths) // minibatches])
    assert metrics["train/logprob_compared_tokens"] == observed
    assert metrics["train/logprob_uncompared_tokens"] == sum(lengths) - observed
    assert metrics["train/train_rollout_logprob_abs_diff"] == 0
    assert metrics.get("train/rescore_mismatch_tokens") == (0 if audit else None)


def test_later_minibatches_are_trained_on(dtype, samples):
    """Half the samples per update: two updates from the second half's gradients too, not one update twice."""
    trainer = make_trainer(dtype, minibatches=2, grad_clip=1e9)
    gradients = captured_gradients(trainer)
    trainer.step(samples, audit=False, observe=unobserved)
    halves = []
    for half in (samples[:8], samples[8:]):
        alone = make_trainer(dtype, grad_clip=1e9)
        found = captured_gradients(alone)
        alone.step(half, audit=False, observe=unobserved)
        halves.append(found[0])
    assert len(gradients) == 2
    assert all(same_bits(gradients[0][name], halves[0][name]) for name in halves[0])
    assert not all(same_bits(gradients[1][name], halves[1][name]) for name in halves[1])  # other weights by then
    tops = [float(torch.nn.functional.cosine_similarity(gradients[1]["head.master"].flatten(),
                                                        h["head.master"].flatten(), 0)) for h in halves]  # fmt: skip
    assert tops[1] > tops[0]


def test_A_58_lr_0_never_drifts(dtype):
    trainer, engine = make_trainer(dtype, lr=0.0), make_engine(dtype, kv_tokens=320)
    digests = {trainer.master_digest(), trainer.compute_digest()}
    oracle = Oracle(strict=True, bisect_command="check")
    for step in range(200):
        digests.add(sync(trainer, engine))
        samples = roll_out(engine, [request(f"{step}/{i}", tokens(5 + i, i), 3) for i in range(2)])
        oracle.begin(samples)
        trainer.step(samples, audit=step % 50 == 0, observe=oracle.observe)
        metrics = oracle.metrics()
        assert metrics["train/logprob_compared_tokens"] == 6
        assert metrics["train/logprob_abs_diff_max"] == metrics["train/logprob_mismatch_tokens"] == 0
        digests.add(trainer.master_digest())
    assert len(digests) == 2
    assert trainer.version == 200


def test_gradients_are_clipped_to_the_norm(samples, dtype):
    free, clipped = make_trainer(dtype, grad_clip=1e9), make_trainer(dtype, grad_clip=0.01)
    found = [captured_gradients(t) for t in (free, clipped)]
    norms = [t.step(samples, audit=False, observe=unobserved)["train/grad_norm"] for t in (free, clipped)]
    assert norms[0] == norms[1] > 0.01  # the norm before clipping is what is logged
    size = [math.sqrt(sum(float((g.double() ** 2).sum()) for g in f[0].values())) for f in found]
    assert abs(size[0] - norms[0]) < 1e-5 * norms[0]
    assert abs(size[1] - 0.01) < 1e-6
    for name, gradient in found[0][0].items():
        assert torch.allclose(gradient * (0.01 / norms[0]), found[1][0][name], rtol=1e-3, atol=1e-12)


class Poison:
    """A probe that does nothing until `kind` is set: "forward" makes a hidden state NaN, "backward" a gradient."""

    kind = ""

    def __call__(self, name, x):
        if name == "norm" and self.kind == "forward":
            return x + torch.where(torch.arange(len(x)) == len(x) - 1, float("nan"), 0.0)[:, None].to(x.dtype)
        if name == "norm" and self.kind == "backward" and x.requires_grad:
            x = x.clone()
            x.register_hook(lambda g: g * float("nan"))
        return x


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_nan_stops_the_update_and_leaves_the_trainer_usable(dtype, samples, kind):
    poison = Poison()
    trainer = make_trainer(dtype, see=poison, max_tokens_per_microbatch=300)
    before = trainer.master_digest(), trainer.compute_digest()
    poison.kind = kind
    with pytest.raises(NonFiniteError, match="gradient" if kind == "backward" else "logprob nan"):
        trainer.step(samples, audit=False, observe=unobserved)
    assert (trainer.master_digest(), trainer.compute_digest()) == before
    assert trainer.version == 0
    poison.kind = ""
    recorder = Recorder()
    metrics = trainer.step(samples, audit=False, observe=recorder)
    assert recorder.seen["train"] == recorded(samples)
    fresh = make_trainer(dtype, max_tokens_per_microbatch=300)
    assert fresh.step(samples, audit=False, observe=unobserved) == metrics  # nothing of the failed step is left
    assert fresh.master_digest() == trainer.master_digest()


def test_an_observer_that_raises_stops_the_step_before_weights_change(dtype, samples):
    trainer = make_trainer(dtype, max_tokens_per_microbatch=200)
    before = trainer.master_digest()
    calls = []

    def observe(kind, version, observed, logprobs):
        calls.append(kind)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.step(samples, audit=False, observe=observe)
    assert (trainer.master_digest(), trainer.version) == (before, 0)
    trainer.step(samples, audit=False, observe=unobserved)
    fresh = make_trainer(dtype, max_tokens_per_microbatch=200)
    fresh.step(samples, audit=False, observe=unobserved)
    assert fresh.master_digest() == trainer.master_digest()


def with_logprob(s: Sample, i: int, value: float) -> Sample:
    logprobs = s.logprobs.copy()
    logprobs[i] = value
    return replace(s, logprobs=logprobs)


def test_A_53_nothing_broken_counts_as_on_policy():
    good = roll_out(make_engine(), [request(f"r{i}", tokens(5, i), 6) for i in range(3)])
    for value in (float("nan"), float("-inf")):
        trainer = make_trainer()
        before = trainer.master_digest()
        with pytest.raises(NonFiniteError):
            trainer.step([with_logprob(good[1], 2, value), *good[:1]], audit=False, observe=unobserved)
        assert trainer.master_digest() == before
    far = with_logprob(replace(good[1], advantage=1.0), 2, float(good[1].logprobs[2]) - 90)
    metrics = make_trainer().step([far], audit=False, observe=unobserved)
    assert metrics["train/pg_clipfrac"] == 1 / 6  # clipped, and said so
    assert math.isfinite(metrics["train/loss"])
    with pytest.raises(NonFiniteError, match="infinite"):
        make_trainer().step([replace(far, advantage=-1.0)], audit=False, observe=unobserved)


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [(1.25, 1.0, 0), (1.3, 1.0, 1), (1.3, -1.0, 0), (0.85, -1.0, 0), (0.75, -1.0, 1), (0.75, 1.0, 0)],
)
def test_the_ratio_is_clipped_on_its_two_sides(ratio, advantage, clipped):
    trainer = make_trainer(clip_low=0.2, clip_high=0.28)
    s = sample(tokens(4, 0), tokens(6, 1), advantage=advantage)
    (current,) = trainer.score([s])
    old = current - np.float32(math.log(ratio))
    metrics = trainer.step([replace(s, logprobs=old)], audit=False, observe=unobserved)
    assert metrics["train/pg_clipfrac"] == clipped
    assert (metrics["train/grad_norm"] == 0) == bool(clipped)


def test_samples_without_any_token_are_refused():
    with pytest.raises(UsageError, match="no token"):
        make_trainer().step([sample([1, 2], [])], audit=False, observe=unobserved)


def test_recomputed_old_logprobs_are_the_trainers_own(samples, dtype):
    """Without parity the old logprobs come from the trainer: rollout logprobs that are off change nothing."""
    off = [replace(s, logprobs=s.logprobs - np.float32(0.5)) for s in samples]
    trainers = [make_trainer(dtype, recompute_old_logprobs=True) for _ in range(2)]
    metrics = [t.step(s, audit=False, observe=unobserved) for t, s in zip(trainers, (samples, off), strict=True)]
    assert metrics[0] == metrics[1]
    assert trainers[0].master_digest() == trainers[1].master_digest()
    parity = make_trainer(dtype)
    assert parity.step(samples, audit=False, observe=unobserved) == metrics[0]
    assert parity.step(off, audit=False, observe=unobserved) != metrics[0]


def test_metrics_are_means_over_tokens(samples, dtype):
    trainer = make_trainer(dtype, lr=0.25, max_tokens_per_microbatch=200)
    metrics = trainer.step(samples, audit=False, observe=unobserved)
    count = sum(len(s.token_ids) for s in samples)
    loss = -sum(s.advantage * len(s.token_ids) for s in samples) / count  # every ratio is 1
    assert abs(metrics["train/loss"] - loss) < 1e-6
    assert metrics["train/pg_clipfrac"] == 0
    assert metrics["train/lr"] == 0.25
    assert 0 < metrics["train/entropy"] < math.log(97)
    assert set(metrics) == {"train/loss", "train/pg_clipfrac", "train/entropy", "train/grad_norm", "train/lr"}


def test_packing_respects_the_budget_and_cuts_nothing():
    sizes = [10, 30, 5, 200, 64, 1, 1, 63]
    made = [sample([1] * (n - 1), [2, 3]) for n in sizes[:5]] + [sample([1], [2] * n) for n in sizes[5:]]
    for budget in (1, 64, 100, 10_000):
        batches = pack(made, budget)
        assert [i for b in batches for i in b] == list(range(len(made)))
        for indices in batches:
            total = sum(sizes[i] for i in indices)
            assert total <= budget or len(indices) == 1
        for left, right in pairwise(batches):
            assert sum(sizes[i] for i in left) + sizes[right[0]] > budget  # none is closed too early
    assert pack([], 64) == []


def test_a_model_without_masters_is_refused():
    from exactrl.algo.algorithm import get_algorithm
    from exactrl.train.trainer import Trainer
    from tests.model.test_qwen3 import build

    with pytest.raises(UsageError, match="master"):
        Trainer(build(config(), trainable=False), get_algorithm("grpo"), lr=1.0)


def test_tied_embeddings_and_long_samples(dtype):
    c = config(tie_word_embeddings=True, max_positions=1200)
    engine, trainer = make_engine(dtype, c=c), make_trainer(dtype, c=c, max_tokens_per_microbatch=600)
    requests = [request(f"r{n}", tokens(n, n), 12) for n in (505, 3, 70)]
    for _ in range(2):
        sync(trainer, engine)
        samples = roll_out(engine, requests)
        recorder = Recorder()
        trainer.step(samples, audit=False, observe=recorder)
        assert recorder.seen["train"] == recorded(samples)
