"""Faults seen elsewhere that make rollout and training see different tokens, through the whole path here.

Ids and gists: docs/cases.md. Weights and types: test_group_a_weights.py; cases of one room are tested
beside that room.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers.models import WordLevel

from exactrl.config import make_config
from exactrl.errors import ConfigError, ModelError, NonFiniteError, ParityError, RequestError
from exactrl.model.weights import compute_digest, load_weights, random_weights
from exactrl.parity.oracle import Oracle
from exactrl.sync.memory import sync
from exactrl.tasks.tokenizer import Tokenizer, load_tokenizer
from exactrl.train.packing import MicroBatch
from exactrl.types import SamplingParams
from tests.cases.helpers import SPECIAL, World, berry_tokenizer, samples_of
from tests.model.test_qwen3 import config
from tests.test_config import with_setting
from tests.train.helpers import (
    Recorder,
    bit_list,
    captured_gradients,
    make_engine,
    make_trainer,
    one_torch_thread,  # noqa: F401
    recorded,
    request,
    roll_out,
    tokens,
    trajectories,
    unobserved,
)

F32, BF16 = torch.float32, torch.bfloat16


def refusal(name: str, value: object) -> str:
    """The message of the real recipe parser."""
    with pytest.raises(ConfigError) as caught:
        make_config(with_setting(name, value), "my.toml")
    return str(caught.value)


def pairs(ids: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(ids))


def test_A_01_the_trainer_sees_the_ids_that_were_sampled(monkeypatch):
    """ "straw" + "berry" is sampled; its text would be encoded as the one token "strawberry"."""
    tokenizer = berry_tokenizer()
    straw, berry, whole = (tokenizer.backend.token_to_id(t) for t in ("straw", "berry", "strawberry"))
    assert tokenizer.encode(tokenizer.decode([straw, berry])) == [whole]
    world = World(tokenizer, SamplingParams(24, 2.0))
    returned, generate, step = [], world.engine.generate, world.trainer.step

    def keep(requests, on_progress=None):
        returned.extend(generate(requests, on_progress))
        monkeypatch.setattr(Tokenizer, "encode", None)  # from here on nothing may turn text into ids
        return returned

    trained = []
    monkeypatch.setattr(world.engine, "generate", keep)
    monkeypatch.setattr(world.trainer, "step", lambda samples, **k: trained.extend(samples) or step(samples, **k))
    (result,) = world.run(1, samples_per_prompt=24)
    assert any((straw, berry) in pairs(s.token_ids) for s in trained)
    assert [s.token_ids for s in trained] == [c.token_ids for c in returned]
    batch = MicroBatch.build(trained, world.trainer.model.shape, world.trainer.model.ops)
    assert batch.targets.tolist() == [t for c in returned for t in c.token_ids]
    assert result.metrics["train/logprob_compared_tokens"] == 72 * 24
    assert result.metrics["train/logprob_abs_diff_max"] == 0.0


def test_A_01_ids_encoded_again_do_not_pass():
    """The fault itself: same text, other ids. One id fewer is refused; another id of the same length is a mismatch."""
    world = World(berry_tokenizer(), SamplingParams(24, 2.0))
    results = world.run(1, samples_per_prompt=24)
    straw, berry, whole = (world.tokenizer.backend.token_to_id(t) for t in ("straw", "berry", "strawberry"))
    sample = next(s for s in samples_of(results) if (straw, berry) in pairs(s.token_ids))
    again = world.tokenizer.encode(sample.text)
    assert world.tokenizer.decode(again) == sample.text
    assert len(again) < len(sample.token_ids)
    fresh = World(berry_tokenizer(), SamplingParams(24, 2.0))
    encode_again(fresh, lambda s: world.tokenizer.encode(s.text))
    with pytest.raises(ParityError, match="tokens but its logprobs are"):
        fresh.run(1, samples_per_prompt=24)
    fresh = World(berry_tokenizer(), SamplingParams(24, 2.0))
    encode_again(fresh, lambda s: [whole if t == straw else t for t in s.token_ids])
    with pytest.raises(ParityError, match="rollout and rescore logprob differ"):
        fresh.run(1, samples_per_prompt=24)


def encode_again(world: World, ids) -> None:
    """Puts a fault between engine and trainer: each completion's ids become `ids(completion with its text)`."""
    generate = world.engine.generate

    def changed(requests, on_progress=None):
        found = generate(requests, on_progress)
        for c in found:
            c.token_ids = ids(SimpleNamespace(token_ids=c.token_ids, text=world.tokenizer.decode(c.token_ids)))
        return found

    world.engine.generate = changed


