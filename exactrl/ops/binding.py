"""Ops: the only place where reductions happen. One file per op: definition, torch reference, plain torch, exact.

`Ops` binds them to a contract. `exact` runs the contract's kernels; otherwise ordinary torch ops, which are faster or
slower here and there but let the bits depend on the batch: kept selectable so that the difference can be shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from exactrl.contract import Contract
from exactrl.errors import ConfigError
from exactrl.ops import attention, embedding, head, linear, norm, qkv, swiglu
from exactrl.ops.cpu.jit import sources_digest
from exactrl.ops.cpu.simd import LANES
from exactrl.ops.weight import Weight


@dataclass(frozen=True, slots=True)
class Ops:
    """The ops of one run on the CPU; see interface.ModelOps."""

    contract: Contract
    exact: bool = True

    backend = "cpu"
    device = torch.device("cpu")
    page_size = attention.PAGE
    rows = staticmethod(attention.Rows.build)
    packed_rows = staticmethod(attention.Rows.packed)

    @property
    def packs(self) -> bool:
        """Canonical products read packed panels, torch's own read rows."""
        return self.exact

    @property
    def proof(self) -> dict[str, Any]:
        """No certificate: the kernels are written out operation by operation; the ladder compares their bits."""
        kernels = "exact-v1 numba kernels" if self.exact else "plain torch"
        return {"device": "cpu", "kernels": kernels, "kernel_sources_digest": sources_digest()}

    def __post_init__(self) -> None:
        if self.contract.attention != "canonical":
            raise ConfigError(
                f"contract {self.contract.name!r} is attention by Flash Attention 3, which runs on GPUs only; "
                "use 'exact-v1'"
            )
        assert self.contract.lanes == LANES, (
            f"the kernels add rows in {LANES} lanes, the contract asks for {self.contract.lanes}"
        )

    def embedding(self, ids: torch.Tensor, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
        return (embedding.embedding_exact if self.exact else embedding.embedding_plain)(ids, weight, dtype)

    def linear(self, x: torch.Tensor, weight: Weight, leaves: int = 1) -> torch.Tensor:
        return linear.linear_exact(x, weight, leaves) if self.exact else linear.linear_plain(x, weight)

    def rms_norm(self, h: torch.Tensor, weight: Weight, eps: float) -> torch.Tensor:
        return (norm.rms_norm_exact if self.exact else norm.rms_norm_plain)(h, weight, eps)

    def add_rms_norm(self, h: torch.Tensor, x: torch.Tensor, weight: Weight, eps: float):
        return (norm.add_rms_norm_exact if self.exact else norm.add_rms_norm_plain)(h, x, weight, eps)

    def qkv(self, x, wq: Weight, wk: Weight, rope: qkv.RopeTable, positions, shape: qkv.HeadShape, eps: float):
        return (qkv.qkv_exact if self.exact else qkv.qkv_plain)(x, wq, wk, rope, positions, shape, eps)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return (swiglu.swiglu_exact if self.exact else swiglu.swiglu_plain)(gate_up)

    def logprobs(self, hidden, weight: Weight, targets, temperatures):
        if self.exact:
            return head.logprobs_exact(hidden, weight, targets, temperatures, self.contract)
        return head.logprobs_plain(hidden, weight, targets, temperatures)

    def sample(self, hidden, weight: Weight, temperatures, keys, positions):
        if self.exact:
            return head.sample_exact(hidden, weight, temperatures, keys, positions, self.contract)
        return head.sample_plain(hidden, weight, temperatures, keys, positions)
