"""`exactrl export`: the weights that the engine rolled out with, in a folder that transformers opens."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers

from exactrl import launch
from exactrl.cli import main
from exactrl.contract import get_contract
from exactrl.model.config import find_model
from exactrl.model.folder import load_model
from exactrl.ops import Ops
from tests.model.test_qwen3 import forward_logits
from tests.rl.test_kill import config
from tests.rl.test_run_folder import files
from tests.train.helpers import one_torch_thread  # noqa: F401


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("export") / "run"
    launch.train(config(out))
    return out


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("extra", "row"), [([], 4), (["--step", "4"], 3)])
def test_exports_what_the_engine_read(run, tmp_path, capsys, extra, row):
    """The digest is that of the run's own row, computed then from the engine's weights."""
    assert main(["export", str(run), str(tmp_path / "m"), *extra]) == 0
    assert metrics(run)[row]["train/compute_digest"] in capsys.readouterr().out
    assert json.loads((tmp_path / "m/config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_transformers_opens_it_and_gives_the_same_logits(run, tmp_path, dtype):
    """E-07: architectures names the model class. Logits are compared in float32 arithmetic on the exported weights."""
    launch.export(run, tmp_path / "m", dtype=dtype)
    assert json.loads((tmp_path / "m/config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    theirs, info = transformers.Qwen3ForCausalLM.from_pretrained(
        tmp_path / "m", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = load_model(tmp_path / "m", Ops(get_contract("exact-v1")), torch.float32, trainable=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    ids = torch.tensor(tokenizer.encode("12+34+5=?\n"))
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
        (found,) = forward_logits(ours, [ids])
    assert (found - expected).abs().max() < 5e-5 * expected.abs().max()
    before = load_model(find_model("tiny"), Ops(get_contract("exact-v1")), torch.float32, trainable=False)
    assert (forward_logits(before, [ids])[0] - found).abs().max() > 1e-3  # trained since


def test_a_checkpoint_itself_can_be_exported(run, tmp_path, capsys):
    assert main(["export", str(run / "checkpoints/step_000004"), str(tmp_path / "m")]) == 0
    assert "step 4, bfloat16" in capsys.readouterr().out


def test_what_cannot_be_exported(run, tmp_path, capsys):
    def refused(*arguments) -> str:
        assert main(["export", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    assert "not a run folder" in refused(tmp_path / "none", tmp_path / "m")
    assert "no checkpoint of step 9" in refused(run, tmp_path / "m", "--step", 9)
    (tmp_path / "there").mkdir()
    (tmp_path / "there/kept").write_text("x")
    assert "exists already" in refused(run, tmp_path / "there")
    assert files(tmp_path / "there") == {"kept": b"x"}
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    for path in copy.glob("checkpoints/*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-5])
    message = refused(copy, tmp_path / "m")
    assert "no complete checkpoint" in message
    assert "it should have" in message
    assert not (tmp_path / "m").exists()


def test_a_supervised_run_is_exported_too(tmp_path, capsys):
    import exactrl
    from tests.test_launch_sft import micro

    exactrl.sft(micro(tmp_path / "run", model__dtype="float32"))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "m")]) == 0
    assert "step 6, float32" in capsys.readouterr().out
    assert main(["eval", str(tmp_path / "run"), "bundled:arithmetic/heldout.jsonl@[:2]"]) == 2
    assert "checkpoints/step_000006, or exactrl export" in capsys.readouterr().err
