"""The supervised loop: take a batch, update, and now and then score the held-out sets."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from exactrl.algo.losses import token_weights
from exactrl.errors import NonFiniteError
from exactrl.protocols import Trainer
from exactrl.rl.rollout import Progress
from exactrl.types import Sample

Metrics = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SftPlan:
    """Optimizer updates, updates between evaluations (0: never), and how losses are averaged (losses.token_weights)."""

    steps: int
    eval_every: int
    aggregation: str


def run(
    plan: SftPlan,
    trainer: Trainer,
    batch: Callable[[int], tuple[int, list[Sample]]],
    evals: Mapping[str, Sequence[Sample]],
    on_step: Callable[[int, Metrics], None],
    progress: Progress,
    start: int = 0,
) -> None:
    """Runs updates start + 1 to plan.steps; `batch(step)` gives epoch and examples, `on_step(step, metrics)` is called
    after each.

    Held-out losses in a step's row are those after its update, except in the first row: there they are those before
    any update, the baseline. Raises NonFiniteError naming the step whose loss or gradient is not finite; its update is
    not made.
    """
    before = evaluate(plan, 0, trainer, evals, progress) if start == 0 else {}
    for step in range(start + 1, plan.steps + 1):
        begin = time.perf_counter()
        epoch, examples = batch(step)
        progress("train", 0, len(examples))
        metrics: Metrics = {"step": step, "epoch": epoch}
        metrics |= update(step, trainer, examples)
        metrics |= {"train/num_tokens": sum(len(e.token_ids) for e in examples)}
        metrics |= {"train/weight_digest": trainer.master_digest()}
        metrics |= speed(examples, time.perf_counter() - begin)
        if step == 1 < plan.steps:
            metrics |= before
        elif plan.eval_every and (step % plan.eval_every == 0 or step == plan.steps):
            metrics |= evaluate(plan, step, trainer, evals, progress)
        on_step(step, metrics)


def update(step: int, trainer: Trainer, examples: Sequence[Sample]) -> Metrics:
    try:
        return dict(trainer.step(examples, audit=False, observe=lambda *_: None))
    except NonFiniteError as error:
        raise NonFiniteError(f"step {step}: {error}; lower train.lr, or look at this step's rows") from error


def evaluate(
    plan: SftPlan, step: int, trainer: Trainer, evals: Mapping[str, Sequence[Sample]], progress: Progress
) -> Metrics:
    """Loss on every held-out set, `eval/<name>/loss`, averaged like train/loss; nothing where eval_every is 0."""
    if not plan.eval_every:
        return {}
    result: Metrics = {}
    begin = time.perf_counter()
    for name, examples in evals.items():
        progress("eval", len(result), len(evals))
        weights = np.concatenate(token_weights([len(e.token_ids) for e in examples], plan.aggregation))
        logprobs = np.concatenate(trainer.score(examples))
        loss = -math.fsum((weights.astype(np.float64) * logprobs).tolist())
        if not math.isfinite(loss):
            raise NonFiniteError(f"step {step}: the loss on data.eval.{name} is {loss}")
        result[f"eval/{name}/loss"] = loss
    return result | {"perf/eval_time": time.perf_counter() - begin}


def speed(examples: Sequence[Sample], seconds: float) -> Metrics:
    """Seconds of the update, prompt and response tokens per second."""
    tokens = sum(len(e.prompt_token_ids) + len(e.token_ids) for e in examples)
    return {"perf/step_time": seconds, "perf/train_tokens_per_sec": tokens / seconds}
