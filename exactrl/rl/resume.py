"""Going on where a killed run stopped: which checkpoint, whether it is the same run, and cutting what came after."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exactrl.config import Config, SftConfig, load_recipe, load_sft_recipe
from exactrl.errors import CheckpointError, EnvironmentProblem

# What may differ between a run and its continuation: these never change a bit of what is trained.
FREE = (
    "run.out", "run.steps", "run.epochs", "run.eval_every", "run.eval_samples", "run.eval_temperature",
    "run.checkpoint_every", "run.keep_checkpoints", "run.audit_every", "run.trackers",
    "rollout.max_concurrent", "rollout.kv_tokens", "rollout.chunk_tokens", "reward.timeout_s",
)  # fmt: skip


# What the totals of an RL run are made of: every row has them. Rows of a supervised run have an epoch instead.
COMPARED = {"train/logprob_compared_tokens", "train/logprob_mismatch_tokens"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint of a run: where it lies and what its state.json says. Raises CheckpointError for a state
    without the numbers of a run."""

    path: Path
    state: dict[str, Any]

    def __post_init__(self) -> None:
        for key in ("step", "cursor", "weight_version"):
            value = self.state.get(key)
            if type(value) is not int or not 0 <= value < 2**63:
                raise CheckpointError(f"{self.path}: {key} in its state.json is {value!r:.100}, no number of a run")

    @property
    def step(self) -> int:
        return self.state["step"]

    @property
    def cursor(self) -> int:
        return self.state["cursor"]

    def require(self, identity: dict[str, Any]) -> None:
        """Raises CheckpointError when contract, data or reference policy are not those of the checkpoint."""
        for key, value in identity.items():
            if self.state.get(key) != value:
                raise CheckpointError(
                    f"{self.path}: {key.replace('_', ' ')} was {self.state.get(key)}, is {value}; the run cannot go on "
                    "as the same run: give it what it had, or choose another --out"
                )


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint of a run, oldest step first; half-written ones have another name."""
    found = []
    for path in folder.glob("checkpoints/step_*"):
        if match := re.fullmatch(r"step_(\d+)", path.name):
            found.append((int(match[1]), path))
    return sorted(found)


def newest_complete(
    folder: Path, read: Callable[[Path], dict[str, Any]], note: Callable[[str], None]
) -> Checkpoint | None:
    """The newest checkpoint whose state `read` accepts; `note` is told why newer ones were passed over."""
    for step, path in reversed(checkpoints(folder)):
        try:
            found = Checkpoint(path, read(path))
            if found.step != step:
                raise CheckpointError(f"{path}: its state.json is of step {found.step}")
            return found
        except CheckpointError as error:
            note(f"checkpoint {path.name} is skipped: {error}")
    return None


def require_same_run(folder: Path, config: Config | SftConfig) -> None:
    """Raises CheckpointError naming every setting that would change what the rest of the run computes."""
    path = folder / "config.toml"
    if not path.is_file():
        raise CheckpointError(f"{folder}: no config.toml, so this is no run that could be continued")
    load = load_recipe if isinstance(config, Config) else load_sft_recipe
    before, now = dict(_flat(load(path))), dict(_flat(config))
    free = set(FREE) if config.train.lr_schedule == "constant" else set(FREE) - {"run.steps", "run.epochs"}
    changed = [key for key in now if key not in free and before[key] != now[key]]
    if changed:
        lines = "; ".join(f"{key} was {before[key]!r}, is {now[key]!r}" for key in changed)
        raise CheckpointError(
            f"{folder} was made with other settings: {lines}. A continued run would be neither the one nor the other; "
            "use the same settings, or another --out"
        )


def _flat(config: Config | SftConfig) -> Iterator[tuple[str, Any]]:
    for section, table in config.model_dump().items():
        for key, value in table.items():
            yield f"{section}.{key}", value


def cut_after(folder: Path, step: int) -> list[dict[str, Any]]:
    """Removes what a run wrote after `step`: rows of metrics.jsonl (a half-written last line, too), sample files,
    half-written folders; checkpoints that were passed over get another name. Returns the rows that stay.

    Raises CheckpointError when rows up to `step` are missing.
    """
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines()[:step] if path.is_file() else []
    rows = _rows_to(path, lines, step)
    try:
        _rewrite(path, b"".join(line + b"\n" for line in lines))
        for sample in folder.glob("samples/step_*.jsonl"):
            if (match := re.fullmatch(r"step_(\d+)", sample.stem)) and int(match[1]) > step:
                sample.unlink()
        for later, checkpoint in checkpoints(folder):
            if later > step:
                _set_aside(checkpoint)
        for left_over in [*folder.glob("checkpoints/.*.tmp-*"), *folder.glob(".*.tmp-*"), *folder.glob("*/.*.tmp-*")]:
            shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink(missing_ok=True)
        (folder / "failure.json").unlink(missing_ok=True)
    except OSError as error:
        raise EnvironmentProblem(f"{folder}: cannot be continued: {error}") from error
    return rows


def read_rows(folder: Path, steps: int) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, of steps 1 to `steps`. Raises CheckpointError for a file that is not that."""
    path = folder / "metrics.jsonl"
    return _rows_to(path, path.read_bytes().splitlines() if path.is_file() else [], steps)


def _rows_to(path: Path, lines: list[bytes], step: int) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: row {number} is damaged: {error}") from error
        if not isinstance(row, dict) or "step" not in row or not (row.keys() >= COMPARED or "epoch" in row):
            raise CheckpointError(
                f"{path}: row {number} is no row of a run: it lacks step, {' or '.join(sorted(COMPARED))}"
            )
        rows.append(row)
    if [row["step"] for row in rows] != list(range(1, step + 1)):
        raise CheckpointError(f"{path}: the checkpoint is of step {step}, but its rows are not steps 1 to {step}")
    return rows


def _set_aside(checkpoint: Path) -> None:
    target = checkpoint.with_name(f"{checkpoint.name}.damaged")
    shutil.rmtree(target, ignore_errors=True)
    checkpoint.rename(target)


def _rewrite(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with temporary.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)
