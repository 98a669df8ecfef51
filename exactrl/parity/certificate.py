"""Writes the certificate of a machine: one JSON file, grown shape by shape, replaced as a whole."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exactrl.contract import (
    CERTIFICATE_FORMAT,
    KERNEL_DIGESTS,
    AttentionShape,
    LinearShape,
    certificate_folder,
    certificate_path,
    current,
    load_certificate,
    write_cached,
)
from exactrl.model.config import ModelConfig
from exactrl.ops.cuda.attention import PAGE_SIZE
from exactrl.parity.certify import LinearResult
from exactrl.parity.certify_attention import AttentionResult

PAGE_SIZES = (0, PAGE_SIZE)  # packed, as in training; the engine's


def linear_shapes(config: ModelConfig, leaves: int = 1) -> dict[str, LinearShape]:
    """The linears of one layer and the head, by name. `leaves` are those of the row-parallel ones, o and down."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    return {
        "qkv": LinearShape(qkv, hidden),
        "o": LinearShape(hidden, heads, leaves=leaves),
        "gate_up": LinearShape(2 * config.intermediate_size, hidden),
        "down": LinearShape(hidden, config.intermediate_size, leaves=leaves),
        "head": LinearShape(config.vocab_size, hidden, "float32"),
    }


def attention_shapes(config: ModelConfig, order: str = "canonical") -> list[AttentionShape]:
    """A model's attention: packed, and in pages."""
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    return [AttentionShape(*heads, size, order=order) for size in PAGE_SIZES]


def write_certificate(
    machine: Mapping[str, str], results: Sequence[LinearResult] = (), attention: Sequence[AttentionResult] = ()
) -> Path:
    """Adds results to the machine's certificate; a shape certified again replaces what was there. What was certified
    of kernels whose sources have changed is dropped.

    Raises EnvironmentProblem when the cache folder cannot be written.
    """
    path = certificate_path(machine)
    before: dict[str, Any] = load_certificate(path) if path.exists() else {"linears": [], "attention": []}
    before |= {part: [] for part in KERNEL_DIGESTS if before[part] and not current(before, machine, part)}
    linears = {LinearShape(**entry["shape"]): entry for entry in before["linears"]}
    linears |= {result.shape: result.to_json() for result in results}
    attends = {AttentionShape(**entry["shape"]): entry for entry in before["attention"]}
    attends |= {result.shape: result.to_json() for result in attention}
    content = certificate_json(
        machine, [linears[shape] for shape in sorted(linears)], [attends[shape] for shape in sorted(attends)]
    )
    write_cached(path, content.encode())
    return path


def certificate_json(
    machine: Mapping[str, str], linears: Sequence[dict[str, Any]], attention: Sequence[dict[str, Any]] = ()
) -> str:
    content = {
        "format": CERTIFICATE_FORMAT,
        "date": datetime.date.today().isoformat(),
        "machine": dict(machine),
        "linears": list(linears),
        "attention": list(attention),
    }
    return json.dumps(content, indent=1) + "\n"


def shapes_certified_before(device: str) -> list[LinearShape]:
    """Those in the newest certificate of this device, whatever its libraries were; empty without one."""
    return [LinearShape(**entry["shape"]) for entry in _newest(device)["linears"]]


def attention_certified_before(device: str) -> list[AttentionShape]:
    return [AttentionShape(**entry["shape"]) for entry in _newest(device)["attention"]]


def _newest(device: str) -> dict[str, Any]:
    files = sorted(certificate_folder().glob("*.json"), key=lambda p: p.stat().st_mtime, reverse=True)
    for content in map(load_certificate, files):
        if content["machine"].get("device") == device:
            return content
    return {"linears": [], "attention": []}
