"""Assembles a supervised run: what `exactrl sft` and exactrl.sft call."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from exactrl.algo.sft import SFT
from exactrl.config import SftConfig, to_toml
from exactrl.config.sft import warmup_ends
from exactrl.errors import ConfigError, DataError
from exactrl.launch.build import DTYPES, few_threads, ops_of, optimizer_settings, require_tokenizer
from exactrl.launch.continuing import Keeper, find_checkpoint, run_identity, take_up
from exactrl.launch.events import Events, Silent
from exactrl.model.config import find_model, read_config
from exactrl.model.folder import load_model
from exactrl.model.qwen3 import Qwen3
from exactrl.model.weights import initial_weights, load_weights
from exactrl.ops.cpu.jit import require_denormals
from exactrl.rl import sft as loop
from exactrl.rl.environment import environment
from exactrl.rl.interrupt import StopRequest
from exactrl.rl.resume import checkpoints
from exactrl.rl.run_folder import RunFolder
from exactrl.tasks.supervised import Batches, LoadedExamples, load_examples
from exactrl.train.trainer import Trainer


def sft(config: SftConfig, events: Events | None = None, *, resume: bool = False) -> dict[str, Any]:
    """Runs a supervised recipe; returns a summary with `out`, `steps`, `loss` (the last) and `checkpoint` (a model
    folder). Raises ExactRLError. The run folder is created only when model and data are in order. `resume` goes on from
    the newest complete checkpoint, bit for bit; without one it starts anew."""
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
    path, identity = Path(run.out), run_identity(config, trainer)
    seen = checkpoints(path)
    checkpoint = find_checkpoint(config, path, events.on_note) if resume else None
    if checkpoint:
        take_up(checkpoint, trainer, steps, 1, identity)
    start = checkpoint.step if checkpoint else 0
    out = RunFolder(path, go_on_after=start if resume else None, seen=seen)
    counts = {n or "train": {"rows": len(d.examples), "filtered": d.num_filtered} for n, d in loaded.items()}
    out.write_text("config.toml", to_toml(config))
    out.write_json("certificate.json", trainer.model.ops.proof)
    out.write_environment({**environment(), "seed": run.seed, "data": counts}, start)
    about = {"model": config.model.path, "rows": len(batches.examples), "filtered": loaded[""].num_filtered}
    events.on_start(about | {"steps": steps, "data": counts, "resumed_after_step": start})

    def on_step(step: int, metrics: dict[str, Any]) -> None:
        out.append_metrics(metrics)
        events.on_step(metrics)
        keeper.after(step, step)

    plan = loop.SftPlan(steps, run.eval_every, config.train.loss_aggregation)
    evals = {name: data.examples for name, data in loaded.items() if name}
    request = StopRequest(events.on_note)
    keeper = Keeper(
        out, trainer, folder, identity, steps, run.checkpoint_every, run.keep_checkpoints, request, events.on_note
    )
    hint = "; go on with --resume"
    with out.recorded(steps, hint=hint), request, few_threads(config.contract.true_on_policy, trainer):
        loop.run(plan, trainer, batches.batch, evals, on_step, events.on_progress, start)
    summary = {
        "out": str(out.path), "steps": len(out.rows), "loss": out.rows[-1]["train/loss"],
        "checkpoint": str(out.checkpoint_path(steps)), "seconds": time.perf_counter() - begin,
    }  # fmt: skip
    events.on_end(summary)
    return summary


def load_rows(config: SftConfig, folder: Path) -> dict[str, LoadedExamples]:
    """Training rows under the name "", then the held-out sets. Raises DataError, ModelError."""
    tokenizer = require_tokenizer(folder)
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
    ops = ops_of(config, folder)
    dtype = DTYPES[config.model.dtype]
    if config.model.init == "folder":
        return load_model(folder, ops, dtype, trainable=True)
    model = Qwen3(read_config(folder), ops, dtype, trainable=True)
    load_weights(model, initial_weights(model.config, config.model.seed), "random weights")
    return model


def build_trainer(config: SftConfig, folder: Path, steps: int) -> Trainer:
    t = config.train
    return Trainer(
        build_model(config, folder), SFT, loss_aggregation=t.loss_aggregation, **optimizer_settings(t, steps)
    )
