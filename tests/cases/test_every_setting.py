"""D-36: every setting changes what a run does, or every value but its default is refused. None is read and forgotten.

A case is a setting, another value, the settings around it that bring out its effect, and where the effect is seen. Two
runs differ in that one setting; what they are compared by comes from the run folder, never from the settings.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from exactrl import launch
from exactrl.config import Config, SftConfig, make_config, make_sft_config
from exactrl.errors import ConfigError, ExactRLError
from exactrl.rl.resume import checkpoints
from exactrl.train.checkpoint import file_digest
from tests.cases.small import recipe, rows_of, samples_of, small_folder, write_rows
from tests.train.helpers import one_torch_thread  # noqa: F401

HERE = "tests.cases.small"
REFUSED = {
    "contract.name": "exact-v0", "rollout.backend": "sglang", "rollout.tensor_parallel": 2, "train.backend": "fsdp",
    "train.tensor_parallel": 2, "train.context_parallel": 2, "train.pipeline_parallel": 2,
    "train.activation_checkpointing": "full", "run.trackers": ["wandb"],
}  # fmt: skip

# Contexts: settings around a case. Every fifth token ends a response, so that lengths differ; minibatches after the
# first have ratios a little, or far, from 1.
STOPS = {"rollout__stop_token_ids": list(range(0, 112, 5))}
NEAR = {"train__minibatches": 3, "train__lr": 0.02}
FAR = {"train__minibatches": 3, "train__lr": 0.3}
KL = {"train__kl_coef": 0.5}
CHAT = {"model__path": "chat", "data__apply_chat_template": True}
EVAL = {"data__eval": {"held": "b"}, "run__eval_every": 1, "run__eval_temperature": 1.0}

# setting -> (another value, context, where the effect is seen: all of the places named). Names of World.paths stand for
# folders and files.
ACTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "model.path": ("other", {}, "tokens"),
    "model.dtype": ("bfloat16", {}, "logprobs"),
    "contract.true_on_policy": (False, {}, "logprobs"),
    "contract.k_leaves": (2, {}, "logprobs"),
    "contract.residual_dtype": ("float32", {"model__dtype": "bfloat16"}, "logprobs"),
    "data.train": ("b", {}, "prompts"),
    "data.eval": ({"held": "b", "more": "a"}, EVAL, "metrics"),
    "data.prompt_key": ("question", {}, "prompts"),
    "data.label_key": ("id", {}, "labels"),
    "data.label_pattern": (r"(\d)$", {}, "labels"),
    "data.id_key": ("", {}, "ids"),
    "data.apply_chat_template": (True, {"model__path": "chat"}, "prompts"),
    "data.enable_thinking": (True, CHAT, "prompts"),
    "data.max_prompt_tokens": (4, {"data__overlong_prompts": "filter"}, "counts"),
    "data.overlong_prompts": ("filter", {"data__max_prompt_tokens": 4}, "error"),
    "data.shuffle": (False, {}, "ids"),
    "data.dedupe": (True, {"data__train": "repeated"}, "counts"),
    "reward.name": (f"{HERE}:always_one", {}, "rewards"),
    "reward.timeout_s": (0.001, {"reward__name": f"{HERE}:slow"}, "error"),
    "reward.key": ("first", {"reward__name": f"{HERE}:two_numbers", "reward__key": "sum"}, "rewards"),
    "reward.on_error": ("zero", {"reward__name": f"{HERE}:failing", "reward__on_error": "drop"}, "rewards"),
    "rollout.prompts_per_step": (3, {}, "rollout/num_samples"),
    "rollout.samples_per_prompt": (4, {}, "rollout/num_samples"),
    "rollout.max_new_tokens": (5, {}, "rollout/response_len/max"),
    "rollout.temperature": (0.5, {}, "tokens"),
    "rollout.stop_token_ids": ([*range(50)], {}, "rollout/response_len/mean"),
    "rollout.seed": (1, {}, "tokens"),
    "rollout.max_concurrent": (2, {}, "rollout/engine_steps"),
    "rollout.kv_tokens": (64, {"rollout__max_new_tokens": 40}, "rollout/preemptions"),
    "rollout.chunk_tokens": (4, {}, "rollout/engine_steps"),
    "train.lr": (0.02, {}, "weights"),
    "train.lr_schedule": ("linear", {}, "train/lr"),
    "train.warmup_steps": (1, {"run__steps": 3}, "train/lr"),
    "train.min_lr_ratio": (0.5, {"train__lr_schedule": "linear"}, "train/lr"),
    "train.weight_decay": (0.5, {}, "weights"),
    "train.betas": ([0.5, 0.6], {}, "weights"),
    "train.grad_clip": (0.01, {}, "weights"),
    "train.max_tokens_per_microbatch": (20, {}, "weights"),
    "train.algorithm": ("reinforce_pp", {}, "weights"),
    "train.minibatches": (2, {}, "weights"),
    "train.loss_aggregation": ("sequence-mean", STOPS, "weights"),
    "train.clip_low": (0.01, NEAR, "train/pg_clipfrac"),
    "train.clip_high": (0.01, NEAR, "train/pg_clipfrac"),
    "train.dual_clip": (1.01, FAR, "train/pg_clipfrac"),
    "train.entropy_coef": (0.5, {}, "weights"),
    "train.overlong_cache": (6, STOPS, "weights"),
    "train.overlong_filter": (True, STOPS, "rollout/overlong_filtered"),
    "train.kl_coef": (0.5, {}, "train/kl"),
    "train.kl_estimator": ("k1", KL, "train/kl train/loss"),
    "train.kl_in": ("reward", KL, "weights"),
    "train.reference": ("other", KL, "train/kl"),
    "train.dynamic_sampling": (True, {}, "rollout/sampling_rounds"),
    "train.max_sampling_rounds": (2, {"train__dynamic_sampling": True, "reward__name": f"{HERE}:always_one"}, "error"),
    "run.steps": (3, {}, "metrics"),
    "run.eval_every": (1, {"data__eval": {"held": "b"}}, "metrics"),
    "run.eval_samples": (2, EVAL, "metrics"),
    "run.eval_temperature": (0.0, EVAL, "eval/held/mean"),
    "run.checkpoint_every": (1, {}, "checkpoints"),
    "run.keep_checkpoints": (1, {"run__checkpoint_every": 1}, "checkpoints"),
    "run.audit_every": (0, {}, "train/rescore_mismatch_tokens"),
    "run.device": ("cuda", {"model__dtype": "bfloat16"}, "error"),
    "run.out": ("elsewhere", {}, "folder"),
}  # fmt: skip

ROWS = {"run__steps": 0, "run__epochs": 2}
SFT_ACTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "model.path": ("other", {}, "weights"),
    "model.dtype": ("bfloat16", {}, "train/loss"),
    "model.init": ("random", {}, "weights"),
    "model.seed": (1, {"model__init": "random"}, "weights"),
    "contract.true_on_policy": (False, {}, "weights"),
    "contract.k_leaves": (2, {}, "weights"),
    "contract.residual_dtype": ("float32", {"model__dtype": "bfloat16"}, "train/loss"),
    "data.train": ("b", {}, "counts"),
    "data.eval": ({"held": "b", "more": "a"}, {"data__eval": {"held": "b"}, "run__eval_every": 1}, "metrics"),
    "data.prompt_key": ("question", {}, "weights"),
    "data.response_key": ("question", {}, "weights"),
    "data.id_key": ("label", {"data__train": "repeated", "data__id_key": "id"}, "error"),
    "data.append_eos": (False, {}, "weights"),
    "data.max_tokens": (6, {"data__overlong_rows": "filter"}, "counts"),
    "data.overlong_rows": ("filter", {"data__max_tokens": 6}, "error"),
    "data.shuffle": (False, {}, "weights"),
    **{key: ACTS[key] for key in ACTS if key in ("train.lr", "train.lr_schedule", "train.weight_decay", "train.betas")},
    "train.warmup_steps": (1, {}, "train/lr"),
    "train.min_lr_ratio": (0.5, {"train__lr_schedule": "linear"}, "train/lr"),
    "train.grad_clip": (0.01, {}, "weights"),
    "train.max_tokens_per_microbatch": (12, {}, "weights"),
    "train.batch_size": (3, {}, "weights"),
    "train.loss_aggregation": ("sequence-mean", {}, "weights"),
    "run.steps": (3, {}, "metrics"),
    "run.epochs": (3, ROWS, "metrics"),
    "run.eval_every": (1, {"data__eval": {"held": "b"}}, "metrics"),
    "run.checkpoint_every": (1, {}, "checkpoints"),
    "run.keep_checkpoints": (1, {"run__checkpoint_every": 1}, "checkpoints"),
    "run.device": ("cuda", {"model__dtype": "bfloat16"}, "error"),
    "run.out": ("elsewhere", {}, "folder"),
    "run.seed": (1, {}, "weights"),
}  # fmt: skip


@dataclass
class World:
    """Folders and files by the names that cases use, and the runs that were made already."""

    root: Path
    paths: dict[str, str]
    seen: dict[str, dict[str, Any]] = field(default_factory=dict)
    number: Iterator[int] = field(default_factory=itertools.count)

    def run(self, kind: str, changes: dict[str, Any]) -> dict[str, Any]:
        """What a run did, by place. Runs with the same settings are made once."""
        key = json.dumps([kind, changes], sort_keys=True)
        if key not in self.seen:
            self.seen[key] = self._run(kind, changes)
        return self.seen[key]

    def _run(self, kind: str, changes: dict[str, Any]) -> dict[str, Any]:
        given = {key: self._real(value) for key, value in changes.items()}
        out = self.root / f"{kind}{next(self.number)}" / given.pop("run__out", "run")
        try:
            if kind == "train":
                launch.train(recipe(given.pop("model__path", self.paths["model"]), self.paths["a"], out, **given))
            else:
                launch.sft(sft_recipe(self.paths, out, given))
        except ExactRLError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {**what_it_did(out), "folder": out.name}

    def _real(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._real(entry) for name, entry in value.items()}
        return self.paths.get(value, value) if isinstance(value, str) else value


def sft_recipe(paths: dict[str, str], out: Path, changes: dict[str, Any]) -> SftConfig:
    """2 steps of 4 rows."""
    table: dict[str, dict[str, Any]] = {
        "model": {"path": paths["model"], "dtype": "float32"}, "data": {"train": paths["a"], "response_key": "label"},
        "train": {"lr": 1e-2, "batch_size": 4}, "run": {"steps": 2, "out": str(out)},
    }  # fmt: skip
    for name, value in changes.items():
        section, key = name.split("__")
        table.setdefault(section, {})[key] = value
    return make_sft_config(table)


def what_it_did(out: Path) -> dict[str, Any]:
    """By place: metrics by name (a list over steps), samples column by column, weights, files."""
    rows = rows_of(out)
    names = {name for row in rows for name in row if not name.startswith("perf/")}
    samples = [s for row in rows if (out / "samples").exists() and any((out / "samples").iterdir())
               for s in samples_of(out, row["step"])]  # fmt: skip
    columns = {
        "prompts": "prompt_token_ids", "tokens": "token_ids", "logprobs": "logprob_bits", "labels": "label",
        "ids": "id", "rewards": "reward",
    }  # fmt: skip
    last = checkpoints(out)[-1][1]
    return {
        **{place: [s[column] for s in samples] for place, column in columns.items()},
        **{name: [row.get(name) for row in rows] for name in names},
        "metrics": [sorted(name for name in row if not name.startswith("perf/")) for row in rows],
        "weights": file_digest(last / "model.safetensors"),
        "checkpoints": [path.name for _, path in checkpoints(out)],
        "counts": json.loads((out / "environment.json").read_text(encoding="utf-8"))["data"],
        "error": None,
    }


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("settings")
    chat = small_folder(root / "chat")
    (chat / "chat_template.jinja").write_text(
        "{{ messages[-1].content }}{% if enable_thinking %}\n{% else %}={% endif %}", encoding="utf-8"
    )
    repeated = root / "repeated.jsonl"
    once = write_rows(repeated, 4, question="2+2\n").read_text(encoding="utf-8")
    repeated.write_text(once + once.replace('"id": "p', '"id": "q'), encoding="utf-8")
    paths = {
        "model": small_folder(root / "model"), "other": small_folder(root / "other", seed=1), "chat": chat,
        "a": write_rows(root / "a.jsonl", 12, question="2+2\n"), "b": write_rows(root / "b.jsonl", 5, question="2+2\n"),
        "repeated": repeated,
    }  # fmt: skip
    return World(root, {name: str(path) for name, path in paths.items()})


def require_effect(world: World, kind: str, key: str, case: tuple[Any, dict[str, Any], str]) -> None:
    value, context, places = case
    name = key.replace(".", "__")
    before, after = world.run(kind, context), world.run(kind, {**context, name: value})
    if places != "error":
        assert (before.get("error"), after.get("error")) == (None, None)
    for place in places.split():
        assert before.get(place) != after.get(place), place


@pytest.mark.parametrize("key", ACTS)
def test_D_36_every_setting_of_an_rl_run_acts(world, key):
    require_effect(world, "train", key, ACTS[key])


@pytest.mark.parametrize("key", SFT_ACTS)
def test_D_36_every_setting_of_a_supervised_run_acts(world, key):
    require_effect(world, "sft", key, SFT_ACTS[key])


@pytest.mark.parametrize("key", REFUSED)
def test_D_36_what_is_not_built_is_refused(world, key):
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        recipe(world.paths["model"], world.paths["a"], world.root / "none", **{key.replace(".", "__"): REFUSED[key]})


def test_D_36_no_setting_is_forgotten_here():
    assert set(Config.settings()) == set(ACTS) | set(REFUSED)
    assert set(SftConfig.settings()) == set(SFT_ACTS) | {"contract.name"}
    assert not set(ACTS) & set(REFUSED)


def test_the_same_settings_have_the_same_effect(world):
    """Or a difference would show nothing: two more runs of one recipe agree in every place."""
    for kind in ("train", "sft"):
        assert world._run(kind, {}) == world.run(kind, {})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"train__kl_estimator": "k1"}, "train.kl_coef above 0"),
        ({"train__kl_in": "reward"}, "train.kl_coef above 0"),
        ({"train__max_sampling_rounds": 3}, "train.dynamic_sampling = true"),
        ({"run__eval_samples": 4, "run__eval_temperature": 0.6}, "run.eval_every above 0"),
        ({"run__eval_temperature": 0.6}, "run.eval_every above 0"),
        ({"data__enable_thinking": True}, "data.apply_chat_template = true"),
        ({"reward__name": "math", "reward__key": "score"}, "module:function"),
    ],
)
def test_D_36_a_setting_of_a_feature_that_is_off_is_refused(world, changes, named):
    with pytest.raises(ConfigError) as caught:
        recipe(world.paths["model"], world.paths["a"], world.root / "none", **changes)
    key = next(iter(changes)).replace("__", ".") if "reward__key" not in changes else "reward.key"
    assert f"{key} = " in str(caught.value)
    assert f"has no effect without {named}" in str(caught.value).replace("a reward.name of your own, ", "")
    assert "\n" not in str(caught.value)


def test_D_36_seed_of_weights_that_are_not_drawn_is_refused(world):
    with pytest.raises(ConfigError, match=r"model\.seed = 4 has no effect"):
        sft_recipe(world.paths, world.root / "none", {"model__seed": 4})


def test_D_13_a_feature_that_is_off_asks_for_nothing(world):
    """Every feature is switched off by name, and none of its other settings is there."""
    off = {
        "train": {"kl_coef": 0.0, "dynamic_sampling": False, "overlong_cache": 0, "overlong_filter": False,
                  "dual_clip": 0.0, "entropy_coef": 0.0, "warmup_steps": 0, "lr": 1e-2, "lr_schedule": "constant"},
        "run": {"eval_every": 0, "checkpoint_every": 0, "audit_every": 0, "steps": 1, "out": str(world.root / "off")},
        "data": {"apply_chat_template": False, "train": world.paths["a"]},
        "rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_new_tokens": 3},
        "reward": {"name": f"{HERE}:token_sum"}, "model": {"path": world.paths["model"]},
    }  # fmt: skip
    assert launch.train(make_config(off))["steps"] == 1
