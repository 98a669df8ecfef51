"""Faults seen elsewhere that make rollout and training hold different weights or compute in different types.

Ids and gists: docs/cases.md. Cases of one room are tested beside that room.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import exactrl
from exactrl import launch
from exactrl.config import load_recipe, make_config
from exactrl.errors import ConfigError, ModelError, ParityError
from exactrl.model.attention_state import PackedState
from exactrl.model.config import find_model
from exactrl.model.folder import load_model, save_model
from exactrl.model.weights import compute_digest, named_weights, random_weights, unique_weights
from exactrl.ops.cpu.gemm import PANEL
from exactrl.sync.memory import sync
from exactrl.train.packing import MicroBatch
from exactrl.types import EngineStats, Sample
from tests.cases.helpers import Called
from tests.cases.test_group_a import refusal
from tests.model.test_qwen3 import EXACT, build, config
from tests.ops.helpers import same_bits
from tests.test_config import MINIMAL
from tests.train.helpers import (
    Recorder,
    bit_list,
    make_engine,
    make_trainer,
    one_torch_thread,  # noqa: F401
    recorded,
    request,
    roll_out,
    tokens,
    unobserved,
)

F32, BF16 = torch.float32, torch.bfloat16


def dtypes_into(found: dict[str, torch.dtype]):
    """A probe that writes down the dtype of every op's output."""

    def see(name: str, x: torch.Tensor) -> torch.Tensor:
        found[name] = x.dtype
        return x

    return see


def test_A_26_tied_weights_are_one_copy_and_the_embedding_keeps_its_dtype():
    """Logits are always float32 (there is no option for it); the lookup of the same weight stays bfloat16."""
    c, sides = config(tie_word_embeddings=True), ({}, {})
    engine, trainer = (
        make_engine(BF16, c=c, see=dtypes_into(sides[0])),
        make_trainer(BF16, c=c, see=dtypes_into(sides[1])),
    )
    digests = [sync(trainer, engine)]
    for _ in range(2):
        samples = roll_out(engine, [request(f"r{i}", tokens(5, i), 8) for i in range(4)])
        recorder = Recorder()
        trainer.step(samples, audit=False, observe=recorder)
        assert recorder.seen["train"] == recorded(samples)
        digests.append(sync(trainer, engine))
    assert len(set(digests)) == 3
    assert sides[0]["embed"] == sides[1]["embed"] == BF16
    for model in (engine.model, trainer.model):
        assert model.head is model.embed
        packed = model.embed.panels.view(-1, 40, PANEL).transpose(1, 2).reshape(-1, 40)[:97]
        assert same_bits(packed.contiguous(), model.embed.rows())  # what the head reads, what the lookup reads


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
def test_A_28_autocast_around_the_trainer_changes_no_bit(dtype):
    """q and k after RoPE, and all logprobs, inside and outside an autocast region, equal the engine's."""
    prompt, sides = tokens(40, 0), []

    def keep(found):
        return lambda name, x: found.setdefault(name, x.detach().clone()) if name.endswith((".q", ".k")) else x

    found = {}
    engine = make_engine(dtype, see=keep(found))
    samples = roll_out(engine, [request("r", prompt, 1)])
    sides.append(found)
    for enabled in (False, True):
        found = {}
        trainer = make_trainer(dtype, see=keep(found))
        with torch.autocast("cpu", dtype=BF16, enabled=enabled):
            assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype == (BF16 if enabled else F32)
            recorder = Recorder()
            trainer.step([replace(s, advantage=1.0) for s in samples], audit=False, observe=recorder)
        assert recorder.seen["train"] == recorded(samples)
        sides.append(found)
        sides.append({"digest": trainer.master_digest()})
    engine_side, outside, digest, inside, digest_autocast = sides
    assert set(engine_side) == {"layers.0.q", "layers.0.k", "layers.1.q", "layers.1.k"} == set(outside) == set(inside)
    for name, x in engine_side.items():
        assert x.dtype == dtype
        assert same_bits(x, outside[name])
        assert same_bits(x, inside[name])
    assert digest == digest_autocast  # the update, too


def test_A_34_positions_are_int64_and_floats_are_refused():
    model = build(config())
    lists = [(tokens(n, n), tokens(2 * n, n + 1)) for n in (1, 5, 3)]
    ragged = [Sample("p", i, tuple(a), b, np.zeros(len(b), np.float32), "length", 0, 1.0)
              for i, (a, b) in enumerate(lists)]  # fmt: skip
    batch = MicroBatch.build(ragged, model.shape, model.ops)
    assert batch.positions.dtype == batch.ids.dtype == batch.targets.dtype == torch.int64
    assert batch.positions.tolist() == [*range(2), *range(14), *range(8)]
    model.reserve_positions(20)
    state = PackedState(model.ops, batch.rows)
    for bad in (batch.positions.float(), batch.positions.double(), batch.positions.int()):
        with pytest.raises(AssertionError, match="positions must be int64, not torch"):
            model(batch.ids, bad, state)
    assert model(batch.ids, batch.positions, state).shape == (24, 40)


def test_A_36_a_cached_prompt_after_an_update_has_the_new_weights_logprobs():
    """The same prompts in two steps; within each step later requests find the prompt in the prefix cache."""
    engine, trainer = make_engine(max_concurrent=1), make_trainer(lr=1e-2)
    seen = []
    for _ in range(2):
        sync(trainer, engine)
        engine.stats = EngineStats()
        samples = roll_out(engine, [request(f"r{i}", tokens(40, 0), 10) for i in range(3)])
        assert engine.stats.cached_tokens == 64  # two blocks of 16 for the second and third request
        recorder = Recorder()
        trainer.step(samples, audit=True, observe=recorder)
        assert recorder.seen["train"] == recorder.seen["rescore"] == recorded(samples)
        seen.append(samples[0].logprobs[:1])
    assert bit_list(seen[0]) != bit_list(seen[1])


