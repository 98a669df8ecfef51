"""Faults seen elsewhere in model folders, checkpoints and resumed runs. Gists: docs/cases.md."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import exactrl
from exactrl import launch
from exactrl.errors import ModelError
from exactrl.model.folder import INDEX, load_model, read_tensors, save_model
from exactrl.model.weights import digest_of, master_digest, named_masters
from exactrl.tasks.tokenizer import eos_ids
from exactrl.train.checkpoint import read_state, save_checkpoint
from exactrl.types import SamplingParams
from tests.cases.small import recipe, rows_of, samples_of, small_folder, write_rows
from tests.model.test_qwen3 import EXACT, build, config
from tests.train.helpers import (
    make_engine,
    make_trainer,
    one_torch_thread,  # noqa: F401
    roll_out,
    unobserved,
    workload,
)

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load_as_transformers(folder: Path) -> tuple[transformers.PreTrainedModel, dict]:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)


def weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]


def sharded(folder: Path, *, tied: bool):
    """Saves a model of two layers in at least three files."""
    model = build(config(tie_word_embeddings=tied))
    save_model(model, folder, shard_bytes=30000)
    return model


def require_index_agrees(folder: Path, names: set[str]) -> None:
    """Every file of the index is there, opens, and holds just the tensors that the index says; no file is left over."""
    found = weight_map(folder)
    assert set(found) == names
    files = {path.name for path in folder.glob("*.safetensors")}
    assert files == set(found.values())
    assert len(files) >= 3
    for name in files:
        with safe_open(folder / name, "pt") as f:
            held = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118 (safe_open is no dict)
        assert set(held) == {key for key, where in found.items() if where == name} != set()
        assert all(tensor.numel() for tensor in held.values())


def require_transformers_has(folder: Path, model) -> transformers.PreTrainedModel:
    theirs, info = load_as_transformers(folder)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    parameters = theirs.state_dict()
    for name, tensor in named_masters(model):
        assert torch.equal(parameters[name], tensor), name
    return theirs


def test_E_01_a_tied_model_in_shards_has_no_head_and_no_empty_file(tmp_path):
    model = sharded(tmp_path / "m", tied=True)
    require_index_agrees(tmp_path / "m", {name for name, _ in named_masters(model)})
    assert HEAD not in weight_map(tmp_path / "m")
    theirs = require_transformers_has(tmp_path / "m", model)
    assert theirs.lm_head.weight.data_ptr() == theirs.model.embed_tokens.weight.data_ptr()
    assert master_digest(load_model(tmp_path / "m", EXACT, torch.float32, trainable=True)) == master_digest(model)


def test_E_04_an_untied_head_is_in_index_and_file_under_its_own_name(tmp_path):
    model = sharded(tmp_path / "m", tied=False)
    require_index_agrees(tmp_path / "m", {name for name, _ in named_masters(model)})
    with safe_open(tmp_path / "m" / weight_map(tmp_path / "m")[HEAD], "pt") as f:
        assert torch.equal(f.get_tensor(HEAD), model.head.master)
    theirs = require_transformers_has(tmp_path / "m", model)
    assert theirs.lm_head.weight.data_ptr() != theirs.model.embed_tokens.weight.data_ptr()


def with_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


@pytest.mark.parametrize("trainable", [True, False])
def test_E_05_no_tie_and_no_head(tmp_path, trainable):
    save_model(build(config(tie_word_embeddings=True)), tmp_path / "m")
    with_config(tmp_path / "m", tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lm_head\.weight, which tie_word_embeddings = false asks for"):
        load_model(tmp_path / "m", EXACT, torch.float32, trainable=trainable)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_E_05_a_tie_and_another_head(tmp_path, dtype):
    """A head that is only one bit away, too, the same in bfloat16: what it was trained to be would be lost unseen."""
    save_model(build(config(tie_word_embeddings=True)), tmp_path / "m")
    path = tmp_path / "m/model.safetensors"
    tensors = load_file(path)
    equal, near, far = (tensors[EMBEDDING].clone() for _ in range(3))
    near[3, 5] = torch.nextafter(near[3, 5], torch.tensor(0.0))
    far[3, 5] += 1
    assert torch.equal(near.bfloat16(), equal.bfloat16())
    save_file({**tensors, HEAD: equal}, path)
    load_model(tmp_path / "m", EXACT, dtype, trainable=True)
    for head in (near, far):
        save_file({**tensors, HEAD: head}, path)
        with pytest.raises(ModelError, match=r"lm_head\.weight differs .* although tie_word_embeddings is true"):
            load_model(tmp_path / "m", EXACT, dtype, trainable=True)


def test_E_07_what_is_saved_names_the_model_class_not_a_wrapper(tmp_path):
    """The folder that a run starts from names a wrapper; its checkpoint and its export do not."""
    model = small_folder(tmp_path / "m")
    with_config(model, architectures=["FSDPQwen3ForCausalLM"])
    launch.train(recipe(model, write_rows(tmp_path / "rows.jsonl", 4), tmp_path / "run", run__steps=1))
    launch.export(tmp_path / "run", tmp_path / "out")
    for folder in (tmp_path / "run/checkpoints/step_000001", tmp_path / "out"):
        written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        assert (written["architectures"], written["model_type"]) == (["Qwen3ForCausalLM"], "qwen3")
        assert type(load_as_transformers(folder)[0]) is transformers.Qwen3ForCausalLM


@pytest.mark.parametrize("pad", [[7], None, "absent"])
@pytest.mark.parametrize(("eos", "expected"), [(5, (5,)), ([5, 6], (5, 6)), (None, (3,))])
def test_E_10_pad_and_generation_config_are_not_needed(tmp_path, pad, eos, expected):
    """The end token comes from config.json, else from the tokenizer. No pad is read: nothing here is padded."""
    folder = small_folder(tmp_path / "m", raw={} if pad == "absent" else {"pad_token_id": pad})
    (folder / "generation_config.json").unlink()
    with_config(folder, eos_token_id=eos)
    assert eos_ids(folder) == expected
    engine = exactrl.Engine(str(folder), kv_tokens=512)
    for completion in engine.generate(["1+2\n"] * 20, SamplingParams(60, 2.0)):
        ended = completion.token_ids[-1] in expected
        assert completion.finish_reason == ("stop" if ended else "length")
        assert not set(expected) & set(completion.token_ids[:-1])
    launch.train(recipe(folder, write_rows(tmp_path / "rows.jsonl", 4), tmp_path / "run", run__steps=1))
    assert eos_ids(tmp_path / "run/checkpoints/step_000001") == expected


class Phases(launch.Silent):
    """The steps that were complete when a run evaluated; 0 is before the first."""

    def __init__(self) -> None:
        self.step, self.evaluated = 0, []

    def on_start(self, info) -> None:
        self.step = info["resumed_after_step"]

    def on_step(self, metrics) -> None:
        self.step = metrics["step"]

    def on_progress(self, phase, done, total) -> None:
        if phase == "eval" and done == total:
            self.evaluated.append(self.step)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """(a run of 12 steps; the same stopped at 5, gone on to 8, stopped, gone on to 12; what the three parts saw)."""
    root = tmp_path_factory.mktemp("parts")
    model, data = small_folder(root / "m"), write_rows(root / "rows.jsonl", 7)
    settings = {
        "train__dynamic_sampling": True, "reward__name": "tests.cases.small:odd_sum", "run__eval_every": 2,
        "data__eval": {"held": str(data)}, "run__keep_checkpoints": 9, "rollout__samples_per_prompt": 2,
    }  # fmt: skip
    launch.train(recipe(model, data, root / "whole", run__steps=12, **settings))
    seen = []
    for steps in (5, 8, 12):
        seen.append(Phases())
        launch.train(recipe(model, data, root / "parts", run__steps=steps, **settings), seen[-1], resume=True)
    return root / "whole", root / "parts", seen


def drawn(out: Path) -> list[list[tuple]]:
    return [[(s["id"], s["token_ids"], s["reward"]) for s in samples_of(out, step)] for step in range(1, 13)]


def test_E_19_prompts_go_on_where_they_stopped_twice(parts):
    whole, resumed, _ = parts
    assert drawn(resumed) == drawn(whole)
    digests = [[row["train/weight_digest"] for row in rows_of(out)] for out in (whole, resumed)]
    assert digests[0] == digests[1]
    # Neither a fixed number of prompts a step, which would make a step number enough, nor a single epoch.
    assert len({row["rollout/num_samples"] for row in rows_of(whole)}) > 1
    cursors = [read_state(resumed / f"checkpoints/step_{step:06d}")["cursor"] for step in (5, 8, 12)]
    assert cursors == sorted(set(cursors))
    assert cursors[0] > 7


def test_E_32_no_evaluation_is_made_twice(parts):
    """Every second step and the last of each part: step 8 was evaluated before the stop, not again after it."""
    _, _, (first, second, third) = parts
    assert first.evaluated == [0, 1, 3, 4]  # before step 1; in steps 2, 4 and 5, which are not over then
    assert second.evaluated == [5, 7]
    assert third.evaluated == [9, 11]


def state_of(folder: Path) -> dict[str, tuple]:
    """What any write would change: a folder's own time, too, which a file made and removed again leaves behind."""
    paths = [folder, *folder.rglob("*")]
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size, p.read_bytes() if p.is_file() else None) for p in paths}