def test_A_03_special_tokens_inside_a_response_are_scored_like_any_other():
    """No stop token is set, so both special tokens turn up in the middle of prompts and responses."""
    world = World(berry_tokenizer(), SamplingParams(24), prompts=("straw<|im_end|>berry", "<|endoftext|>st"))
    special = {world.tokenizer.backend.token_to_id(t) for t in SPECIAL}
    (result,) = world.run(1, samples_per_prompt=8)
    samples = samples_of([result])
    assert special <= {t for s in samples for t in s.token_ids[:-1]}
    assert all(special & set(s.prompt_token_ids) for s in samples)
    batch = MicroBatch.build(samples, world.trainer.model.shape, world.trainer.model.ops)
    assert len(batch.targets) == len(batch.predict) == len(batch.temperatures) == 16 * 24
    for s in samples:
        assert len(s.token_ids) == len(s.logprobs) == 24
        assert s.text.count("<|") == sum(t in special for t in s.token_ids)  # what a grader sees
        text_only = world.tokenizer.backend.decode(s.token_ids, skip_special_tokens=True)
        assert len(text_only) < len(s.text) or not special & set(s.token_ids)
    assert result.metrics["train/logprob_compared_tokens"] == 16 * 24
    assert result.metrics["train/logprob_abs_diff_max"] == 0.0


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
def test_A_10_first_step_ratios_are_exactly_1(dtype):
    """T = 0.6, before any update: trainer over rollout probability of every token."""
    engine, trainer = make_engine(dtype), make_trainer(dtype)
    samples = roll_out(engine, [request(f"r{i}", tokens(5 + i, i), 12, 0.6) for i in range(8)])
    ratios = [np.exp(new - s.logprobs) for s, new in zip(samples, trainer.score(samples), strict=True)]
    assert (np.concatenate(ratios) == np.float32(1)).all()
    raw = trainer.score([replace(s, temperature=1.0) for s in samples])  # the fault: logprobs before temperature
    assert np.abs(np.concatenate(raw) - np.concatenate([s.logprobs for s in samples])).max() > 0.1


def test_A_10_raw_logprobs_cannot_be_asked_for():
    assert "rollout.logprobs_mode is not a setting" in refusal("rollout.logprobs_mode", "raw_logprobs")
    assert "rollout.temperature included" in refusal("rollout.logprobs_mode", "raw_logprobs")


def test_A_11_temperature_0_is_for_evaluation_only():
    for value in (0.0, 1e-6):
        assert "rollout.temperature" in (text := refusal("rollout.temperature", value))
        assert "at least 0.001" in text
    engine = make_engine()
    for bad in (1e-6, -1.0):
        with pytest.raises(RequestError, match=r"must be 0 \(greedy\) or at least 0\.001"):
            engine.generate([request("r", tokens(5, 0), 4, bad)])
    smallest, greedy = engine.generate([request("t", tokens(5, 0), 20, 0.001), request("g", tokens(5, 0), 20, 0.0)])
    assert smallest.token_ids == greedy.token_ids  # 0.001 has all but lost its noise
    for c in (smallest, greedy):
        assert np.isfinite(c.logprobs).all()
    assert len(set(bit_list(greedy.logprobs))) > 10  # probabilities at temperature 1, not all 1