LORA_KEYS = ("lora_rank", "lora_alpha", "use_lora", "peft_config", "target_modules")


@pytest.mark.parametrize("key", LORA_KEYS)
def test_A_39_lora_settings_are_refused(key):
    assert "adapters are not built: all weights are trained" in refusal(f"train.{key}", 8)
    with pytest.raises(ConfigError, match=r"\[lora\] is not a section: adapters are not built"):
        make_config({**MINIMAL, "lora": {"rank": 8}}, "my.toml")


def test_A_39_an_adapter_is_never_left_out_silently(tmp_path):
    """A folder with base weights and an adapter, and weights with lora tensors on the way to the engine."""
    save_model(build(config()), tmp_path / "m")
    assert find_model(tmp_path / "m") == tmp_path / "m"
    (tmp_path / "m" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    for load in (find_model, lambda folder: load_model(folder, EXACT, F32, trainable=False)):
        with pytest.raises(ModelError, match=r"holds an adapter .* merge it into the base model"):
            load(tmp_path / "m")
    weights = [*random_weights(config(), 0), ("model.layers.0.self_attn.q_proj.lora_A.weight", torch.zeros(8, 40))]
    with pytest.raises(ModelError, match=r"lora_A\.weight' is not of this model"):
        make_engine().load_weights(weights, 1)


def test_A_40_lora_on_the_head_is_refused():
    for value in (["lm_head"], "all-linear"):
        assert "adapters are not built" in refusal("model.lora_target_modules", value)
    weights = [*random_weights(config(), 0), ("lm_head.lora_B.weight", torch.zeros(97, 8))]
    with pytest.raises(ModelError, match=r"lm_head\.lora_B\.weight' is not of this model"):
        make_engine().load_weights(weights, 1)


def test_A_43_a_sync_puts_every_tensor_into_the_engine():
    trainer, engine = make_trainer(), make_engine()
    sync(trainer, engine)
    before = {name: t.clone() for name, t in named_weights(engine.model)}
    trainer.step(
        roll_out(engine, [request(f"r{i}", tokens(5, i), 8) for i in range(6)]), audit=False, observe=unobserved
    )
    sync(trainer, engine)
    sent, arrived = dict(trainer.named_weights()), dict(named_weights(engine.model))
    assert list(sent) == list(arrived)
    for name, tensor in arrived.items():
        assert same_bits(tensor, sent[name]), name
        assert not same_bits(tensor, before[name]), f"{name} did not change"


def test_A_43_a_sync_that_changes_nothing_is_an_error(monkeypatch):
    """An engine that takes the weights and copies them nowhere, and one that leaves out a single tensor."""
    trainer, engine = make_trainer(), make_engine()
    sync(trainer, engine)
    samples = roll_out(engine, [request(f"r{i}", tokens(5, i), 8) for i in range(6)])
    trainer.step(samples, audit=False, observe=unobserved)
    stale = compute_digest(engine.model)
    with monkeypatch.context() as m:
        m.setattr("exactrl.engine.engine.load_weights", lambda model, weights, source: None)
        with pytest.raises(ParityError, match=f"weight version 1: the engine's kernels read {stale}"):
            sync(trainer, engine)
    last = engine.model.norm
    with monkeypatch.context() as m:
        m.setattr(last, "assign", lambda value: None)
        with pytest.raises(ParityError, match="did not arrive as they were sent"):
            sync(trainer, engine)
    assert sync(trainer, engine) == trainer.compute_digest()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "plain"])
def test_A_47_the_configured_dtype_is_the_one_computed_in(dtype, exact):
    """Every op's output on both sides; logits and log-softmax are float32 whatever the model is."""
    recipe = {"model.path": "bundled:tiny", "model.dtype": {F32: "float32", BF16: "bfloat16"}[dtype]}
    recipe |= {"contract.true_on_policy": str(exact).lower(), "rollout.kv_tokens": "512"}
    settings = load_recipe("tiny", list(recipe.items()))
    engine, trainer = (f(settings, find_model("tiny")) for f in (launch.build.build_engine, launch.build.build_trainer))
    found: tuple[dict, dict] = ({}, {})
    engine.see, trainer.see = (dtypes_into(f) for f in found)
    with Called() as called:
        samples = roll_out(engine, [request("r", [9, 10, 11], 4)])
        logprobs, _, _ = trainer._forward(samples)
    assert {p.dtype for p in trainer.parameters} == {F32}
    assert (
        {w.dtype for w in unique_weights(trainer.model)} == {w.dtype for w in unique_weights(engine.model)} == {dtype}
    )
    bookkeeping = {"ids", "positions", "rows", "predicting", "sample"}
    for side in found:
        assert len(side) > 30
        assert side.pop("logprob") == F32
        assert {d for name, d in side.items() if name not in bookkeeping} == {dtype}
    assert logprobs.dtype == F32
    assert samples[0].logprobs.dtype == np.float32
    softmax = [dtypes for name, dtypes in called.ops if "_log_softmax" in name]
    assert softmax == [] if exact else set(softmax) == {(F32,)}
    if not exact:
        assert {dtypes for name, dtypes in called.ops if name in ("aten::mm", "aten::addmm")} == {(dtype, dtype)}


def test_A_47_no_autocast_in_the_package():
    sources = {p: p.read_text(encoding="utf-8") for p in Path(exactrl.__file__).parent.rglob("*.py")}
    assert len(sources) > 80
    assert [p.name for p, text in sources.items() if re.search(r"\bautocast\(", text)] == []
    assert "nothing runs under autocast" in refusal("train.mixed_precision", "bf16")
