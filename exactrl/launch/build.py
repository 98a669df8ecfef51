"""Concrete tasks, engines, trainers and loop settings from a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from exactrl.algo.algorithm import get_algorithm
from exactrl.config import Config, SftConfig
from exactrl.config.algorithms import aggregation_of
from exactrl.config.settings import DataConfig, OptimizerConfig
from exactrl.contract import Contract, get_contract
from exactrl.engine.engine import Engine as NativeEngine
from exactrl.errors import ConfigError, ModelError
from exactrl.launch.device import make_ops
from exactrl.model.config import find_model, read_config
from exactrl.model.folder import load_model
from exactrl.model.qwen3 import Qwen3
from exactrl.ops.interface import ModelOps
from exactrl.rl import loop
from exactrl.rl.collect import Collecting
from exactrl.rl.shaping import Shaping
from exactrl.tasks.chat import Message, load_chat_template
from exactrl.tasks.data import load_prompts
from exactrl.tasks.rewards import resolve_reward
from exactrl.tasks.task import DataTask
from exactrl.tasks.tokenizer import Tokenizer, load_tokenizer
from exactrl.train.schedule import learning_rate
from exactrl.train.trainer import Trainer
from exactrl.types import Request, SamplingParams

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


# Below this many parameters torch's part of an exact step (optimizer, gathers) is faster on one thread than on several
# that compete with the kernels' own pool.
SMALL_MODEL = 50_000_000


def contract_of(config: Config | SftConfig) -> Contract:
    c = config.contract
    residual = "float32" if config.model.dtype == "float32" else c.residual_dtype
    return get_contract(c.name, k_leaves=c.k_leaves, residual_dtype=residual)


def ops_of(config: Config | SftConfig, folder: Path) -> ModelOps:
    """Raises as make_ops."""
    exact = config.contract.true_on_policy
    return make_ops(config.run.device, contract_of(config), exact, config.model.dtype, read_config(folder))


def require_tokenizer(folder: Path, what: str = "training") -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ModelError(f"{folder}: {what} needs the model's tokenizer.json")
    return tokenizer


def build_task(config: Config, folder: Path) -> tuple[DataTask, Tokenizer, dict[str, Any]]:
    """Prompts and rewards, tokenizer, and counts per set: rows, unique (different prompts), prompts, and the rows left
    out: filtered, repeated (dedupe).

    Raises DataError, ConfigError, ModelError.
    """
    tokenizer = require_tokenizer(folder)
    data, keys = config.data, prompt_keys(config.data, folder)
    loaded = {name: load_prompts(path, tokenizer, **keys) for name, path in [("", data.train), *data.eval.items()]}
    evals = {name: found.prompts for name, found in loaded.items() if name}
    counts = {
        name or "train": {
            "rows": found.num_rows, "unique": found.num_unique, "prompts": len(found.prompts),
            "filtered": found.num_filtered, "repeated": found.num_repeated,
        }
        for name, found in loaded.items()
    }  # fmt: skip
    reward = resolve_reward(config.reward.name, config.reward.timeout_s, config.reward.key)
    stop = tuple(config.rollout.stop_token_ids) or tokenizer.eos_ids
    task = DataTask(
        loaded[""].prompts, evals, tokenizer, reward, seed=config.rollout.seed, shuffle=data.shuffle,
        stop_token_ids=stop,
    )  # fmt: skip
    return task, tokenizer, counts


def prompt_keys(data: DataConfig, folder: Path) -> dict[str, Any]:
    """The arguments of load_prompts that settings and model fix. Raises ModelError for a missing chat template."""
    return {
        "prompt_key": data.prompt_key, "label_key": data.label_key, "label_pattern": data.label_pattern,
        "id_key": data.id_key, "max_prompt_tokens": data.max_prompt_tokens, "overlong_prompts": data.overlong_prompts,
        "dedupe": data.dedupe, "render": chat_renderer(data, folder) if data.apply_chat_template else None,
    }  # fmt: skip


def chat_renderer(data: DataConfig, folder: Path) -> Callable[[Sequence[Message]], str]:
    """Messages to text with the model's own chat template. Raises ModelError where it has none."""
    template = load_chat_template(folder)
    if template is None:
        raise ModelError(
            f"{folder}: data.apply_chat_template needs a chat template, and there is neither a chat_template.jinja nor "
            "a chat_template in tokenizer_config.json; add one, or use prompts that are plain text"
        )
    return partial(template.render, enable_thinking=data.enable_thinking)


def require_servable(engine: NativeEngine, task: DataTask, settings: loop.Plan) -> None:
    """Raises RequestError, before a run folder exists, when the longest prompt could never be served."""
    longest = task.longest_prompt()
    engine.require_servable(Request(longest.id, longest.token_ids, settings.collecting.sampling))


def require_stop_tokens(config: Config, vocab_size: int) -> None:
    """Raises ConfigError for a stop token that the model cannot sample: no response would ever end at it."""
    if outside := [token for token in config.rollout.stop_token_ids if token >= vocab_size]:
        raise ConfigError(
            f"rollout.stop_token_ids: {outside[0]} is no token of {config.model.path}, whose ids are 0 to "
            f"{vocab_size - 1}; [] takes the model's own end tokens"
        )


