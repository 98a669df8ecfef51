"""Model folders, data and recipes so small that a whole run takes a fraction of a second."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from exactrl.config import Config, make_config
from exactrl.model.config import ASSETS, ModelConfig
from exactrl.model.folder import save_model
from tests.model.test_qwen3 import build, config

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def small_config(**changes: Any) -> ModelConfig:
    """For the bundled tokenizer, whose tokens are 112."""
    return config(**{"vocab_size": 112, "raw": {"eos_token_id": 3}, **changes})


def small_folder(folder: Path, *, seed: int = 0, shard_bytes: int = 5 << 30, **changes: Any) -> Path:
    """A model folder with random weights of `small_config(**changes)` and the bundled tokenizer."""
    save_model(build(small_config(**changes), seed=seed), folder, shard_bytes=shard_bytes)
    for name in TOKENIZER:
        shutil.copyfile(ASSETS / "tiny" / name, folder / name)
    return folder


def write_rows(path: Path, count: int, **columns: Any) -> Path:
    """Prompts "1+0\\n", "1+1\\n", ... with their sums, all of one length up to 10; `columns` are in every row."""
    rows = [{"id": f"p{i}", "prompt": f"1+{i}\n", "label": str(1 + i), **columns} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def token_sum(sample: Any) -> float:
    """A reward that nearly always differs within a group."""
    return float(sum(sample.token_ids) % 11)


def recipe(model: Path, data: Path, out: Path, **changes: Any) -> Config:
    """2 steps of 2 prompts x 3 samples, 8 tokens each. `changes` are section__key = value."""
    table: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": str(data), "id_key": "id"},
        "reward": {"name": "tests.cases.small:token_sum"},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 3, "max_new_tokens": 8, "kv_tokens": 512},
        "train": {"lr": 1e-2},
        "run": {"steps": 2, "out": str(out)},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        table.setdefault(section, {})[key] = value
    return make_config(table)


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def samples_of(out: Path, step: int) -> list[dict[str, Any]]:
    lines = (out / f"samples/step_{step:06d}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def two_numbers(sample: Any) -> dict[str, float]:
    """A reward of two entries, for reward.key."""
    return {"sum": float(sum(sample.token_ids) % 11), "first": float(sample.token_ids[0])}


def slow(sample: Any) -> float:
    """Takes longer than some limits."""
    time.sleep(0.02)
    return token_sum(sample)


def failing(sample: Any) -> float:
    """Has no reward for the first sample of a group."""
    if sample.sample_index == 0:
        raise ValueError("no reward")
    return token_sum(sample)


def always_one(sample: Any) -> float:
    """No group has a learning signal."""
    return 1.0


def odd_sum(sample: Any) -> float:
    """A reward that is often the same in a whole group, so that dynamic sampling draws again."""
    return float(sum(sample.token_ids) % 2)
