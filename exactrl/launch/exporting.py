"""A run's model as a Hugging Face folder: `exactrl export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from exactrl.config import load_recipe, load_sft_recipe
from exactrl.contract import get_contract
from exactrl.errors import ConfigError, UsageError
from exactrl.launch.build import DTYPES
from exactrl.ops import Ops
from exactrl.rl.resume import Checkpoint, checkpoints, newest_complete
from exactrl.train.checkpoint import STATE, export_model, read_state


def export(run: Path, out: Path, *, step: int | None = None, dtype: str | None = None) -> dict[str, Any]:
    """A run's model as a Hugging Face folder: the newest complete checkpoint, or that of `step`, in the run's dtype
    unless another is asked for. `run` may also be a checkpoint itself. Returns checkpoint, step, dtype, digest.

    Raises UsageError where there is no such checkpoint; CheckpointError, ModelError as export_model.
    """
    problems: list[str] = []
    if (run / STATE).is_file():
        found: Checkpoint | None = Checkpoint(run, read_state(run))
    elif step is not None:
        path = dict(checkpoints(run)).get(step)
        found = Checkpoint(path, read_state(path)) if path else None
    else:
        found = newest_complete(run, read_state, problems.append)
    if found is None:
        have = ", ".join(str(n) for n, _ in checkpoints(run)) or "none"
        what = f"checkpoint of step {step}" if step is not None else "complete checkpoint"
        raise UsageError("\n".join([f"{run}: no {what} to export; checkpoints there: {have}", *problems]))
    dtype = dtype or _dtype_of(run)
    digest = export_model(found.path, out, Ops(get_contract("exact-v1")), DTYPES[dtype])
    return {"checkpoint": str(found.path), "step": found.step, "dtype": dtype, "compute_digest": digest}


def _dtype_of(run: Path) -> str:
    """The compute dtype of an RL or a supervised run; "bfloat16" for a checkpoint by itself."""
    path = run / "config.toml"
    if not path.is_file():
        return "bfloat16"
    try:
        return load_recipe(path).model.dtype
    except ConfigError:
        return load_sft_recipe(path).model.dtype
