"""The deterministic environment is read back, not assumed."""

from __future__ import annotations

import pytest
import torch

from exactrl.errors import EnvironmentProblem
from exactrl.ops.cuda import determinism


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Flags and variables as before the test."""
    before = determinism.state()
    for name in determinism.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    for path in determinism.FLAGS:
        owner, _, name = path.rpartition(".")
        setattr({"cuda.matmul": torch.backends.cuda.matmul, "cudnn": torch.backends.cudnn}[owner], name, before[path])


def test_apply_sets_and_proves_it() -> None:
    determinism.apply()
    determinism.check()
    assert determinism.state()["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_flag_changed_later_is_named() -> None:
    determinism.apply()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    with pytest.raises(EnvironmentProblem, match=r"allow_bf16_reduced_precision_reduction is True, must be False"):
        determinism.check()


def test_a_variable_of_the_user_is_not_overwritten_but_refused(monkeypatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    with pytest.raises(EnvironmentProblem, match="NCCL_ALGO is 'Tree', must be 'Ring'"):
        determinism.apply()


def test_too_late_for_cublas(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(EnvironmentProblem, match="start with CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        determinism.apply()