def test_E_29_nothing_is_written_to_the_models_folder(tmp_path):
    """Root may write anyway, so the permissions alone would show nothing."""
    model = small_folder(tmp_path / "m")
    for path in model.iterdir():
        path.chmod(0o444)
    model.chmod(0o555)
    before, data = state_of(model), write_rows(tmp_path / "rows.jsonl", 4)
    launch.train(recipe(model, data, tmp_path / "run", run__steps=1, train__kl_coef=0.1))
    launch.export(tmp_path / "run", tmp_path / "out")
    exactrl.Engine(str(model), kv_tokens=64).generate(["1+2\n"], SamplingParams(4))
    assert state_of(model) == before
    assert os.access(tmp_path / "out/model.safetensors", os.W_OK)  # and what is copied from it can be written


def live_bytes() -> int:
    gc.collect()
    return sum(t.numel() * t.element_size() for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter))


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def test_E_30_ten_saves_keep_memory_flat_and_hold_the_live_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # 300 MB of it would take seconds, and memory is the question
    c = config(vocab_size=2000, hidden_size=256, intermediate_size=512)
    trainer = make_trainer(c=c)
    samples = roll_out(make_engine(c=c), workload()[:4])
    size = sum(p.numel() for p in trainer.parameters) * 4
    assert size > 4 << 20
    live, resident = [], []
    for number in range(10):
        if number < 3:
            trainer.step(samples, audit=False, observe=unobserved)
        folder = tmp_path / f"c{number}"
        save_checkpoint(trainer, folder, {"step": number}, tmp_path)
        saved = digest_of((name, [tensor]) for name, tensor in sorted(read_tensors(folder)))
        assert saved == digest_of((name, [tensor]) for name, tensor in sorted(named_masters(trainer.model)))
        live.append(live_bytes())
        resident.append(resident_bytes())
    assert len(set(live[2:])) == 1
    assert resident[-1] - resident[2] < size  # 7 saves keep less than one copy of the weights


