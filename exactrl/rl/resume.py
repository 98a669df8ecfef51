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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint of a run: where it lies and what its state.json says."""

    path: Path
    state: dict[str, Any]

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
    for _, path in reversed(checkpoints(folder)):
        try:
            return Checkpoint(path, read(path))
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
    lines = path.read_text(encoding="utf-8").splitlines()[:step] if path.is_file() else []
    rows = _parse(path, lines)
    if [row.get("step") for row in rows] != list(range(1, step + 1)):
        raise CheckpointError(f"{path}: the checkpoint is of step {step}, but its rows are not steps 1 to {step}")
    try:
        _rewrite(path, "".join(line + "\n" for line in lines))
        for sample in folder.glob("samples/step_*.jsonl"):
            if int(sample.stem.removeprefix("step_")) > step:
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


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """All rows of metrics.jsonl. Raises CheckpointError for a damaged one."""
    path = folder / "metrics.jsonl"
    return _parse(path, path.read_text(encoding="utf-8").splitlines())


def _parse(path: Path, lines: list[str]) -> list[dict[str, Any]]:
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise CheckpointError(f"{path}: row {len(rows) + 1} is damaged: {error}") from error
    return rows


def _set_aside(checkpoint: Path) -> None:
    target = checkpoint.with_name(f"{checkpoint.name}.damaged")
    shutil.rmtree(target, ignore_errors=True)
    checkpoint.rename(target)


def _rewrite(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)
