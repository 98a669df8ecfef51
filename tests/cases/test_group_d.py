"""Faults seen elsewhere in settings, limits and averages. Gists: docs/cases.md; D-36 is in test_every_setting.py."""

from __future__ import annotations

import inspect
import math
import tomllib

import numpy as np
import pytest
import torch
import typer

from exactrl import launch
from exactrl.algo.losses import token_weights, weighted_sum
from exactrl.cli import main
from exactrl.cli.app import app
from exactrl.config import Config, SftConfig, describe, load_recipe, make_config, make_sft_config, to_toml
from exactrl.config.rules import RL_RULES
from exactrl.config.settings import Recipe
from exactrl.engine.engine import Engine
from exactrl.engine.scheduler import Scheduler
from exactrl.errors import ConfigError, EnvironmentProblem, ParityError
from exactrl.rl.shaping import Shaping
from exactrl.tasks.data import load_prompts
from exactrl.tasks.rewards import resolve_reward
from exactrl.tasks.supervised import load_examples
from exactrl.tasks.task import DataTask
from exactrl.train.trainer import Trainer
from exactrl.types import SamplingParams
from tests.cases.helpers import World, berry_tokenizer
from tests.cases.small import recipe, small_folder, write_rows
from tests.model.test_qwen3 import config
from tests.test_config import MINIMAL, with_setting
from tests.test_config_sft import MINIMAL as SFT_MINIMAL
from tests.train.helpers import (
    make_engine,
    make_trainer,
    one_torch_thread,  # noqa: F401
    request,
    roll_out,
    tokens,
    trajectories,
    unobserved,
)

KINDS = [(Config, "train", "tiny"), (SftConfig, "sft", "tiny_sft")]


def batch_problem(prompts: int, samples: int, minibatches: int) -> str:
    return RL_RULES["rollout.prompts_per_step", "rollout.samples_per_prompt", "train.minibatches"](
        prompts, samples, minibatches
    )


@pytest.mark.parametrize(("samples", "minibatches", "use"), [(7, 8, "use 7"), (12, 8, "use 6 or 12"), (7, 3, "1 or 7")])
def test_D_01_a_batch_that_does_not_divide_is_refused_with_both_numbers(samples, minibatches, use):
    table = {**MINIMAL, "rollout": {"prompts_per_step": 1, "samples_per_prompt": samples, "max_new_tokens": 8}}
    with pytest.raises(ConfigError) as caught:
        make_config({**table, "train": {"lr": 1e-3, "minibatches": minibatches}})
    assert f"train.minibatches = {minibatches} does not divide the {samples} samples of a step" in str(caught.value)
    assert str(caught.value).endswith(use)


def test_D_01_the_values_named_are_the_nearest_that_divide():
    for total in range(1, 40):
        divisors = [n for n in range(1, total + 1) if total % n == 0]
        for wanted in range(1, 50):
            problem = batch_problem(1, total, wanted)
            assert bool(problem) == (wanted not in divisors)
            if problem:
                named = [int(n) for n in problem.rpartition("use ")[2].split(" or ")]
                below, above = [n for n in divisors if n < wanted], [n for n in divisors if n > wanted]
                assert named == [below[-1], *above[:1]]


def booleans(kind: type[Recipe]) -> list[str]:
    return [key for key, field in kind.settings().items() if field.annotation is bool]


@pytest.fixture
def seen(monkeypatch):
    """The settings that commands hand to a run which is not made."""
    found = []

    def stop(settings, *args, **kwargs):
        found.append(settings)
        raise ConfigError("stopped here")

    monkeypatch.setattr(launch, "train", stop)
    monkeypatch.setattr(launch, "sft", stop)
    return found


@pytest.mark.parametrize(
    ("command", "name", "key"),
    [(command, name, key) for kind, command, name in KINDS for key in booleans(kind)],
)
def test_D_34_every_boolean_can_be_turned_off(seen, tmp_path, command, name, key):
    """On by recipe, off by each way to write it; a text is never true because it is not empty."""
    needed = ["--data.apply_chat_template=true"] if key == "data.enable_thinking" else []
    section, _, field = key.partition(".")

    def value(*args: str) -> bool:
        assert main([command, name, *needed, *args]) == 2
        return getattr(getattr(seen.pop(), section), field)

    on = f"--{key}=true"
    assert value(on) is True
    for off in ([f"--no-{key}"], [f"--{key}=false"], [f"--{key}", "false"], [f"--{key}=False"]):
        assert value(on, *off) is False
    for text in ("no", "0", "", "off"):
        assert main([command, name, *needed, f"--{key}={text}"]) == 2
        assert not seen  # refused, not read as true


