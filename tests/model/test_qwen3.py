"""The model against transformers' Qwen3, folders in and out, and gradients of a whole model against fp64 autograd."""

from __future__ import annotations

import json
import math

import pytest
import torch
import transformers

from exactrl.contract import get_contract
from exactrl.errors import ModelError
from exactrl.model.attention_state import PackedState
from exactrl.model.config import ModelConfig, find_model, parse_config, read_config
from exactrl.model.folder import load_model, read_tensors, save_model
from exactrl.model.qwen3 import Qwen3
from exactrl.model.weights import compute_digest, load_weights, master_digest, named_masters, random_weights
from exactrl.ops import Ops
from exactrl.ops.attention import Rows
from exactrl.ops.qkv import HeadShape
from tests.ops.helpers import packed_rows, same_bits

EXACT, PLAIN = Ops(get_contract("exact-v1")), Ops(get_contract("exact-v1"), exact=False)


def config(**changes) -> ModelConfig:
    base = dict(
        vocab_size=97, hidden_size=40, intermediate_size=72, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=12,
        rope_theta=1e6, tie_word_embeddings=False, max_positions=512,
    )  # fmt: skip
    return ModelConfig(**{**base, **changes})


def build(c: ModelConfig, ops: Ops = EXACT, dtype=torch.float32, *, trainable=True, seed=0) -> Qwen3:
    model = Qwen3(c, ops, dtype, trainable=trainable)
    load_weights(model, random_weights(c, seed), "random")
    return model


def rows_of(lengths: list[int], c: ModelConfig) -> Rows:
    return packed_rows(lengths, HeadShape(c.num_heads, c.num_kv_heads, c.head_dim))


def forward_logits(model: Qwen3, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """fp32 logits of each sequence, computed side by side."""
    lengths = [len(s) for s in sequences]
    positions = torch.cat([torch.arange(n) for n in lengths])
    model.reserve_positions(max(lengths))
    state = PackedState(model.ops, rows_of(lengths, model.config))
    hidden = model(torch.cat(sequences), positions, state)
    return list((hidden.float() @ model.head.value().float().T).split(lengths))


def hf_model(folder) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize("ops", [EXACT, PLAIN], ids=["exact", "plain"])
@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"num_kv_heads": 1, "head_dim": 20, "num_layers": 3}]
)
def test_equals_transformers(tmp_path, ops, changes):
    model = build(config(**changes), ops)
    save_model(model, tmp_path / "m")
    theirs = hf_model(tmp_path / "m").eval()
    g = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 97, (n,), generator=g) for n in (1, 5, 70)]
    with torch.no_grad():
        for ids, ours in zip(sequences, forward_logits(model, sequences), strict=True):
            expected = theirs(ids[None]).logits[0]
            assert (ours - expected).abs().max() < 2e-5 * expected.abs().max()


def test_bundled_model_equals_transformers():
    folder = find_model("tiny")
    model = load_model(folder, EXACT, torch.float32, trainable=False)
    ids = torch.arange(40) % model.config.vocab_size
    with torch.no_grad():
        expected = hf_model(folder)(ids[None]).logits[0]
        (ours,) = forward_logits(model, [ids])
    assert (ours - expected).abs().max() < 5e-5 * expected.abs().max()


@pytest.mark.parametrize("shard_bytes", [5 << 30, 5000])
def test_round_trip(tmp_path, shard_bytes):
    model = build(config())
    save_model(model, tmp_path / "a", shard_bytes=shard_bytes)
    again = load_model(tmp_path / "a", EXACT, torch.float32, trainable=True)
    assert master_digest(again) == master_digest(model)
    assert compute_digest(again) == compute_digest(model)
    assert (len(list((tmp_path / "a").glob("*.safetensors"))) > 1) == (shard_bytes == 5000)
    with pytest.raises(ModelError, match="exists already"):
        save_model(model, tmp_path / "a")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engine_and_trainer_hold_the_same_compute_weights(dtype):
    trainer, engine = (build(config(), EXACT, dtype, trainable=t) for t in (True, False))
    assert compute_digest(trainer) == compute_digest(engine)
    with torch.no_grad():
        trainer.layers[1].down.master[0, 0] += 1
    trainer.layers[1].down.refresh()
    assert compute_digest(trainer) != compute_digest(engine)


def test_gradients_of_a_whole_model_against_fp64():
    c = config()
    model = build(c)
    g = torch.Generator().manual_seed(2)
    lengths = [30, 5, 70]
    sequences = [torch.randint(0, 97, (n,), generator=g) for n in lengths]
    ids, positions = torch.cat(sequences), torch.cat([torch.arange(n) for n in lengths])
    model.reserve_positions(80)
    hidden = model(ids, positions, PackedState(EXACT, rows_of(lengths, c)))
    targets, temperatures = torch.randint(0, 97, (len(ids),), generator=g), torch.full((len(ids),), 0.7)
    logprobs, _ = EXACT.logprobs(hidden, model.head, targets, temperatures)
    coefficients = torch.randn(len(ids), generator=g)
    (logprobs * coefficients).sum().backward()

    theirs = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**{k: v for k, v in c.to_json().items() if k not in ("architectures", "model_type")})
    ).double()
    theirs.load_state_dict({name: t.double() for name, t in named_masters(model)})
    losses = []
    for s, t in zip(sequences, targets.split(lengths), strict=True):
        lp = torch.log_softmax(theirs(s[None]).logits[0] / 0.7, -1).gather(1, t[:, None])[:, 0]
        losses.append(lp)
    expected = torch.cat(losses)
    (expected * coefficients).sum().backward()
    assert (logprobs.double() - expected).abs().max() < 1e-5
    for name, grad in named_gradients(model):
        reference = theirs.get_parameter(name).grad
        error = (grad.double() - reference).abs().max() / reference.abs().max()
        assert error < 2e-5, f"{name}: {error:.2e}"


