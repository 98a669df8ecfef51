"""RL on a GPU, bit for bit: the tiny recipe, and a model of Qwen3-0.6B's shape with random weights that learns to
sample even token ids. `python -m bench.rl` writes bench/results/rl-h200.json; kernels must be certified for both models
(`python -m bench.rl --make-models FOLDER` makes the second one; then `exactrl certify FOLDER/0.6B`)."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.common import write_result
from bench.parity import config_of
from exactrl import launch
from exactrl.config import Config, load_recipe, make_config
from exactrl.model.config import ASSETS
from exactrl.model.folder import write_folder
from exactrl.model.weights import initial_weights
from exactrl.types import Sample

SUMMED = ("train/logprob_compared_tokens", "train/logprob_uncompared_tokens", "train/logprob_mismatch_tokens",
          "train/rescore_mismatch_tokens")  # fmt: skip
KEPT = (*SUMMED, "step", "train/train_rollout_logprob_abs_diff", "rollout/raw_reward", "train/grad_norm",
        "perf/rollout_time", "perf/train_time", "perf/sync_time", "perf/rollout_tokens_per_sec")  # fmt: skip


def even_ids(sample: Sample) -> float:
    """Share of even token ids: 0.5 for an untrained model."""
    return sum(t % 2 == 0 for t in sample.token_ids) / max(1, len(sample.token_ids))


def make_models(folder: Path) -> None:
    """FOLDER/0.6B: random weights as a fresh Qwen3 has them; with the tiny model's tokenizer most ids have no text."""
    target = folder / "0.6B"
    target.mkdir(parents=True)
    config = config_of("0.6B")
    weights = ((name, tensor.to(torch.bfloat16)) for name, tensor in initial_weights(config, 0))
    write_folder(target, config, weights, "bfloat16", 5 << 30)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (ASSETS / "tiny" / name).is_file():
            shutil.copyfile(ASSETS / "tiny" / name, target / name)


def recipes(models: Path, out: Path, steps: int) -> dict[str, Config]:
    """`models`: the folder that make_models was given."""
    tiny = [("run.device", "cuda"), ("run.out", str(out / "tiny"))]
    prompts = out / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"id": i, "prompt": f"{i}+{i + 1}\n", "label": "0"}) + "\n" for i in range(64))
    )
    shaped = {
        "model": {"path": str(models / "0.6B"), "dtype": "bfloat16"},
        "data": {"train": str(prompts), "id_key": "id"},
        "reward": {"name": "bench.rl:even_ids"},
        "rollout": {"prompts_per_step": 16, "samples_per_prompt": 16, "max_new_tokens": 128, "kv_tokens": 16384},
        "train": {"algorithm": "grpo", "lr": 2e-5, "max_tokens_per_microbatch": 16384},
        "run": {"steps": steps, "audit_every": 5, "out": str(out / "0.6B"), "device": "cuda"},
    }
    return {"tiny": load_recipe("tiny", tiny), "0.6B": make_config(shaped)}


def run(name: str, config: Config) -> dict[str, Any]:
    launch.train(config)
    lines = (Path(config.run.out) / "metrics.jsonl").read_text().splitlines()
    rows = [{key: row[key] for key in KEPT if key in row} for row in map(json.loads, lines)]
    totals = {key: sum(row.get(key, 0) for row in rows) for key in SUMMED}
    rewards = [row["rollout/raw_reward"] for row in rows]
    found = {"model": name, "steps": len(rows), **totals, "first_reward": rewards[0], "last_reward": rewards[-1]}
    print(found, rows[-1], flush=True)
    return {**found, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--make-models", type=Path, help="only make the model folder below this one")
    parser.add_argument("--models", type=Path, default=Path(), help="where --make-models put it")
    parser.add_argument("--only", choices=("tiny", "0.6B"))
    parser.add_argument("--steps", type=int, default=10, help="of the larger model")
    arguments = parser.parse_args()
    if arguments.make_models:
        make_models(arguments.make_models)
        return
    with tempfile.TemporaryDirectory() as folder:
        chosen = recipes(arguments.models, Path(folder), arguments.steps)
        results = [run(name, c) for name, c in chosen.items() if arguments.only in (None, name)]
    summary = {key: sum(r[key] for r in results) for key in SUMMED}
    print(write_result("rl", results, summary, "h200"), summary)


if __name__ == "__main__":
    main()
