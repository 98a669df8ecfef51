"""Assembles a supervised run: what `exactrl sft` and exactrl.sft call."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from exactrl.algo.sft import SFT
from exactrl.config import SftConfig, to_toml
from exactrl.config.sft import warmup_ends
from exactrl.errors import ConfigError, DataError, ModelError
from exactrl.launch.build import DTYPES, contract_of, few_threads
from exactrl.launch.events import Events, Silent
from exactrl.model.config import find_model, read_config
from exactrl.model.folder import load_model, save_model
from exactrl.model.qwen3 import Qwen3
from exactrl.model.weights import initial_weights, load_weights
from exactrl.ops import Ops
from exactrl.ops.cpu.jit import require_denormals
from exactrl.rl import sft as loop
from exactrl.rl.environment import environment
from exactrl.rl.run_folder import RunFolder
from exactrl.tasks.supervised import Batches, LoadedExamples, load_examples
from exactrl.tasks.tokenizer import load_tokenizer
from exactrl.train.schedule import learning_rate
from exactrl.train.trainer import Trainer


def sft(config: SftConfig, events: Events | None = None) -> dict[str, Any]:
    """Runs a supervised recipe; returns a summary with `out`, `steps`, `loss` (the last) and `checkpoint` (a model
    folder). Raises ExactRLError. The run folder is created only when model and data are in order."""
    events = events or Silent()
    begin = time.perf_counter()
    require_denormals()
    folder, run = find_model(config.model.path), config.run
    loaded = load_rows(config, folder)
    batches = Batches(loaded[""].examples, config.train.batch_size, run.seed, config.data.shuffle)
    steps = run.steps or run.epochs * batches.per_epoch
    if problem := warmup_ends(config.train.warmup_steps, steps):
        raise ConfigError(problem)
    trainer = build_trainer(config, folder, steps)
    out = RunFolder(Path(run.out))
    counts = {n or "train": {"rows": len(d.examples), "filtered": d.num_filtered} for n, d in loaded.items()}
    out.write_text("config.toml", to_toml(config))
    out.write_json("environment.json", environment() | {"seed": run.seed, "data": counts})
    start = {"model": config.model.path, "rows": len(batches.examples), "filtered": loaded[""].num_filtered}
    events.on_start(start | {"steps": steps, "data": counts})
    summary: dict[str, Any] = {"out": str(out.path), "steps": 0}

    def on_step(step: int, metrics: dict[str, Any]) -> None:
        out.append_metrics(metrics)
        summary.update(steps=step, loss=metrics["train/loss"])
        events.on_step(metrics)
        if step == steps or (run.checkpoint_every and step % run.checkpoint_every == 0):
            save_model(trainer.model, out.checkpoint_path(step), companions=folder, masters=True)
            for problem in out.prune_checkpoints(run.keep_checkpoints):
                events.on_note(problem)

    plan = loop.SftPlan(steps, run.eval_every, config.train.loss_aggregation)
    evals = {name: data.examples for name, data in loaded.items() if name}
    with out.recorded(steps), few_threads(config.contract.true_on_policy, trainer):
        loop.run(plan, trainer, batches.batch, evals, on_step, events.on_progress)
    summary |= {"checkpoint": str(out.checkpoint_path(steps)), "seconds": time.perf_counter() - begin}
    events.on_end(summary)
    return summary


def load_rows(config: SftConfig, folder: Path) -> dict[str, LoadedExamples]:
    """Training rows under the name "", then the held-out sets. Raises DataError, ModelError."""
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ModelError(f"{folder}: training needs the model's tokenizer.json")
    data = config.data
    load = partial(
        load_examples, tokenizer=tokenizer, prompt_key=data.prompt_key, response_key=data.response_key,
        id_key=data.id_key, append_eos=data.append_eos, max_tokens=data.max_tokens, overlong_rows=data.overlong_rows,
    )  # fmt: skip
    loaded = {name: load(path) for name, path in [("", data.train), *data.eval.items()]}
    longest = max(len(e.prompt_token_ids) + len(e.token_ids) for d in loaded.values() for e in d.examples)
    limit = read_config(folder).max_positions
    if longest > limit:
        raise DataError(
            f"the longest row has {longest} tokens, more than the model's max_position_embeddings = {limit}; set "
            f"data.max_tokens = {limit} and data.overlong_rows = 'filter' to leave such rows out"
        )
    return loaded


def build_model(config: SftConfig, folder: Path) -> Qwen3:
    ops = Ops(contract_of(config), config.contract.true_on_policy)
    dtype = DTYPES[config.model.dtype]
    if config.model.init == "folder":
        return load_model(folder, ops, dtype, trainable=True)
    model = Qwen3(read_config(folder), ops, dtype, trainable=True)
    load_weights(model, initial_weights(model.config, config.model.seed), "random weights")
    return model


def build_trainer(config: SftConfig, folder: Path, steps: int) -> Trainer:
    t = config.train
    lr_at = partial(
        learning_rate, peak=t.lr, total_steps=steps, schedule=t.lr_schedule, warmup_steps=t.warmup_steps,
        min_ratio=t.min_lr_ratio,
    )  # fmt: skip
    return Trainer(
        build_model(config, folder), SFT, lr=t.lr, betas=t.betas, weight_decay=t.weight_decay, grad_clip=t.grad_clip,
        max_tokens_per_microbatch=t.max_tokens_per_microbatch, loss_aggregation=t.loss_aggregation, lr_at=lr_at,
    )  # fmt: skip
