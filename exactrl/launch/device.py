"""Which device a run is on: its ops, and what must be true of the machine."""

from __future__ import annotations

import torch

from exactrl.contract import Contract
from exactrl.errors import ConfigError, EnvironmentProblem
from exactrl.model.config import ModelConfig
from exactrl.ops import Ops
from exactrl.ops.cuda import determinism
from exactrl.ops.interface import ModelOps


def make_ops(device: str, contract: Contract, true_on_policy: bool, dtype: str, model: ModelConfig) -> ModelOps:
    """The ops for a model in `dtype` on "cpu" or "cuda".

    Raises EnvironmentProblem without a GPU that has kernels, ConfigError for what the GPU contract does not have, and
    with `true_on_policy` CertificationError where this machine's kernels are not certified for the model's shapes.
    """
    if device == "cpu":
        return Ops(contract, true_on_policy)
    if dtype != "bfloat16":
        raise ConfigError(
            f"on the GPU the contract is defined for bfloat16 models, not {dtype}; use bfloat16, or the device cpu"
        )
    require_gpu("device cuda", "use the device cpu")
    from exactrl.parity.certificate import attention_shapes, linear_shapes

    if not true_on_policy:
        from exactrl.ops.cuda.plain import plain_ops
        from exactrl.parity.fastest import fastest_product

        return plain_ops(contract, attention_shapes(model, "canonical"), fastest_product())
    from exactrl.ops.cuda.binding import certified_ops

    linears = list(linear_shapes(model, contract.k_leaves).values())
    attends = attention_shapes(model, contract.attention)
    return certified_ops(contract, linears, attends)


def require_gpu(what: str, instead: str) -> None:
    """Makes the GPU deterministic. Raises EnvironmentProblem without a GPU that has a bit reference, or Triton; `what`
    needs one, `instead` says what can be done without."""
    if not torch.cuda.is_available():
        raise EnvironmentProblem(f"{what} needs a GPU and this machine has none; {instead}")
    determinism.apply()  # before CUDA is used
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        raise EnvironmentProblem(
            f"{what} knows the device class sm90 (H100, H200), not {torch.cuda.get_device_name()} (sm{major}{minor})"
        )
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError as error:
        raise EnvironmentProblem("the reference kernels need the package 'triton'; pip install triton") from error
