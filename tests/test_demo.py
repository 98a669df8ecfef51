"""The main job, shortened: the bundled recipe learns, under preemption and prefix hits, with every token compared."""

from __future__ import annotations

import json

import numpy as np

from exactrl import launch
from exactrl.config import load_recipe


def test_the_bundled_recipe_learns_with_every_token_equal(tmp_path):
    steps = 15
    overrides = [("run.steps", str(steps)), ("run.eval_every", "0"), ("run.out", str(tmp_path / "run"))]
    launch.train(load_recipe("tiny", overrides))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == steps
    for row in rows:
        assert row["train/logprob_compared_tokens"] > 1000
        assert row["train/logprob_uncompared_tokens"] == 0
        assert row["train/logprob_mismatch_tokens"] == 0
        assert row["train/train_rollout_logprob_abs_diff"] == 0.0
        assert row["rollout/response_len/mean"] >= 16
        assert row["rollout/prefix_hit_tokens"] > 1000
    assert [row["step"] for row in rows if "train/rescore_mismatch_tokens" in row] == [1, 10]
    assert all(row.get("train/rescore_mismatch_tokens", 0) == 0 for row in rows)
    assert sum(row["rollout/preemptions"] for row in rows) > 0
    assert len({row["train/compute_digest"] for row in rows}) == steps, "the weights change at every step"
    rewards = [row["rollout/raw_reward"] for row in rows]
    assert np.mean(rewards[:3]) >= 0.15
    assert np.mean(rewards[-3:]) >= np.mean(rewards[:3]) + 0.15
