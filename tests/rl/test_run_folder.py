"""The run folder: whole files, exact bits, no overwriting."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from exactrl.errors import EnvironmentProblem, NonFiniteError, UsageError
from exactrl.rl import run_folder
from exactrl.rl.run_folder import RunFolder, lock_folder, logprob_bits
from exactrl.types import Group, Prompt, Sample


def files(path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/step_000010/config.json"])
def test_a_folder_with_a_run_is_refused_untouched(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("kept")
    (tmp_path / "note.txt").write_text("kept too")
    before = files(tmp_path)
    with pytest.raises(UsageError, match="already holds a run"):
        RunFolder(tmp_path)
    assert files(tmp_path) == before
    assert not (tmp_path / "samples").exists()


def test_a_run_that_ended_before_its_first_step_does_not_block_its_folder(tmp_path):
    RunFolder(tmp_path / "run").write_failure(ValueError("no"), after_step=0)
    again = RunFolder(tmp_path / "run")
    again.append_metrics({"step": 1})
    again.close()
    assert not (tmp_path / "run" / "failure.json").exists()
    with pytest.raises(UsageError, match="already holds a run"):
        RunFolder(tmp_path / "run")


def test_a_file_in_the_way_is_an_environment_problem(tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(EnvironmentProblem, match="out"):
        RunFolder(tmp_path / "out")


def test_metrics_are_finite_numbers(tmp_path):
    out = RunFolder(tmp_path / "run")
    out.append_metrics({"step": 1, "train/loss": 0.1})
    for value in (float("nan"), float("inf")):
        with pytest.raises(NonFiniteError, match="step 2: metric train/loss"):
            out.append_metrics({"step": 2, "train/loss": value})
    out.append_metrics({"step": 2, "train/loss": 1e-320})
    out.close()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 1, "train/loss": 0.1}, {"step": 2, "train/loss": 1e-320}]


def test_bits_survive_the_file(tmp_path):
    values = np.array([-0.0, -1e-45, -3.4e38, -0.1, -2.0], np.float32)
    sample = Sample("p", 3, (1, 2), [5, 6, 7, 8, 9], values, "length", 2, 1.0, text="a\u2028b", reward=1.0)
    out = RunFolder(tmp_path / "run")
    out.write_samples(7, [Group(Prompt("p", "q", (1, 2), "l"), [sample, sample])])
    lines = (tmp_path / "run/samples/step_000007.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    assert len(lines) == 2
    decoded = np.array([int(b, 16) for b in row["logprob_bits"]], np.uint32)
    assert decoded.tolist() == values.view(np.uint32).tolist()
    assert np.array(row["logprobs"], np.float32).view(np.uint32).tolist() == decoded.tolist()
    assert logprob_bits(values)[:2] == ["80000000", "80000001"]
    assert (row["text"], row["prompt_token_ids"], row["weight_version"]) == ("a\u2028b", [1, 2], 2)


def test_a_failed_write_leaves_no_half_file(tmp_path):
    out = RunFolder(tmp_path / "run")
    (tmp_path / "run/plan.json").mkdir()
    with pytest.raises(EnvironmentProblem, match=r"plan\.json"):
        out.write_json("plan.json", {})
    assert [p.name for p in (tmp_path / "run").iterdir() if ".tmp-" in p.name] == []


def test_old_checkpoints_are_pruned(tmp_path):
    out = RunFolder(tmp_path / "run")
    for step in (2, 10, 4, 100):
        out.checkpoint_path(step).mkdir(parents=True)
    out.prune_checkpoints(2)
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == ["step_000010", "step_000100"]


def test_a_run_made_while_waiting_for_the_lock_is_refused(tmp_path, monkeypatch):
    def slow_lock(path):
        (path / "metrics.jsonl").write_text("another's")
        return lock_folder(path)

    monkeypatch.setattr(run_folder, "lock_folder", slow_lock)
    with pytest.raises(UsageError, match="already holds a run"):
        RunFolder(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "another's"
    lock_folder(tmp_path).release()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_is_full_to_the_end_releases_the_folder(tmp_path):
    """What could not be written is tried once more when the file is closed."""
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    out = RunFolder(tmp_path)
    with pytest.raises(EnvironmentProblem, match="No space left"), out.recorded(3):
        out.append_metrics({"step": 1})
    lock_folder(tmp_path).release()
