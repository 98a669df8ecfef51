"""A model on a data set: `exactrl eval`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from exactrl.config.settings import DataConfig, RewardConfig
from exactrl.contract import get_contract
from exactrl.engine.engine import Engine
from exactrl.launch.build import DTYPES, prompt_keys, require_tokenizer
from exactrl.launch.device import make_ops
from exactrl.launch.events import Progress
from exactrl.model.config import find_model, read_config
from exactrl.model.folder import load_model
from exactrl.rl.evaluation import score
from exactrl.rl.rollout import Draw, assign_rewards, rollout
from exactrl.rl.run_folder import sample_row
from exactrl.tasks.data import load_prompts
from exactrl.tasks.grading.outcome import count
from exactrl.tasks.rewards import resolve_reward
from exactrl.tasks.task import DataTask
from exactrl.types import Request, SamplingParams


def evaluate(
    model: str,
    data: DataConfig,
    reward: RewardConfig,
    *,
    samples: int,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    ks: Sequence[int] | None,
    dtype: str,
    true_on_policy: bool,
    device: str = "cpu",
    max_concurrent: int,
    kv_tokens: int,
    on_progress: Progress,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Summary and rows (as in a run's samples/ files) of `data.train`, each problem once, however often
    it is repeated. Greedy samples are all the same: temperature 0 with more than one of them is the caller's mistake.

    Raises DataError, ModelError, ConfigError, RequestError before any work; what a failed reward does is
    reward.on_error, "drop" counts like "zero".
    """
    folder = find_model(model)
    tokenizer = require_tokenizer(folder, "evaluation")
    loaded = load_prompts(data.train, tokenizer, **{**prompt_keys(data, folder), "dedupe": True})
    prompts = list(loaded.prompts)
    task = DataTask(prompts, {}, tokenizer, resolve_reward(reward.name, reward.timeout_s, reward.key))
    ops = make_ops(device, get_contract("exact-v1"), true_on_policy, dtype, read_config(folder))
    weights = load_model(folder, ops, DTYPES[dtype], trainable=False)
    engine = Engine(weights, max_concurrent=max_concurrent, kv_tokens=kv_tokens)
    params = SamplingParams(max_new_tokens, temperature, tokenizer.eos_ids)
    longest = task.longest_prompt()
    engine.require_servable(Request(longest.id, longest.token_ids, params))
    groups = rollout(engine, prompts, samples, params, Draw(seed, "eval", 0), task, on_progress)
    assign_rewards(groups, task, "stop" if reward.on_error == "stop" else "zero")
    found = score(groups, ks)
    reasons = [s.reward_reason for g in groups for s in g.samples if s.reward_reason]
    summary = {
        "model": model, "data": data.train, "reward": reward.name, "temperature": temperature, "seed": seed,
        "rows": loaded.num_rows, **asdict(found), **({"verdicts": count(reasons)} if reasons else {}),
    }  # fmt: skip
    rows = [sample_row(g.prompt.text, s) for g in groups for s in g.samples]
    for row in rows:
        del row["advantage"], row["in_loss"], row["weight_version"]  # of training only
    return summary, rows