@pytest.mark.parametrize(("key", "value"), [("top_p", 0.9), ("top_k", 3), ("min_p", 0.1), ("repetition_penalty", 1.1)])
def test_A_12_cutting_the_distribution_is_refused(key, value):
    text = refusal(f"rollout.{key}", value)
    assert text.startswith(f"my.toml: rollout.{key} is not a setting: ")
    assert "a logprob over the kept tokens only is not the one the trainer has" in text
    with pytest.raises(TypeError, match=key):
        SamplingParams(8, **{key: value})


def test_A_21_a_prompt_is_served_whole_or_not_at_all():
    """Context 4096, 1024 new tokens: 3500 prompt tokens are refused, 3072 are kept to the last."""
    c = config(max_positions=4096, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, hidden_size=16)
    engine = make_engine(c=c, kv_tokens=4096, chunk_tokens=4096)
    with pytest.raises(RequestError, match=r"3500 prompt \+ 1024 new tokens, but the model's limit is 4096; shorten"):
        engine.generate([request("r", tokens(3500, 0), 1024)])
    assert engine.stats.prompt_tokens == 0
    prompt = tokens(3072, 0)
    (a,) = engine.generate([request("r", prompt, 1024, stop=range(97))])
    assert engine.stats.prompt_tokens == 3072
    (b,) = engine.generate([request("r", [prompt[0] ^ 1, *prompt[1:]], 1024, stop=range(97))])
    assert bit_list(a.logprobs) != bit_list(b.logprobs)  # the very first token is part of the context


def test_A_41_a_sampled_padding_id_is_kept_and_trained_on():
    """Vocabulary 151936, tokenizer 151669: the head is biased so that id 151700 is what gets sampled."""
    backend = tokenizers.Tokenizer(WordLevel({f"w{i}": i for i in range(151669)}, unk_token="w0"))
    tokenizer = Tokenizer(backend)
    assert backend.get_vocab_size() == 151669
    c = config(vocab_size=151936, hidden_size=8, num_heads=1, num_kv_heads=1, head_dim=8, num_layers=1)
    weights = dict(random_weights(c, 0))
    weights["lm_head.weight"][151700] *= 100
    weights["lm_head.weight"][151701] = -weights["lm_head.weight"][151700]  # one of the two has a huge logit anywhere
    engine, trainer = make_engine(c=c), make_trainer(c=c)
    load_weights(trainer.model, weights.items(), "biased")
    sync(trainer, engine)
    samples = roll_out(engine, [request(f"r{i}", [7 + i, 8], 12) for i in range(4)])
    ids = [t for s in samples for t in s.token_ids]
    assert 151700 in ids
    assert sum(t >= 151669 for t in ids) > 24
    for s in samples:
        assert tokenizer.decode(s.token_ids) == " ".join(f"w{t}" for t in s.token_ids if t < 151669)
    recorder = Recorder()
    gradients = captured_gradients(trainer)
    trainer.step([replace(s, advantage=1.0) for s in samples], audit=True, observe=recorder)
    assert recorder.seen["train"] == recorder.seen["rescore"] == recorded(samples)
    assert gradients[0]["head.master"][151700].abs().max() > 0


class Broken:
    """An engine whose answer to the second request has `value` instead of the fourth token's logprob."""

    def __init__(self, world: World, value: float | None) -> None:
        self.generate, self.value = world.engine.generate, value
        world.engine.generate = self

    def __call__(self, requests, on_progress=None):
        found = self.generate(requests, on_progress)
        if self.value is None:
            found[1].logprobs = [*found[1].logprobs[:3], None, *found[1].logprobs[4:]]
        else:
            found[1].logprobs[3] = self.value
        return found


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_A_46_a_logprob_that_is_no_number_stops_the_run(value, strict):
    world = World(berry_tokenizer(), SamplingParams(8), strict=strict)
    before, steps = world.trainer.master_digest(), []
    world.trainer.step = lambda *a, **k: steps.append(a)
    Broken(world, value)
    error, message = (
        (ParityError, "#1: 8 tokens but")
        if value is None
        else (NonFiniteError, "#1: rollout logprob of response token 3 ")
    )
    with pytest.raises(error, match=message):
        world.run(1)
    assert (steps, world.trainer.master_digest()) == ([], before)