def named_gradients(model: Qwen3):
    from exactrl.model.weights import places

    for name, weight, first, rows in places(model):
        assert weight.master is not None
        assert weight.master.grad is not None, name
        yield name, weight.master.grad[first : first + rows]


RAW = dict(config().to_json())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "only dense Qwen3"),
        ({"rope_theta": None}, "rope_theta is given nowhere"),
        ({"rope_parameters": {"rope_theta": 10000.0}}, "two values"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "yarn"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"head_dim": 7}, "odd"),
    ],
)
def test_config_refusals(changes, message):
    with pytest.raises(ModelError, match=message):
        parse_config({**RAW, **changes}, "config.json")


def test_A_29_rope_theta_from_either_place():
    without = {k: v for k, v in RAW.items() if k != "rope_theta"}
    newer = {**without, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}
    for raw in (newer, {**without, "rope_theta": 1000000}):
        c = parse_config(raw, "c")
        assert c.rope_theta == 1e6
        for trainable in (False, True):
            model = build(c, trainable=trainable)
            model.reserve_positions(2)
            assert abs(float(model.rope.cos[1, 1]) - math.cos(1e6 ** (-2 / 12))) < 1e-7
    with pytest.raises(ModelError, match="rope_theta is given nowhere"):
        parse_config(without, "c")


def test_A_27_rope_tables_stay_fp32():
    """Both sides, in both dtypes, after a cast of the whole module: the tables of fp64, rounded to fp32 once."""
    frequency = 1e6 ** (-torch.arange(0, 12, 2, dtype=torch.float64) / 12)
    angle = torch.arange(2048, dtype=torch.float64)[:, None] * frequency
    for dtype in (torch.float32, torch.bfloat16):
        for trainable in (False, True):
            model = build(config(), dtype=dtype, trainable=trainable)
            model.reserve_positions(100)
            model.to(torch.bfloat16)
            model.reserve_positions(2048)
            assert same_bits(model.rope.cos, angle.cos().float())
            assert same_bits(model.rope.sin, angle.sin().float())
    longer = build(config())
    longer.reserve_positions(4096)
    assert same_bits(model.rope.sin, longer.rope.sin[:2048])


def faulty(tensors: dict, fault: str) -> dict:
    name = "model.layers.1.self_attn.k_proj.weight"
    if fault == "missing":
        tensors.pop(name)
    elif fault == "extra":
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(3)
    elif fault == "shape":
        tensors[name] = tensors[name][:-1]
    elif fault == "integers":
        tensors[name] = tensors[name].long()
    return tensors


@pytest.mark.parametrize(
    ("fault", "message"),
    [("missing", "k_proj"), ("extra", "not of this model"), ("shape", "expected"), ("integers", "int64")],
)
def test_faulty_tensors(fault, message):
    model = Qwen3(config(), EXACT, torch.float32, trainable=False)
    tensors = faulty(dict(random_weights(config(), 0)), fault)
    with pytest.raises(ModelError, match=message):
        load_weights(model, tensors.items(), "test")


def test_tied_head_present_must_equal_the_embedding():
    c = config(tie_word_embeddings=True)
    model = Qwen3(c, EXACT, torch.float32, trainable=False)
    tensors = dict(random_weights(c, 0))
    load_weights(model, [*tensors.items(), ("lm_head.weight", tensors["model.embed_tokens.weight"])], "test")
    with pytest.raises(ModelError, match="lm_head"):
        load_weights(model, [*tensors.items(), ("lm_head.weight", torch.zeros(97, 40))], "test")


def test_folder_faults(tmp_path):
    with pytest.raises(ModelError, match="no such folder"):
        find_model("no-such-model")
    folder = tmp_path / "m"
    save_model(build(config()), folder, shard_bytes=5000)
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ModelError, match="not a readable safetensors"):
        list(read_tensors(folder))
    shard.unlink()
    with pytest.raises(ModelError, match="not a file"):
        list(read_tensors(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        read_config(folder)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(RAW))
    (bare / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="pickle"):
        list(read_tensors(bare))


def test_k_leaves_must_divide():
    from exactrl.errors import ConfigError

    with pytest.raises(ConfigError, match="down_proj"):
        Qwen3(config(intermediate_size=70), Ops(get_contract("exact-v1", k_leaves=4)), torch.float32, trainable=False)


def test_every_qwen3_dense_size_is_understood():
    sizes = {  # hidden, intermediate, layers, heads, kv heads, tied
        "0.6B": (1024, 3072, 28, 16, 8, True), "1.7B": (2048, 6144, 28, 16, 8, True),
        "4B": (2560, 9728, 36, 32, 8, True),
        "8B": (4096, 12288, 36, 32, 8, False), "14B": (5120, 17408, 40, 40, 8, False),
        "32B": (5120, 25600, 64, 64, 8, False),
    }  # fmt: skip
    for hidden, intermediate, layers, heads, kv, tied in sizes.values():
        raw = {
            "model_type": "qwen3", "vocab_size": 151936, "hidden_size": hidden, "intermediate_size": intermediate,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": 128,
            "rope_theta": 1000000, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied, "rope_scaling": None,
            "max_position_embeddings": 40960, "sliding_window": None, "max_window_layers": layers, "hidden_act": "silu",
        }  # fmt: skip
        c = parse_config(raw, "config.json")
        assert (c.hidden_size, c.num_heads, c.head_dim) == (hidden, heads, 128)
