"""The whole ladder on odd geometries, and proof that it can fail: plain torch ops do not pass it."""

from __future__ import annotations

import pytest

from exactrl import launch
from exactrl.contract import get_contract
from exactrl.errors import ConfigError
from exactrl.model.config import ModelConfig, find_model
from exactrl.model.folder import save_model
from exactrl.model.qwen3 import Qwen3
from exactrl.model.weights import load_weights, random_weights
from exactrl.ops import Ops

torch = pytest.importorskip("torch")


def shape(**changes) -> ModelConfig:
    base = dict(num_kv_heads=1, rope_theta=1e4, tie_word_embeddings=False, max_positions=560)
    return ModelConfig(**{**base, **changes})


# name: (geometry, factor on the QK-norm weights: above 1 attention is peaked)
GEOMETRIES = {
    "one-layer-vocab-97": (shape(vocab_size=97, hidden_size=20, intermediate_size=36, num_layers=1, num_heads=1,
                                 head_dim=8), 1.0),
    "gqa3-hidden-44-tied": (shape(vocab_size=131, hidden_size=44, intermediate_size=100, num_layers=2, num_heads=3,
                                  head_dim=12, tie_word_embeddings=True), 1.0),
    "vocab-5003": (shape(vocab_size=5003, hidden_size=72, intermediate_size=130, num_layers=2, num_heads=8,
                         num_kv_heads=2, head_dim=20), 1.0),
    "nine-layers-mha": (shape(vocab_size=1009, hidden_size=36, intermediate_size=52, num_layers=9, num_heads=4,
                              num_kv_heads=4, head_dim=6, tie_word_embeddings=True), 1.0),
    "gqa12": (shape(vocab_size=300, hidden_size=100, intermediate_size=52, num_layers=3, num_heads=12,
                    head_dim=16), 1.0),
    "peaked-hidden-50": (shape(vocab_size=2048, hidden_size=50, intermediate_size=75, num_layers=4, num_heads=6,
                               num_kv_heads=3, head_dim=34), 4.0),
    "peaked-head-dim-128": (shape(vocab_size=257, hidden_size=130, intermediate_size=66, num_layers=1, num_heads=2,
                                  head_dim=128), 6.0),
}  # fmt: skip


def make_folder(path, name: str) -> str:
    config, peak = GEOMETRIES[name]
    model = Qwen3(config, Ops(get_contract("exact-v1")), torch.float32, trainable=False)
    load_weights(model, random_weights(config, seed=len(name), peak=peak), name)
    save_model(model, path / name)
    return str(path / name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_ladder_passes(tmp_path, name, dtype):
    results = launch.check(make_folder(tmp_path, name), dtypes=[dtype])
    assert {r.name for r in results} == set(launch.checking.ladder.rungs_on("cpu"))
    for r in results:
        assert (r.status, r.mismatched) == ("pass", 0), r
        assert r.compared > 0, r


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_torch_ops_fail_the_ladder(tmp_path, dtype):
    folder = make_folder(tmp_path, "gqa3-hidden-44-tied")
    results = {r.name: r for r in launch.check(folder, dtypes=[dtype], true_on_policy=False)}
    failed = {name for name, r in results.items() if r.status == "fail"}
    assert {"layer", "batch_composition", "chunk_sizes"} <= failed
    assert sum(r.mismatched for r in results.values()) > 0
    assert "layers." in results["layer"].detail, "the first differing op is named"


def test_unknown_rung_is_refused():
    with pytest.raises(ConfigError, match="unknown rung 'nope'"):
        launch.check("tiny", rungs=["nope"])


def test_a_rung_that_could_not_vary_anything_fails(tmp_path, monkeypatch):
    """Without preemption the preemption rung has shown nothing: it must not pass."""
    from exactrl.parity import engine_rungs

    subject = launch.subject_of(find_model("tiny"), "float32", True, 0)
    make = subject.make_engine
    subject.make_engine = lambda **limits: make(**{**limits, "kv_tokens": 8192})
    tally = engine_rungs.Tally()
    engine_rungs.preemption(subject, tally)
    assert tally.mismatched == 0
    assert tally.problems == ["nothing was preempted"]
