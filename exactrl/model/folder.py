"""Hugging Face model folders: safetensors in and out (sharded or not), config.json, tokenizer files."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from exactrl.errors import EnvironmentProblem, ModelError
from exactrl.model.config import ModelConfig, read_config
from exactrl.model.qwen3 import Qwen3
from exactrl.model.weights import load_weights, named_masters, named_weights
from exactrl.ops.interface import ModelOps

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Everything that goes with the weights and is copied unchanged when a model is saved.
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip


def load_model(folder: Path, ops: ModelOps, dtype: torch.dtype, *, trainable: bool) -> Qwen3:
    """The model of a folder with all weights assigned. Raises ModelError."""
    model = Qwen3(read_config(folder), ops, dtype, trainable=trainable)
    load_weights(model, read_tensors(folder), str(folder))
    return model


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every tensor in the folder, one file open at a time. Raises ModelError."""
    for path, expected in _files(folder):
        try:
            with safe_open(path, framework="pt") as f:
                names = set(f.keys())
                if expected is not None and names != expected:
                    odd = sorted(names ^ expected)[0]
                    raise ModelError(f"{path}: tensor {odd!r} stands in only one of the file and {INDEX}")
                for name in f.keys():  # noqa: SIM118 (safe_open is no dict)
                    yield name, f.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: not a readable safetensors file: {error}") from error


def _files(folder: Path) -> list[tuple[Path, set[str] | None]]:
    if (folder / INDEX).is_file():
        try:
            weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            files = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{folder / INDEX}: no readable weight_map: {error}") from error
        for name in files:
            if not isinstance(name, str) or os.sep in name or not (folder / name).is_file():
                raise ModelError(f"{folder / INDEX}: names {name!r}, which is not a file of {folder}")
        return [(folder / name, {t for t, where in weight_map.items() if where == name}) for name in files]
    if (folder / SINGLE).is_file():
        return [(folder / SINGLE, None)]
    pickles = sorted(p.name for p in folder.glob("*.bin"))
    hint = f"; {pickles[0]} is a pickle file, which is not read" if pickles else ""
    raise ModelError(f"{folder}: no {SINGLE} and no {INDEX}{hint}")


def save_model(
    model: Qwen3,
    folder: Path,
    *,
    companions: Path | None = None,
    masters: bool = False,
    shard_bytes: int = 5 << 30,
    extra: Callable[[Path], None] = lambda temporary: None,
) -> None:
    """Writes a folder that transformers opens: weights in the compute dtype (`masters`: in fp32), config.json, and the
    tokenizer files of `companions`; `extra` may add files. The folder must not exist; it is written beside, synced and
    renamed: whole or absent. Raises ModelError for a folder that exists, EnvironmentProblem when the disk refuses."""
    if folder.exists():
        raise ModelError(f"{folder} exists already; a model is never written over another")
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        dtype = "float32" if masters or model.dtype == torch.float32 else "bfloat16"
        write_folder(
            temporary, model.config, named_masters(model) if masters else named_weights(model), dtype, shard_bytes
        )
        for name in COMPANIONS if companions else ():
            if companions and (companions / name).is_file():
                shutil.copyfile(companions / name, temporary / name)
        extra(temporary)
        mode = stat.S_IMODE((temporary / "config.json").stat().st_mode)
        for path in temporary.iterdir():
            path.chmod(mode)  # as the umask says; safetensors gives its files to their owner alone
            with path.open("rb") as f:
                os.fsync(f.fileno())
        sync_folder(temporary)
        temporary.rename(folder)
        sync_folder(folder.parent)
    except (OSError, SafetensorError) as error:
        raise EnvironmentProblem(f"{folder}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Makes renames within a folder durable, where the system can (POSIX)."""
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_folder(
    folder: Path, config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]], dtype: str, shard_bytes: int
) -> None:
    """config.json and one or more safetensors files into an existing folder."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors:
        n = tensor.numel() * tensor.element_size()
        if size and size + n > shard_bytes:
            shards.append({})
            size = 0
        # slices of fused weights share memory, which the format refuses
        shards[-1][name] = tensor.detach().to("cpu", copy=True)
        size += n
    raw = {**config.to_json(), "torch_dtype": dtype}
    if "dtype" in raw:  # the newer spelling of torch_dtype
        raw["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE, metadata={"format": "pt"})
        return
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
    total = sum(t.numel() * t.element_size() for shard in shards for t in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
