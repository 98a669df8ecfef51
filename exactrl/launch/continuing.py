"""Which checkpoint a run goes on from, and what has to be the same for it to be the same run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exactrl.config import Config, SftConfig
from exactrl.errors import UsageError
from exactrl.model.config import find_model
from exactrl.model.folder import COMPANIONS
from exactrl.model.weights import compute_digest
from exactrl.rl.interrupt import StopRequest
from exactrl.rl.resume import Checkpoint, newest_complete, require_same_run
from exactrl.rl.run_folder import RunFolder, holds_run
from exactrl.tasks.files import resolve_path, split_slice
from exactrl.train.checkpoint import file_digest, load_checkpoint, read_state, save_checkpoint
from exactrl.train.trainer import Trainer


def find_checkpoint(config: Config | SftConfig, path: Path, note: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint that a run goes on from, None where it starts anew. Raises CheckpointError for another run's
    folder."""
    if not (path / "config.toml").exists() and not holds_run(path):
        return None
    require_same_run(path, config)
    found = newest_complete(path, read_state, note)
    if found is None:
        note(f"{path} holds no complete checkpoint; the run starts anew")
    return found


def take_up(
    checkpoint: Checkpoint, trainer: Trainer, steps: int, updates_per_step: int, identity: dict[str, Any]
) -> None:
    """Puts the checkpoint into the trainer. Raises UsageError for one that is beyond `steps`, CheckpointError for one
    of other data, contract or reference policy."""
    if checkpoint.step > steps:
        raise UsageError(f"{checkpoint.path} is beyond the run's {steps} steps (run.steps); nothing was changed")
    checkpoint.require({**identity, "weight_version": checkpoint.step * updates_per_step})
    load_checkpoint(trainer, checkpoint.path, checkpoint.state)


@dataclass(frozen=True, slots=True)
class Keeper:
    """Writes a run's checkpoints: every `every` steps (0: none in between), at the last, when it is asked to stop."""

    out: RunFolder
    trainer: Trainer
    companions: Path
    identity: dict[str, Any]
    steps: int
    every: int
    keep: int
    request: StopRequest
    note: Callable[[str], None]

    def after(self, step: int, cursor: int) -> None:
        """To be called when a step's rows are written. Raises KeyboardInterrupt to end a run that was asked to stop."""
        stop = self.request.requested
        if step == self.steps or (self.every and step % self.every == 0) or stop:
            self.out.sync_metrics()
            state = {"step": step, "cursor": cursor, **self.identity}
            save_checkpoint(self.trainer, self.out.checkpoint_path(step), state, self.companions)
            for problem in self.out.prune_checkpoints(self.keep):
                self.note(problem)
        if stop and step < self.steps:
            raise KeyboardInterrupt


def run_identity(config: Config | SftConfig, trainer: Trainer) -> dict[str, Any]:
    """What a continued run must share with the one it goes on from, besides its settings."""
    return {
        "contract_digest": trainer.model.ops.contract.digest,
        "model_digest": _digest_of_files(find_model(config.model.path)),
        "data_digest": file_digest(resolve_path(split_slice(config.data.train)[0])),
        "reference_digest": compute_digest(trainer.reference) if trainer.reference else None,
    }


def _digest_of_files(folder: Path) -> str:
    """Of what a model folder fixes besides the weights, which a checkpoint holds: shape, tokens, template."""
    names = ("config.json", "generation_config.json", *COMPANIONS)
    found = {name: file_digest(folder / name) for name in sorted(set(names)) if (folder / name).is_file()}
    return hashlib.blake2b(json.dumps(found).encode(), digest_size=16).hexdigest()
