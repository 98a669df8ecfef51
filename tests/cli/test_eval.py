"""`exactrl eval`: numbers, rows, repeated problems, and what is refused."""

from __future__ import annotations

import json

import pytest

from exactrl import launch
from exactrl.cli import main
from tests.test_launch import metrics_of, micro
from tests.train.helpers import one_torch_thread  # noqa: F401

HELD = ["eval", "tiny", "bundled:arithmetic/heldout.jsonl@[0:24]", "--reward", "arithmetic", "--max-new-tokens", "40"]


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_rows_and_numbers_agree(run, tmp_path):
    code, out, _ = run(*HELD, "--samples", 3, "--temperature", 1, "--out", tmp_path / "rows.jsonl", "--json")
    assert code == 0
    summary = json.loads(out)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 72
    assert summary["mean"] == pytest.approx(sum(r["reward"] for r in rows) / 72)
    assert summary["right"] == sum(r["reward"] > 0 for r in rows) > 0
    assert list(summary["pass_at"]) == ["1", "2", "3"]
    assert 0 < summary["pass_at"]["1"] < summary["pass_at"]["3"] < 1
    assert summary["low"] < summary["mean"] < summary["high"]
    assert [(r["id"], r["sample"]) for r in rows] == [(str(i), s) for i in range(24) for s in range(3)]
    assert {"text", "logprob_bits", "reward_reason"} <= set(rows[0])


def test_limits_change_no_byte(run, tmp_path):
    for name, extra in (("a", []), ("b", ["--max-concurrent", 3, "--kv-tokens", 160])):
        assert run(*HELD, "--samples", 2, "--temperature", 1, "--seed", 5, "--out", tmp_path / name, *extra)[0] == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_D_23_repeated_problems_count_once(run, tmp_path):
    """As the public AIME 2024 file: every problem 32 times, with another index each."""
    problems = [{"prompt": f"{i}+{i}\n", "label": str(2 * i)} for i in range(11, 16)]
    lines = [json.dumps({**p, "extra": n}) for n in range(32) for p in problems]
    (tmp_path / "aime.jsonl").write_text("\n".join(lines))
    code, out, _ = run("eval", "tiny", tmp_path / "aime.jsonl", "--max-new-tokens", 8)
    assert code == 0
    assert out.splitlines()[0] == "5 problems (160 rows), 1 samples each, temperature 0"
    assert "mean@1" in out
    assert "verdicts: " in out  # the math reward says why


def test_greedy_evaluation_is_that_of_training(run, tmp_path):
    """The same problems, weights and rule as a run's first row."""
    _, out, _ = run(*HELD, "--json")
    config = micro(
        tmp_path / "r", run__steps=2, run__eval_every=1, rollout__max_new_tokens=40,
        reward__name="arithmetic", rollout__kv_tokens=4096,
    )  # fmt: skip
    data = config.data.model_copy(update={"eval": {"held": HELD[2]}})
    launch.train(config.model_copy(update={"data": data}))
    row = metrics_of(tmp_path / "r")[0]
    found = json.loads(out)
    assert row["eval/held/mean"] == found["mean"] == row["eval/held/pass@1"]
    assert row["eval/held/ci95"] == pytest.approx((found["high"] - found["low"]) / 2)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--samples", 2], "greedy responses are all the same"),
        (["--k", 3], "pass@3 needs --samples of at least 3"),
        (["--reward", "maths"], "reward"),
        (["--label-key", "answer"], "key 'answer'"),
        (["--chat-template"], "chat template"),
        (["--temperature", "inf"], "not a finite number"),
        (["--max-new-tokens", 600], "the model's limit is 512"),
    ],
)
def test_refused_before_any_work(run, extra, message):
    code, out, err = run(*HELD, *extra)
    assert (code, out) == (2, "")
    assert message in err


def test_failed_rewards_are_counted(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_eval_reward.py").write_text(
        "def f(sample):\n    if sample.prompt_id == '3': raise ValueError('broken')\n    return 1.0\n"
    )
    arguments = [*HELD[:3], "--reward", "my_eval_reward:f", "--max-new-tokens", 4]
    code, _, err = run(*arguments)
    assert code == 2
    assert "ValueError: broken" in err
    code, out, _ = run(*arguments, "--on-error", "zero", "--json")
    assert code == 0
    assert (json.loads(out)["failed"], json.loads(out)["mean"]) == (1, pytest.approx(23 / 24))
