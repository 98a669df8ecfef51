"""The environment in which GPU libraries are deterministic: set in one place, before the first kernel, and read back.

apply() sets it, check() proves it, state() is what environment.json records.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from exactrl.errors import EnvironmentProblem

VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # fixed workspaces: cuBLAS then picks the same kernel every time
    "NCCL_ALGO": "Ring",  # one order of summation, whatever the message size
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",  # sums inside the switch have an order of their own
}

# below torch.backends: TF32 and reduced-precision sums off, no algorithm search
FLAGS = {
    "cuda.matmul.allow_tf32": False,
    "cuda.matmul.allow_fp16_reduced_precision_reduction": False,
    "cuda.matmul.allow_bf16_reduced_precision_reduction": False,
    "cudnn.allow_tf32": False,
    "cudnn.benchmark": False,
}
BLAS = "cublas"  # not cuBLASLt, whose kernels without split-K were up to 9 times slower


def apply() -> None:
    """Sets variables and flags, then checks them. A variable that the user has set otherwise is not overwritten.

    Raises EnvironmentProblem when CUDA was used before without the variables: libraries read them only once.
    """
    late = torch.cuda.is_initialized()
    for name, value in VARIABLES.items():
        if late and name.startswith("CUBLAS") and name not in os.environ:
            raise EnvironmentProblem(f"{name} is unset and CUDA is in use already; start with {name}={value}")
        os.environ.setdefault(name, value)
    for path, wanted in FLAGS.items():
        owner, _, attribute = path.rpartition(".")
        setattr(attrgetter(owner)(torch.backends), attribute, wanted)
    torch.backends.cuda.preferred_blas_library(BLAS)
    check()


def check() -> None:
    """Raises EnvironmentProblem naming everything that is not as apply() leaves it."""
    found = state()
    expected: dict[str, Any] = {**VARIABLES, **FLAGS, "blas_library": BLAS}
    wrong = [
        f"{name} is {found[name]!r}, must be {value!r}" for name, value in expected.items() if found[name] != value
    ]
    if wrong:
        raise EnvironmentProblem("the GPU environment is not deterministic: " + "; ".join(wrong))


def state() -> dict[str, Any]:
    """Every variable and flag (below torch.backends) as it is now, JSON-ready."""
    flags = {path: attrgetter(path)(torch.backends) for path in FLAGS}
    blas = str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2].lower()
    return {**{name: os.environ.get(name) for name in VARIABLES}, **flags, "blas_library": blas}


@contextmanager
def deterministic_algorithms(device: torch.device) -> Iterator[None]:
    """torch's global flag, which its kernels ask whether to add up in a fixed order; on a GPU only.

    Uninitialised memory is not filled meanwhile, or every torch.empty would be written twice.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
