"""Settings and recipes: order, overrides, messages, and the round trip through TOML."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from exactrl.config import Config, describe, find_recipe, load_recipe, make_config, to_toml
from exactrl.config.algorithms import ALGORITHM_RULES
from exactrl.config.recipe import BUNDLED
from exactrl.errors import ConfigError

ROOT = Path(__file__).parent.parent
MINIMAL = {
    "model": {"path": "bundled:tiny"},
    "data": {"train": "train.jsonl"},
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_new_tokens": 8},
    "train": {"lr": 1e-3},
    "run": {"steps": 3},
}


def with_setting(name: str, value: object) -> dict:
    section, key = name.split(".")
    return {**MINIMAL, section: {**MINIMAL.get(section, {}), key: value}}


def message(table: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        make_config(table, "my.toml")
    return str(caught.value)


def test_defaults_are_those_of_the_interfaces():
    config = make_config(MINIMAL)
    assert config.model.dtype == "bfloat16"
    assert config.contract.true_on_policy is True
    assert config.rollout.temperature == 1.0
    assert (config.rollout.max_concurrent, config.rollout.kv_tokens, config.rollout.chunk_tokens) == (256, 0, 2048)
    assert (config.train.clip_low, config.train.clip_high, config.train.betas) == (0.2, 0.28, (0.9, 0.95))
    assert (config.run.keep_checkpoints, config.run.audit_every, config.run.trackers) == (3, 10, ())


def test_config_is_frozen():
    config = make_config(MINIMAL)
    with pytest.raises(ValidationError):
        config.train.lr = 1.0


def test_bundled_recipe_and_its_copy_are_equal():
    assert {p.name for p in BUNDLED.glob("*.toml")} == {p.name for p in (ROOT / "recipes").glob("*.toml")}
    for file in (ROOT / "recipes").glob("*.toml"):
        assert find_recipe(file.stem).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("name", ["tiny", "bundled:tiny", "recipes/tiny.toml"])
def test_bundled_recipe_loads_from_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_recipe(name)
    assert config.data.eval == {"heldout": "bundled:arithmetic/heldout.jsonl"}
    assert config.run.out == "runs/demo"


def test_order_is_defaults_recipe_command_line():
    config = load_recipe("tiny", [("run.steps", "7"), ("run.steps", "9")])
    assert config.run.steps == 9
    assert config.rollout.prompts_per_step == 16
    assert config.train.clip_high == 0.28


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("data.shuffle", "false", False),
        ("contract.true_on_policy", "True", True),
        ("run.steps", "12", 12),
        ("train.lr", "3e-4", 3e-4),
        ("train.lr", "1", 1.0),
        ("rollout.stop_token_ids", "[1, 2]", (1, 2)),
        ("rollout.stop_token_ids", "1,2", (1, 2)),
        ("rollout.stop_token_ids", "", ()),
        ("train.betas", "0.8, 0.99", (0.8, 0.99)),
        ("run.out", "123", "123"),
        ("data.eval", '{ a = "x.jsonl" }', {"a": "x.jsonl"}),
        ("data.eval.more", "y.jsonl", {"heldout": "bundled:arithmetic/heldout.jsonl", "more": "y.jsonl"}),
    ],
)
def test_override_is_parsed_by_the_type_of_its_field(name, text, value):
    config = load_recipe("tiny", [(name, text)])
    section, key = name.split(".")[:2]
    found = getattr(getattr(config, section), key)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("run.steps", 0, "at least 1"),
        ("run.steps", True, "an integer"),
        ("run.steps", 2.0, "an integer"),
        ("run.steps", "3", "an integer"),
        ("train.lr", float("nan"), "a finite number"),
        ("train.lr", float("inf"), "a finite number"),
        ("train.lr", True, "a finite number"),
        ("train.betas", [0.9], "2 values"),
        ("train.betas", [0.9, 1.0], "below 1"),
        ("train.betas", [0.9, True], "a finite number"),
        ("rollout.temperature", 0, "at least 0.001"),
        ("rollout.temperature", 0.0, "at least 0.001"),
        ("rollout.stop_token_ids", [1, -1], "at least 0"),
        ("rollout.seed", -1, "at least 0"),
        ("rollout.seed", 2**63, "at most"),
        ("model.dtype", "float16", '"bfloat16" or "float32"'),
        ("model.path", "", "not empty"),
        ("data.shuffle", 1, "true or false"),
        ("data.eval", "x.jsonl", "a table"),
        ("data.eval", {"a/b": "x.jsonl"}, "letters"),
        ("contract.name", "exact-v0", "exact-v1"),
        ("contract.k_leaves", 3, "power of two"),
        ("reward.name", "maths", '"arithmetic", or "module:function"'),
        ("rollout.backend", "sglang", "not built yet"),
        ("rollout.backend", "vllm", '"native"'),
        ("rollout.tensor_parallel", 2, "not built yet"),
        ("train.backend", "fsdp", "not built yet"),
        ("train.backend", "megatron", "not built yet"),
        ("train.algorithm", "ppo", '"grpo" or "dr_grpo"'),
        ("train.dual_clip", 1.0, "above 1"),
        ("train.dual_clip", -1.0, "at least 0"),
        ("train.entropy_coef", -0.1, "at least 0"),
        ("train.lr_schedule", "step", '"cosine"'),
        ("train.min_lr_ratio", 1.5, "at most 1"),
        ("train.loss_aggregation", "token-sum", '"token-mean"'),
        ("train.tensor_parallel", 2, "not built yet"),
        ("train.context_parallel", 2, "not built yet"),
        ("train.pipeline_parallel", 2, "not built yet"),
        ("train.kl_coef", -0.1, "at least 0"),
        ("train.kl_estimator", "k4", '"k3"'),
        ("train.kl_in", "advantage", '"reward"'),
        ("train.max_sampling_rounds", 1, "at least 2"),
        ("train.activation_checkpointing", "full", "not built yet"),
        ("data.label_pattern", "#### .+", "one group"),
        ("data.label_pattern", "(", "one group"),
        ("run.trackers", ["wandb"], "metrics.jsonl"),
    ],
)
def test_refusal_names_key_value_and_what_is_allowed(name, value, allowed):
    text = message(with_setting(name, value))
    assert text.startswith(f"my.toml: {name} = ")
    assert allowed in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("rollout.temprature", "rollout.temperature"),
        ("rollout.lr", "train.lr"),
        ("rolout.seed", "rollout.seed"),
        ("train.learning_rate", "[train] has: lr"),
        ("nothing.at_all", "sections are: model"),
    ],
)
def test_unknown_override_names_the_nearest(name, meant):
    with pytest.raises(ConfigError, match="command line: unknown setting") as caught:
        load_recipe("tiny", [(name, "1")])
    assert meant in str(caught.value)


def test_unknown_key_and_section_in_a_file_name_file_and_nearest():
    text = message({**with_setting("train.lrr", 1), "rolout": {}, "steps": 3})
    assert "my.toml: unknown setting train.lrr; did you mean train.lr?" in text
    assert "my.toml: unknown section [rolout]; did you mean [rollout]?" in text
    assert "my.toml: unknown section [steps]; did you mean run.steps?" in text


def test_all_problems_come_at_once_with_their_source(tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text(
        '[model]\npath = "x"\n[data]\ntrain = "t"\n[rollout]\nprompts_per_step = 5\nsamples_per_prompt = 2\n'
        "max_new_tokens = 4\n[train]\nlr = -1\nminibatches = 4\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_recipe(file, [("train.clip_low", "2"), ("train.nope", "1")])
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    text = str(caught.value)
    assert f"{file}: section [run] is missing; it needs at least: steps" in text
    assert f"{file}: train.lr = -1 is not allowed" in text
    assert "command line: train.clip_low = 2.0 is not allowed" in text
    assert "command line: unknown setting train.nope" in text
    assert "train.minibatches = 4 does not divide the 10 samples of a step (rollout.prompts_per_step 5" in text


def test_required_key_is_named_with_its_meaning():
    text = message({**MINIMAL, "run": {}})
    assert text == "my.toml: run.steps is required; it takes an integer, at least 1. RL steps."


def test_section_must_be_a_table():
    assert "train must be a table, [train], not 3" in message({**MINIMAL, "train": 3})


def test_group_of_one_is_refused_with_the_reason():
    assert "a group of one is its own mean" in message(with_setting("rollout.samples_per_prompt", 1))


@pytest.mark.parametrize("name", ALGORITHM_RULES)
def test_every_algorithm_parses_by_its_name_alone(name):
    config = make_config({**MINIMAL, "train": {"lr": 1e-3, "algorithm": name}})
    assert (config.train.algorithm, config.train.loss_aggregation) == (name, "auto")
    assert make_config(tomllib.loads(to_toml(config))) == config


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        ({"algorithm": "dr_grpo", "loss_aggregation": "sequence-mean"}, "the bias that dr_grpo removes"),
        ({"algorithm": "gspo", "loss_aggregation": "token-mean"}, "one ratio per response"),
        ({"algorithm": "gspo", "loss_aggregation": "constant-length"}, 'use "auto" or "sequence-mean"'),
        ({"algorithm": "cispo", "loss_aggregation": "sequence-mean"}, "every token's gradient"),
        ({"algorithm": "dapo", "loss_aggregation": "sequence-mean"}, "part of dapo"),
        ({"algorithm": "dapo", "clip_low": 0.2, "clip_high": 0.2}, "train.clip_high = 0.2 is not above"),
        ({"algorithm": "gspo", "dual_clip": 3.0}, "train.dual_clip = 3.0 makes no sense with gspo"),
        ({"algorithm": "cispo", "dual_clip": 3.0}, "train.dual_clip = 3.0 makes no sense with cispo"),
        ({"overlong_cache": 9}, "longer than the longest response (rollout.max_new_tokens 8)"),
        ({"warmup_steps": 3}, "leaves none of the run's 3 steps"),
        ({"min_lr_ratio": 0.1}, 'has no meaning with train.lr_schedule = "constant"'),
        ({"algorithm": "reinforce_pp", "dynamic_sampling": True}, "has a learning signal"),
        ({"reference": "elsewhere"}, "only read with a KL penalty"),
    ],
)
def test_algorithm_settings_that_make_no_sense_together(train, reason):
    text = message({**MINIMAL, "train": {"lr": 1e-3, **train}})
    assert reason in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "train",
    [
        {"algorithm": "dr_grpo", "loss_aggregation": "token-mean"},
        {"algorithm": "grpo", "loss_aggregation": "constant-length", "dual_clip": 3.0},
        {"algorithm": "reinforce_pp", "dual_clip": 1.5, "entropy_coef": 0.01},
        {"algorithm": "dapo", "overlong_cache": 8, "overlong_filter": True, "dynamic_sampling": True},
        {"algorithm": "reinforce_pp", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
        {"kl_coef": 0.1, "reference": "elsewhere"},
        {"warmup_steps": 2, "lr_schedule": "cosine", "min_lr_ratio": 0.1},
    ],
)
def test_algorithm_settings_that_go_together(train):
    make_config({**MINIMAL, "train": {"lr": 1e-3, **train}})


def test_entropy_bonus_needs_exact_ops():
    table = {**MINIMAL, "train": {"lr": 1e-3, "entropy_coef": 0.01}, "contract": {"true_on_policy": False}}
    assert "entropy without a gradient" in message(table)


@pytest.mark.parametrize("name", ALGORITHM_RULES)
def test_one_sample_per_prompt(name):
    def table(prompts):
        rollout = {**MINIMAL["rollout"], "samples_per_prompt": 1, "prompts_per_step": prompts}
        return {**MINIMAL, "rollout": rollout, "train": {"lr": 1e-3, "algorithm": name}}

    if name == "reinforce_pp":
        make_config(table(4))
        assert "distance to the step's mean" in message(table(1))
    else:
        assert f"with {name}: the advantage" in message(table(4))


def test_evaluation_without_data_is_refused():
    assert "data.eval is empty" in message(with_setting("run.eval_every", 5))


def test_a_config_built_in_python_is_checked_too():
    with pytest.raises(ValidationError, match="does not divide"):
        Config.model_validate({**MINIMAL, "train": {"lr": 1e-3, "minibatches": 3}})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[model\n", "line 1"),
        (b"[model]\npath = \n", "line 2"),
        (b'[model]\npath = """x', "line 2, the end of the file"),
        (b"\xff\xfe[model]", "not UTF-8"),
    ],
)
def test_unreadable_recipe_names_file_and_line(content, expected, tmp_path):
    file = tmp_path / "broken.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.toml") as caught:
        load_recipe(file)
    assert expected in str(caught.value)


