"""An RL run from its recipe to its report: what `exactrl train` and exactrl.train call."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exactrl.algo.algorithm import get_algorithm
from exactrl.config import Config, to_toml
from exactrl.launch import build
from exactrl.launch.continuing import Keeper, find_checkpoint, run_identity, take_up
from exactrl.launch.derive import plan
from exactrl.launch.events import Events, Silent
from exactrl.model.config import find_model
from exactrl.ops.cpu.jit import require_denormals
from exactrl.parity.oracle import Oracle
from exactrl.report import write_report
from exactrl.rl import loop
from exactrl.rl.environment import environment
from exactrl.rl.interrupt import StopRequest
from exactrl.rl.resume import checkpoints, read_rows
from exactrl.rl.run_folder import RunFolder
from exactrl.sync.memory import sync
from exactrl.tasks.grading.outcome import count


def train(config: Config, events: Events | None = None, *, resume: bool = False) -> dict[str, Any]:
    """Runs a recipe; returns a summary with `out`, `report` and totals. Raises ExactRLError.

    The run folder is created only when model, data and reward are all in order. `resume` goes on from the newest
    complete checkpoint of run.out, bit for bit as if the run had never stopped; without one it starts anew.
    """
    events = events or Silent()
    begin = time.perf_counter()
    require_denormals()
    folder = find_model(config.model.path)
    path = Path(config.run.out)
    seen = checkpoints(path)
    checkpoint = find_checkpoint(config, path, events.on_note) if resume else None
    if checkpoint and checkpoint.step == config.run.steps:
        return _already_complete(config, path, events, begin)
    task, tokenizer, counts = build.build_task(config, folder)
    trainer = build.build_trainer(config, folder)
    engine = build.build_engine(config, folder, build.optimizer_bytes(trainer))
    stop = tuple(config.rollout.stop_token_ids) or tokenizer.eos_ids
    build.require_stop_tokens(config, engine.model.config.vocab_size)
    settings = build.loop_plan(config, stop)
    build.require_servable(engine, task, settings)
    identity = run_identity(config, trainer)
    if checkpoint:
        take_up(checkpoint, trainer, config.run.steps, config.train.minibatches, identity)
    start = loop.Start(checkpoint.step, checkpoint.cursor) if checkpoint else loop.FROM_SCRATCH
    out = RunFolder(path, go_on_after=start.step if resume else None, seen=seen)
    info = plan(config)
    out.write_text("config.toml", to_toml(config))
    out.write_json("plan.json", info)
    out.write_json("certificate.json", trainer.model.ops.proof)
    out.write_environment({**environment(), "seed": config.rollout.seed, "data": counts}, start.step)
    exact = config.contract.true_on_policy
    request, run = StopRequest(events.on_note), config.run
    keeper = Keeper(
        out, trainer, folder, identity, run.steps, run.checkpoint_every, run.keep_checkpoints, request, events.on_note
    )
    oracle = Oracle(strict=exact, bisect_command=build.check_command(config))
    events.on_start({**info, "data": counts, "resumed_after_step": start.step})

    def on_step(result: loop.StepResult) -> None:
        out.append_metrics(result.metrics)
        out.write_samples(result.step, result.groups)
        events.on_step(result.metrics)
        if result.step == start.step + 1 and (text := nothing_learnt(result)):
            events.on_note(text)
        keeper.after(result.step, result.cursor)

    algorithm = get_algorithm(config.train.algorithm)
    with (
        out.recorded(config.run.steps, write_report, "; go on with --resume"),
        request,
        build.few_threads(exact, trainer),
    ):
        loop.run(settings, engine, trainer, task, algorithm, oracle, sync, on_step, events.on_progress, start)
    write_report(out.path)
    summary = summary_of(path, out.rows, begin)
    events.on_end(summary)
    return summary


def nothing_learnt(result: loop.StepResult) -> str:
    """A note on a first step whose rewards are all equal: mostly the wrong reward, or a task out of reach."""
    rewards = {s.reward for g in result.groups for s in g.samples}
    if len(rewards) > 1:
        return ""
    reasons = [s.reward_reason for g in result.groups for s in g.samples if s.reward_reason]
    verdicts = ", ".join(f"{kind} {n}" for kind, n in count(reasons).items() if n)
    return (
        f"step {result.step}: all {result.metrics['rollout/num_samples']} rewards are {rewards.pop()}, so nothing was "
        f"learnt ({verdicts or 'no verdicts'}; {result.metrics['rollout/failed_rewards']} failed); does reward.name "
        "fit the prompts?"
    )


def _already_complete(config: Config, path: Path, events: Events, begin: float) -> dict[str, Any]:
    events.on_note(f"{path} is complete: all {config.run.steps} steps are done")
    if not (path / "report.html").is_file():
        write_report(path)
    summary = summary_of(path, read_rows(path, config.run.steps), begin)
    events.on_end(summary)
    return summary


def summary_of(path: Path, rows: Sequence[Mapping[str, Any]], begin: float) -> dict[str, Any]:
    """What a run came to, earlier parts of a resumed one included; seconds are of this process."""
    return {
        "out": str(path),
        "steps": len(rows),
        "compared_tokens": sum(row["train/logprob_compared_tokens"] for row in rows),
        "uncompared_tokens": sum(row.get("train/logprob_uncompared_tokens", 0) for row in rows),
        "mismatch_tokens": sum(row["train/logprob_mismatch_tokens"] for row in rows),
        "seconds": time.perf_counter() - begin,
        "report": str(path / "report.html"),
    }