@pytest.fixture
def shards(tmp_path):
    """(folder, its files) of a model in at least three files."""
    sharded(tmp_path / "m", tied=False)
    files = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(files) >= 3
    return tmp_path / "m", files


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(folder, EXACT, torch.float32, trainable=False)
    return str(caught.value)


def test_E_31_a_missing_shard_is_named(shards):
    folder, files = shards
    files[1].unlink()
    assert files[1].name in refusal(folder)


def test_E_31_a_cut_shard_is_named(shards):
    folder, files = shards
    files[1].write_bytes(files[1].read_bytes()[:-10])
    assert f"{files[1]}: not a readable safetensors file" in refusal(folder)


@pytest.mark.parametrize("index_too", [False, True])
def test_E_31_a_renamed_key_is_named(shards, index_too):
    """In the file alone, and in file and index alike, where only the model knows better."""
    folder, files = shards
    tensors = load_file(files[1])
    old = sorted(tensors)[0]
    new = old.replace(".weight", ".wieght")
    save_file({new if name == old else name: tensor for name, tensor in tensors.items()}, files[1])
    if index_too:
        index = {new if name == old else name: where for name, where in weight_map(folder).items()}
        (folder / INDEX).write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    text = refusal(folder)
    assert repr(new) in text or repr(old) in text
    assert ("is not of this model" if index_too else f"stands in only one of the file and {INDEX}") in text


def test_E_31_a_missing_key_is_named(shards):
    folder, files = shards
    tensors = load_file(files[1])
    gone = sorted(tensors)[0]
    del tensors[gone]
    save_file(tensors, files[1])
    assert gone in refusal(folder)
    index = {name: where for name, where in weight_map(folder).items() if name != gone}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    assert f"1 tensors are missing, the first is {gone}" in refusal(folder)
