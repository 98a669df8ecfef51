"""Recipes of `exactrl sft`: defaults, limits, messages, and telling the two kinds of recipe apart."""

from __future__ import annotations

import tomllib

import pytest

from exactrl.config import (
    SftConfig,
    describe,
    find_recipe,
    load_recipe,
    load_sft_recipe,
    make_config,
    make_sft_config,
    to_toml,
)
from exactrl.errors import ConfigError
from tests.test_config import MINIMAL as RL_MINIMAL

MINIMAL = {
    "model": {"path": "bundled:tiny"},
    "data": {"train": "rows.jsonl"},
    "train": {"lr": 1e-3, "batch_size": 4},
    "run": {"steps": 3},
}


def with_settings(**changes: object) -> dict:
    table = {section: dict(keys) for section, keys in MINIMAL.items()}
    for name, value in changes.items():
        section, key = name.split("__")
        table.setdefault(section, {})[key] = value
    return table


def test_defaults():
    c = make_sft_config(MINIMAL)
    assert (c.model.init, c.model.seed, c.model.dtype, c.contract.true_on_policy) == ("folder", 0, "bfloat16", True)
    assert (c.data.prompt_key, c.data.response_key, c.data.append_eos, c.data.overlong_rows) == (
        "prompt", "response", True, "error",
    )  # fmt: skip
    assert (c.train.loss_aggregation, c.train.betas, c.train.grad_clip) == ("token-mean", (0.9, 0.95), 1.0)
    assert (c.run.epochs, c.run.eval_every, c.run.seed) == (0, 0, 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run__epochs": 2}, "run.steps = 3 and run.epochs = 2 are both set; exactly one"),
        ({"run__steps": 0}, "run.steps = 0 and run.epochs = 0 are both 0; exactly one"),
        ({"run__steps": -1}, "run.steps = -1 is not allowed: it takes an integer, at least 0"),
        ({"train__warmup_steps": 3}, "leaves none of the run's 3 steps"),
        ({"train__min_lr_ratio": 0.1}, "has no meaning"),
        ({"train__batch_size": 0}, "at least 1"),
        ({"train__lr": float("nan")}, "a finite number"),
        ({"train__loss_aggregation": "constant-length"}, '"token-mean" or "sequence-mean"'),
        ({"run__eval_every": 2}, "data.eval is empty"),
        ({"model__init": "zeros"}, '"folder" or "random"'),
        ({"data__overlong_rows": "cut"}, '"error" or "filter"'),
        ({"train__bach_size": 1}, "unknown setting train.bach_size; did you mean train.batch_size?"),
        ({"data__respons_key": "x"}, "did you mean data.response_key?"),
        ({"runn__epochs": 1}, "unknown section [runn]; did you mean [run]?"),
    ],
)
def test_refusals(changes, reason):
    with pytest.raises(ConfigError) as caught:
        make_sft_config(with_settings(**changes), "my.toml")
    assert str(caught.value).startswith("my.toml: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_epochs_instead_of_steps():
    assert make_sft_config(with_settings(run__steps=0, run__epochs=2, train__warmup_steps=50)).run.epochs == 2


def test_toml_loads_back(tmp_path):
    config = load_sft_recipe("tiny_sft", [("data.eval.more", "x.jsonl"), ("train.betas", "0.5,0.6"), ("run.seed", "7")])
    assert (config.data.eval["more"], config.train.betas, config.run.seed) == ("x.jsonl", (0.5, 0.6), 7)
    assert make_sft_config(tomllib.loads(to_toml(config))) == config
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert load_sft_recipe(tmp_path / "c.toml") == config


def test_overrides_name_the_nearest_setting_of_this_kind():
    with pytest.raises(ConfigError, match=r"command line: unknown setting rollout\.seed; did you mean model\.seed\?"):
        load_sft_recipe("tiny_sft", [("rollout.seed", "1")])
    with pytest.raises(ConfigError, match=r"unknown setting train\.algorithm"):
        load_sft_recipe("tiny_sft", [("train.algorithm", "grpo")])


@pytest.mark.parametrize(
    ("load", "name", "message"),
    [
        (load_sft_recipe, "tiny", "for `exactrl train`, not for `exactrl sft`, which has no data.label_key"),
        (load_recipe, "tiny_sft", "for `exactrl sft`, not for `exactrl train`, which has no data.response_key"),
    ],
)
def test_a_recipe_of_the_other_kind_is_named_as_such(load, name, message):
    with pytest.raises(ConfigError) as caught:
        load(name)
    assert str(find_recipe(name)) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value), "one sentence, not a list of every foreign key"


def test_every_smallest_recipe_is_told_apart():
    with pytest.raises(ConfigError, match="a recipe for `exactrl train`"):
        make_sft_config(RL_MINIMAL)
    with pytest.raises(ConfigError, match="a recipe for `exactrl sft`"):
        make_config(MINIMAL)


def test_a_stray_setting_does_not_change_the_kind():
    with pytest.raises(ConfigError, match=r"my\.toml: unknown section \[rollout\]"):
        make_sft_config(with_settings(rollout__seed=1), "my.toml")


def test_every_setting_is_described():
    rows = describe(SftConfig)
    assert [row.key for row in rows] == list(SftConfig.settings())
    assert all(row.help.endswith(".") and row.allowed for row in rows)
