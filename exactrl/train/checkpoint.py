"""Checkpoints: a Hugging Face folder with fp32 masters, and beside it what a run needs to go on bit for bit.

    model.safetensors, config.json, tokenizer files   as transformers reads them
    optimizer.safetensors                             moments and step counts, by Hugging Face name
    state.json                                        step, cursor, versions, digests; size and digest of every file

A folder is written beside its place, synced, and renamed: complete or absent. Moments are stored by Hugging Face name,
not by fused parameter, so that a checkpoint does not depend on how a trainer lays out its weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from exactrl.errors import CheckpointError
from exactrl.model.folder import INDEX, SINGLE, load_model, read_tensors, save_model
from exactrl.model.weights import compute_digest, digest_of, load_weights, places
from exactrl.ops import Ops
from exactrl.train.trainer import Trainer

FORMAT = 1
STATE, OPTIMIZER = "state.json", "optimizer.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")


def save_checkpoint(trainer: Trainer, folder: Path, state: dict[str, Any], companions: Path) -> None:
    """Writes the checkpoint `folder`; `state` is the caller's (JSON-ready). Raises EnvironmentProblem when the disk
    refuses: nothing is then left of it."""

    def add(temporary: Path) -> None:
        tensors = {name: t.to("cpu", copy=True) for name, t in optimizer_tensors(trainer)}
        save_file(tensors, temporary / OPTIMIZER)
        record = {
            "format": FORMAT,
            **state,
            "weight_version": trainer.version,
            "master_digest": trainer.master_digest(),
            "optimizer_digest": optimizer_digest(trainer),
            "files": {p.name: [p.stat().st_size, file_digest(p)] for p in sorted(temporary.iterdir())},
        }
        (temporary / STATE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    save_model(trainer.model, folder, companions=companions, masters=True, extra=add)


def read_state(folder: Path) -> dict[str, Any]:
    """state.json of a checkpoint whose every file is as it was written. Raises CheckpointError saying what is not."""
    path = folder / STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        files, form = {name: (size, digest) for name, (size, digest) in state["files"].items()}, state["format"]
        state["master_digest"], state["optimizer_digest"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable ({type(error).__name__}: {error})") from error
    if form != FORMAT:
        raise CheckpointError(f"{path}: written by another version (format {form}, this one reads {FORMAT})")
    if OPTIMIZER not in files or not {SINGLE, INDEX}.intersection(files):
        raise CheckpointError(f"{path}: it does not list the files of a checkpoint")
    for name, (size, digest) in files.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            raise CheckpointError(f"{file}: {'missing' if found is None else f'{found} bytes'}, it should have {size}")
        if file_digest(file) != digest:
            raise CheckpointError(f"{file}: its content is not what was written")
    return state


def load_checkpoint(trainer: Trainer, folder: Path, state: dict[str, Any]) -> None:
    """Puts weights, moments and weight version into the trainer. Raises CheckpointError when the result has other
    digests than `state`, ModelError for weights that do not fit the model."""
    load_weights(trainer.model, read_tensors(folder), str(folder))
    _load_optimizer(trainer, folder / OPTIMIZER)
    trainer.version = state["weight_version"]
    for what, found in (("master", trainer.master_digest()), ("optimizer", optimizer_digest(trainer))):
        if found != state[f"{what}_digest"]:
            raise CheckpointError(f"{folder}: {what} digest {found} after loading, {state[f'{what}_digest']} at saving")


def export_model(checkpoint: Path, out: Path, ops: Ops, dtype: torch.dtype) -> str:
    """Writes a checkpoint's model as a plain Hugging Face folder in `dtype`: the very weights that the kernels of a run
    in that dtype read. Returns their compute digest. Raises CheckpointError for a checkpoint that is not complete,
    ModelError for an `out` that exists."""
    read_state(checkpoint)
    model = load_model(checkpoint, ops, dtype, trainable=False)
    save_model(model, out, companions=checkpoint)
    return compute_digest(model)


def optimizer_tensors(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    """("exp_avg.NAME", float32), ("exp_avg_sq.NAME", float32), ("step.NAME", scalar) by Hugging Face name; nothing for
    weights that were never updated."""
    for name, weight, first, rows in places(trainer.model):
        assert weight.master is not None, "the trainer's weights have masters"
        state = trainer.optimizer.state.get(weight.master, {})
        for key, tensor in state.items():
            yield f"{key}.{name}", tensor if key == "step" else tensor[first : first + rows]


def optimizer_digest(trainer: Trainer) -> str:
    return digest_of((name, [tensor]) for name, tensor in optimizer_tensors(trainer))


def _load_optimizer(trainer: Trainer, path: Path) -> None:
    try:
        with safe_open(path, framework="pt") as f:
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (safe_open is no dict)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from error
    trainer.optimizer.state.clear()
    for name, weight, first, rows in places(trainer.model):
        if f"step.{name}" not in tensors:
            continue
        assert weight.master is not None
        state = trainer.optimizer.state[weight.master]
        state["step"] = tensors[f"step.{name}"]
        for key in MOMENTS:
            part = tensors.get(f"{key}.{name}")
            if part is None or tuple(part.shape) != (rows, *weight.shape[1:]):
                raise CheckpointError(f"{path}: {key} of {name} is missing or misshapen")
            state.setdefault(key, torch.zeros_like(weight.master))[first : first + rows] = part


def file_digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