def test_D_34_every_flag_that_is_on_has_a_flag_that_turns_it_off():
    commands = typer.main.get_command(app).commands
    flags = {
        (name, option.name): option
        for name, command in commands.items()
        for option in command.params
        if getattr(option, "is_flag", False) and option.default is not False
    }
    assert ("train", "true_on_policy") in flags
    assert ("generate", "true_on_policy") in flags
    for option in flags.values():
        assert any(flag.startswith("--no-") for flag in option.secondary_opts), option.name


@pytest.mark.parametrize(("kind", "required"), [(Config, MINIMAL), (SftConfig, SFT_MINIMAL)])
def test_D_35_defaults_in_code_are_those_that_are_documented(kind, required):
    """Built from the classes alone, and read from a file that spells out every default of docs/configuration.md."""
    from_code = kind.model_validate({name: kind.sections()[name](**keys) for name, keys in required.items()})
    text = ""
    for section in kind.sections():
        rows = [row for row in describe(kind) if row.key.startswith(f"{section}.") and row.default != "required"]
        given = {row.key: row.default for row in rows}
        given |= {f"{section}.{key}": repr(value).replace("'", '"') for key, value in required.get(section, {}).items()}
        text += f"[{section}]\n" + "".join(f"{key.partition('.')[2]} = {value}\n" for key, value in given.items())
    make = make_config if kind is Config else make_sft_config
    assert make(tomllib.loads(text)) == from_code == make(required)


def test_D_35_the_bundled_recipe_is_the_file_that_a_run_writes():
    for name in ("tiny", "tiny_dapo"):
        settings = load_recipe(name)
        assert make_config(tomllib.loads(to_toml(settings))) == settings


def test_D_35_functions_have_the_defaults_of_the_settings():
    """Each function that repeats a setting by name, of the kind of run that it is for."""
    functions = [
        (Trainer, Config, "train"), (Engine, Config, "rollout"), (load_prompts, Config, "data"),
        (DataTask, Config, "data"), (resolve_reward, Config, "reward"), (Shaping, Config, "train"),
        (SamplingParams, Config, "rollout"), (load_examples, SftConfig, "data"),
    ]  # fmt: skip
    # These stand for something else there: no limit, the aggregation that "auto" became, a loaded model.
    other = {"max_prompt_tokens", "max_tokens", "loss_aggregation", "reference"}
    compared = 0
    for function, kind, section in functions:
        settings = kind.settings()
        for name, parameter in inspect.signature(function).parameters.items():
            field = settings.get(f"{section}.{name}")
            if field and name not in other and parameter.default is not inspect.Parameter.empty:
                expected = field.get_default(call_default_factory=True)
                assert parameter.default == expected, (function.__name__, name)
                compared += 1
    assert compared > 25


def test_D_35_commands_have_the_defaults_of_the_settings():
    commands = typer.main.get_command(app).commands
    options = {(c, o.name): o.default for c in ("generate", "eval") for o in commands[c].params}
    settings = {key: field.default for key, field in Config.settings().items()}
    for option, key in {
        ("generate", "temperature"): "rollout.temperature", ("generate", "max_concurrent"): "rollout.max_concurrent",
        ("generate", "kv_tokens"): "rollout.kv_tokens", ("generate", "chunk_tokens"): "rollout.chunk_tokens",
        ("generate", "dtype"): "model.dtype", ("generate", "true_on_policy"): "contract.true_on_policy",
        ("eval", "temperature"): "run.eval_temperature", ("eval", "samples"): "run.eval_samples",
        ("eval", "max_concurrent"): "rollout.max_concurrent", ("eval", "kv_tokens"): "rollout.kv_tokens",
        ("eval", "prompt_key"): "data.prompt_key", ("eval", "label_key"): "data.label_key",
        ("eval", "label_pattern"): "data.label_pattern", ("eval", "id_key"): "data.id_key",
        ("eval", "max_prompt_tokens"): "data.max_prompt_tokens", ("eval", "timeout"): "reward.timeout_s",
        ("eval", "chat_template"): "data.apply_chat_template", ("eval", "thinking"): "data.enable_thinking",
        ("eval", "reward"): "reward.name", ("eval", "reward_key"): "reward.key",
        ("eval", "on_error"): "reward.on_error", ("eval", "dtype"): "model.dtype",
    }.items():  # fmt: skip
        assert options[option] == settings[key], option