def check_command(config: Config) -> str:
    """The ladder on a run's model, under the run's own contract."""
    c = config.contract
    extra = f" --k-leaves {c.k_leaves}" if c.k_leaves != 1 else ""
    extra += f" --residual-dtype {c.residual_dtype}" if c.residual_dtype != "bfloat16" else ""
    extra += f" --device {config.run.device}" if config.run.device != "cpu" else ""
    return f"exactrl check {config.model.path} --dtype {config.model.dtype}{extra}"


def build_engine(config: Config, folder: Path, reserve_bytes: int = 0) -> NativeEngine:
    """`reserve_bytes`: of the memory now free, what the trainer takes later and keeps."""
    r = config.rollout
    model = load_model(folder, ops_of(config, folder), DTYPES[config.model.dtype], trainable=False)
    return NativeEngine(
        model, max_concurrent=r.max_concurrent, kv_tokens=r.kv_tokens, chunk_tokens=r.chunk_tokens,
        reserve_bytes=reserve_bytes,
        max_model_tokens=min(model.config.max_positions, config.data.max_prompt_tokens + r.max_new_tokens),
    )  # fmt: skip


def build_trainer(config: Config, folder: Path) -> Trainer:
    t = config.train
    model = load_model(folder, ops_of(config, folder), DTYPES[config.model.dtype], trainable=True)
    return Trainer(
        model, get_algorithm(t.algorithm, t.dual_clip), minibatches=t.minibatches,
        loss_aggregation=aggregation_of(t.algorithm, t.loss_aggregation), clip_low=t.clip_low, clip_high=t.clip_high,
        kl_coef=t.kl_coef if t.kl_in == "loss" else 0.0, kl_estimator=t.kl_estimator,
        reference=build_reference(config, model) if t.kl_coef else None,
        entropy_coef=t.entropy_coef, max_new_tokens=config.rollout.max_new_tokens,
        recompute_old_logprobs=not config.contract.true_on_policy, **optimizer_settings(t, config.run.steps),
    )  # fmt: skip


def optimizer_settings(t: OptimizerConfig, steps: int) -> dict[str, Any]:
    """The Trainer's arguments that every kind of run has: optimizer, learning rate over `steps`, micro-batches."""
    lr_at = partial(
        learning_rate, peak=t.lr, total_steps=steps, schedule=t.lr_schedule, warmup_steps=t.warmup_steps,
        min_ratio=t.min_lr_ratio,
    )  # fmt: skip
    return {
        "lr": t.lr, "lr_at": lr_at, "betas": t.betas, "weight_decay": t.weight_decay, "grad_clip": t.grad_clip,
        "max_tokens_per_microbatch": t.max_tokens_per_microbatch,
    }  # fmt: skip


def optimizer_bytes(trainer: Trainer) -> int:
    """Both moments of every parameter in fp32, which the first update sets up; gradients come while the engine
    sleeps."""
    return 8 * sum(p.numel() for p in trainer.parameters)


def build_reference(config: Config, policy: Qwen3) -> Qwen3:
    """The frozen reference policy, under the same contract. Raises ModelError for one of another vocabulary."""
    folder = find_model(config.train.reference or config.model.path)
    reference = load_model(folder, policy.ops, policy.dtype, trainable=False)
    if reference.config.vocab_size != policy.config.vocab_size:
        raise ModelError(
            f"{folder}: the reference policy has {reference.config.vocab_size} vocabulary entries, the policy "
            f"{policy.config.vocab_size}; their logprobs cannot be compared"
        )
    return reference


def loop_plan(config: Config, stop_token_ids: tuple[int, ...]) -> loop.Plan:
    r, t, run = config.rollout, config.train, config.run
    return loop.Plan(
        steps=run.steps, audit_every=run.audit_every, eval_every=run.eval_every, kl=t.kl_coef > 0,
        eval_samples=run.eval_samples, eval_temperature=run.eval_temperature,
        collecting=Collecting(
            prompts_per_step=r.prompts_per_step, samples_per_prompt=r.samples_per_prompt,
            sampling=SamplingParams(r.max_new_tokens, r.temperature, stop_token_ids), seed=r.seed,
            on_reward_error=config.reward.on_error,
            max_rounds=t.max_sampling_rounds if t.dynamic_sampling else 1,
        ),
        shaping=Shaping(
            max_length=r.max_new_tokens, overlong_cache=t.overlong_cache, overlong_filter=t.overlong_filter,
            kl_in_reward=t.kl_coef if t.kl_in == "reward" else 0.0, kl_estimator=t.kl_estimator,
        ),
    )  # fmt: skip


@contextmanager
def few_threads(exact: bool, trainer: Trainer) -> Iterator[None]:
    """One torch thread for a small model with exact ops; see SMALL_MODEL."""
    threads = torch.get_num_threads()
    if exact and sum(p.numel() for p in trainer.parameters) < SMALL_MODEL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