def test_A_46_our_own_engine_names_request_and_position():
    """NaN in the hidden state that token 3 of one response is sampled from; its neighbours are fine."""
    step = [0]

    def see(name, x):
        if name == "norm":
            step[0] += 1
            if step[0] == 4:  # the prompts, then one step for each token
                x = x.clone()
                x[1] = float("nan")
        return x

    engine = make_engine(see=see)
    requests = [request(f"r{i}", tokens(5, i), 8) for i in range(3)]
    with pytest.raises(NonFiniteError, match=r"request 'r1': logprob nan at position 8; the model's logits are not"):
        engine.generate(requests)
    step[0] = 100
    assert trajectories(engine.generate(requests)) == trajectories(make_engine().generate(requests))


@pytest.mark.parametrize("minibatches", [1, 2])
def test_A_51_samples_carry_the_version_that_sampled_them(minibatches):
    world = World(berry_tokenizer(), SamplingParams(6), minibatches=minibatches)
    generate, at_rollout = world.engine.generate, []

    def watch(requests, on_progress=None):
        at_rollout.append((world.engine.weight_version, world.trainer.version))
        assert compute_digest(world.engine.model) == world.trainer.compute_digest()
        return generate(requests, on_progress)

    world.engine.generate = watch
    results = world.run(3)
    assert at_rollout == [(v, v) for v in range(0, 3 * minibatches, minibatches)]
    for (version, _), result in zip(at_rollout, results, strict=True):
        assert {s.weight_version for s in samples_of([result])} == {version}
        assert result.metrics["train/logprob_uncompared_tokens"] == 0


@pytest.mark.parametrize("strict", [True, False])
def test_A_51_an_older_version_is_refused(strict):
    """One sample of the step, or all of them, were made one update ago."""
    engine, trainer = make_engine(), make_trainer(max_tokens_per_microbatch=1)
    sync(trainer, engine)
    old = roll_out(engine, [request("old", tokens(5, 0), 8)])
    trainer.step(old, audit=False, observe=unobserved)
    sync(trainer, engine)
    samples = [*roll_out(engine, [request("new", tokens(5, 1), 8)]), *old]
    oracle = Oracle(strict=strict, bisect_command="exactrl check")
    with pytest.raises(ParityError, match=r"old#0 was rolled out at weight version 0, sample new#0 .* at 1"):
        oracle.begin(samples)
    oracle.begin(old)
    with pytest.raises(ParityError, match="old#0 was rolled out at weight version 0, but the trainer is at 1"):
        trainer.step(old, audit=True, observe=oracle.observe)


def write_tokenizer(folder: Path, backend: tokenizers.Tokenizer, settings: dict) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    loaded = load_tokenizer(folder)
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("spelled", ["text", "object"])
def test_A_55_one_token_may_be_bos_and_eos(tmp_path, spelled):
    backend = berry_tokenizer().backend
    token = "<|endoftext|>" if spelled == "text" else {"content": "<|endoftext|>", "lstrip": False}
    tokenizer = write_tokenizer(tmp_path, backend, {"bos_token": token, "eos_token": token})
    end = backend.token_to_id("<|endoftext|>")
    assert tokenizer.eos_ids == (end,)
    assert tokenizer.encode("strawberry") == [backend.token_to_id("strawberry")]  # no BOS
    world = World(tokenizer, SamplingParams(60, 1.0, tokenizer.eos_ids), prompts=("<|endoftext|>st", "straw"))
    samples = samples_of(world.run(1, samples_per_prompt=8))
    stopped = [s for s in samples if s.finish_reason == "stop"]
    assert len(stopped) > 4
    for s in samples:
        assert (end in s.token_ids) == (s.finish_reason == "stop")
        assert end not in s.token_ids[:-1]
        assert "<|endoftext|>" not in s.text


def test_A_55_an_eos_token_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"eos_token '<.s>' is not a token of tokenizer\.json"):
        write_tokenizer(tmp_path, berry_tokenizer().backend, {"eos_token": "</s>"})