def test_D_39_a_preempted_response_goes_on_with_what_is_left_of_its_limit(monkeypatch):
    """Limit 100, two sequences in a cache for one and a half: the second loses its blocks after dozens of tokens."""
    lengths, preempt = [], Scheduler._preempt_last

    def watch(self):
        lengths.append(len(self.running[-1].generated_ids))
        preempt(self)

    monkeypatch.setattr(Scheduler, "_preempt_last", watch)
    requests = [request(f"r{i}", tokens(5, i), 100) for i in range(2)]
    found = make_engine(kv_tokens=176).generate(requests)
    assert max(lengths) >= 70
    assert [len(c.token_ids) for c in found] == [100, 100]
    assert sum(c.num_preemptions for c in found) == len(lengths)
    assert trajectories(found) == trajectories(make_engine().generate(requests))


def test_D_40_a_short_prompt_gets_the_response_limit_not_the_context():
    """Context 4096, limit 1024, prompt 50. There is no default that could stand for a limit."""
    c = config(max_positions=4096, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, hidden_size=16)
    (found,) = make_engine(c=c, kv_tokens=4096).generate([request("r", tokens(50, 0), 1024)])
    assert (len(found.token_ids), found.finish_reason) == (1024, "length")
    with pytest.raises(TypeError, match="max_new_tokens"):
        SamplingParams()
    rollout = {key: value for key, value in MINIMAL["rollout"].items() if key != "max_new_tokens"}
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens is required"):
        make_config({**MINIMAL, "rollout": rollout})


class Untouched(launch.Silent):
    def on_progress(self, phase, done, total):
        raise AssertionError(f"{phase} began")


@pytest.mark.parametrize("place", ["file", "under a file", "no permission"])
def test_D_41_a_place_that_cannot_be_written_is_found_before_any_work(tmp_path, place):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    # /proc takes no new folder from anyone, root included.
    out = {"file": tmp_path / "file", "under a file": tmp_path / "file/run", "no permission": "/proc/run"}[place]
    model, data = small_folder(tmp_path / "m"), write_rows(tmp_path / "rows.jsonl", 4)
    with pytest.raises(EnvironmentProblem, match="cannot be used as a run folder"):
        launch.train(recipe(model, data, out, run__checkpoint_every=10), Untouched())


def test_D_41_there_is_always_a_place_for_checkpoints():
    assert make_config(with_setting("run.checkpoint_every", 10)).run.out == "runs/default"
    with pytest.raises(ConfigError, match=r"run\.out"):
        make_config(with_setting("run.out", ""))


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
def test_D_42_a_row_without_tokens_has_no_part_in_an_average(aggregation):
    """Mean logprob -1.5 over one real row, and one row of nothing but padding, which here is a row without tokens."""
    logprobs = torch.tensor([-1.0, -2.0, -1.5])
    weights = torch.from_numpy(np.concatenate(token_weights([3, 0], aggregation)))
    perplexity = math.exp(-float(weighted_sum(logprobs, weights)))
    assert perplexity == pytest.approx(4.481689, abs=1e-5)
    assert perplexity != pytest.approx((math.exp(1.5) + 1) / 2, abs=0.1)  # the mean over both rows


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("nothing", [None, []])
def test_D_44_a_response_without_logprobs_stops_the_run(nothing, strict):
    world = World(berry_tokenizer(), SamplingParams(8), strict=strict)
    generate, before = world.engine.generate, world.trainer.master_digest()

    def without_logprobs(requests, on_progress=None):
        found = generate(requests, on_progress)
        for completion in found:
            completion.logprobs = nothing
        return found

    world.engine.generate = without_logprobs
    with pytest.raises(ParityError, match=r"8 tokens but its logprobs are .*every sampled token needs the float32"):
        world.run(1)
    assert world.trainer.master_digest() == before


@pytest.mark.parametrize("budget", [20, 8192])
def test_D_46_metrics_are_means_over_tokens_not_over_parts(budget):
    """10 and 90 tokens, in two micro-batches or in one: the parts' entropies weigh 1 : 9."""
    requests = [request("short", tokens(5, 0), 10, 1.0), request("long", tokens(5, 1), 90, 0.3)]
    samples = roll_out(make_engine(), requests)

    def entropy(chosen, budget):
        trainer = make_trainer(lr=0.0, max_tokens_per_microbatch=budget)
        return trainer.step(chosen, audit=False, observe=unobserved)["train/entropy"]

    short, long = entropy(samples[:1], 8192), entropy(samples[1:], 8192)
    assert abs(short - long) > 0.1
    assert entropy(samples, budget) == pytest.approx((10 * short + 90 * long) / 100, rel=1e-6)
