"""The parity ladder on a model folder: `exactrl check` and exactrl.check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from exactrl.algo.algorithm import get_algorithm
from exactrl.contract import CONTRACTS, Contract, get_contract
from exactrl.engine.engine import Engine as NativeEngine
from exactrl.launch.build import DTYPES
from exactrl.launch.device import make_ops
from exactrl.model.config import find_model, read_config
from exactrl.model.folder import load_model
from exactrl.model.qwen3 import Qwen3
from exactrl.ops.cpu.jit import require_denormals
from exactrl.parity import check as ladder
from exactrl.parity.subject import Subject
from exactrl.train.trainer import Trainer


def check(
    model: str,
    *,
    dtypes: Sequence[str] = ("bfloat16", "float32"),
    device: str = "cpu",
    true_on_policy: bool = True,
    seed: int = 0,
    k_leaves: int = 1,
    residual_dtype: str = "bfloat16",
    rungs: Sequence[str] | None = None,
    on_rung: Callable[[ladder.RungResult], None] = lambda result: None,
) -> list[ladder.RungResult]:
    """The parity ladder on a model folder or bundled name; `on_rung` is called after each rung.

    Raises as make_ops for a device that cannot be used.
    """
    if device == "cpu":
        require_denormals()
    folder = find_model(model)
    contract = get_contract("exact-v1", k_leaves=k_leaves, residual_dtype=residual_dtype)
    subjects = [subject_of(folder, d, true_on_policy, seed, contract, device) for d in dtypes]
    return ladder.check(subjects, rungs, on_rung)


def subject_of(
    folder: Path,
    dtype: str,
    true_on_policy: bool,
    seed: int,
    contract: Contract = CONTRACTS["exact-v1"],
    device: str = "cpu",
) -> Subject:
    """A model folder in one dtype under one contract, as the ladder wants it."""
    ops = make_ops(device, contract, true_on_policy, dtype, read_config(folder))

    def load(trainable: bool) -> Qwen3:
        return load_model(folder, ops, DTYPES[dtype], trainable=trainable)

    return subject_with(load, dtype, seed)


def subject_with(load: Callable[[bool], Qwen3], dtype: str, seed: int, lr: float = 1e-2) -> Subject:
    """`load(trainable)` makes the model anew; `lr` is large enough that an update changes every logprob."""

    def make_trainer(max_tokens: int = 8192) -> Trainer:
        return Trainer(load(True), get_algorithm("grpo"), lr=lr, max_tokens_per_microbatch=max_tokens)

    def make_engine(**limits: Any) -> NativeEngine:
        return NativeEngine(rollout_model, **{"kv_tokens": 8192, **limits})

    rollout_model = load(False)
    return Subject(
        rollout_model, make_engine, make_trainer, lambda: (NativeEngine(load(False), kv_tokens=8192), make_trainer()),
        dtype, seed,
    )  # fmt: skip