def test_missing_recipe_names_the_bundled_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"does not exist \(bundled recipes: .*tiny, "):
        load_recipe("tinny")
    with pytest.raises(ConfigError, match="is a folder"):
        load_recipe(tmp_path)


NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,8}", fullmatch=True)
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@st.composite
def tables(draw):
    minibatches = draw(st.integers(1, 4))
    return {
        "model": {"path": draw(st.text(min_size=1)), "dtype": draw(st.sampled_from(["bfloat16", "float32"]))},
        "contract": {"k_leaves": 2 ** draw(st.integers(0, 6)), "true_on_policy": draw(st.booleans())},
        "data": {
            "train": draw(st.text(min_size=1)),
            "eval": draw(st.dictionaries(NAMES, st.text(min_size=1), max_size=3)),
            "id_key": draw(st.text()),
        },
        "reward": {"timeout_s": draw(POSITIVE), "name": draw(st.sampled_from(["math", "dapo", "arithmetic", "a.b:c"]))},
        "rollout": {
            "prompts_per_step": minibatches * draw(st.integers(1, 10**6)),
            "samples_per_prompt": draw(st.integers(2, 64)),
            "max_new_tokens": draw(st.integers(1, 10**9)),
            "temperature": draw(st.floats(0.001, 100)),
            "stop_token_ids": draw(st.lists(st.integers(0, 2**31), max_size=4)),
            "seed": draw(st.integers(0, 2**63 - 1)),
        },
        "train": {
            "lr": draw(POSITIVE),
            "minibatches": minibatches,
            "betas": draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=2)),
        },
        "run": {"steps": draw(st.integers(1, 10**9)), "out": draw(st.text(min_size=1))},
    }


@settings(max_examples=60, deadline=None)
@given(tables())
def test_toml_loads_back_to_an_equal_config(table):
    config = make_config(table)
    assert make_config(tomllib.loads(to_toml(config))) == config


def test_toml_loads_back_through_a_file(tmp_path):
    config = load_recipe("tiny", [("run.out", "a\r\n'\"\\\té")])
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert load_recipe(file) == config


def test_every_setting_is_described():
    assert [row.key for row in describe()] == list(Config.settings())
    assert all(row.help.endswith(".") and row.allowed for row in describe())


def test_configuration_page_is_current():
    spec = importlib.util.spec_from_file_location("make_config_docs", ROOT / "scripts" / "make_config_docs.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text(encoding="utf-8") == script.render()


def test_config_loads_no_torch():
    code = "import sys, exactrl.config; sys.exit('torch' in sys.modules or 'numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
