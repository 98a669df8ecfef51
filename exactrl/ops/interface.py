"""What a model needs of the ops: implemented by `Ops` (CPU) and `CudaOps` (GPU), which know nothing of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

    from exactrl.contract import Contract
    from exactrl.ops.qkv import HeadShape, RopeTable
    from exactrl.ops.weight import Weight

    HeadArguments = tuple[Weight, Weight, RopeTable, torch.Tensor, HeadShape, float]
    """What ModelOps.qkv takes besides x: weights of the q and k norms, rotary table, positions, shape, epsilon."""


class BatchRows(Protocol):
    """Which query rows a batch holds, as the attention of one device reads it."""

    def owners(self, sequences: torch.Tensor) -> torch.Tensor:
        """int64 [T, 2] on the host: (sequence, position) of every row; `sequences` int64 [S] are their numbers."""
        ...


class ModelOps(Protocol):
    """The ops of one run. Legend: T tokens, R rows, S sequences, K in, N out, H query heads, HK kv heads, D head dim.

    backend     "cpu" or "cuda": whose kernels
    packs       whether canonical products read packed panels (Weight.panels)
    page_size   tokens of one page of the KV cache
    """

    @property
    def contract(self) -> Contract: ...
    @property
    def exact(self) -> bool: ...
    @property
    def backend(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def packs(self) -> bool: ...
    @property
    def page_size(self) -> int: ...

    @property
    def proof(self) -> dict[str, Any]:
        """Kernels in use, and why they may be; JSON-ready: certificate.json of a run."""
        ...

    def embedding(self, ids: torch.Tensor, weight: Weight, dtype: torch.dtype) -> torch.Tensor: ...
    def linear(self, x: torch.Tensor, weight: Weight, leaves: int = 1) -> torch.Tensor: ...
    def rms_norm(self, h: torch.Tensor, weight: Weight, eps: float) -> torch.Tensor: ...
    def add_rms_norm(
        self, h: torch.Tensor, x: torch.Tensor, weight: Weight, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def qkv(
        self, x: torch.Tensor, wq: Weight, wk: Weight, rope: RopeTable, positions: torch.Tensor, shape: HeadShape,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...  # fmt: skip
    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor: ...
    def logprobs(
        self, hidden: torch.Tensor, weight: Weight, targets: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def sample(
        self, hidden: torch.Tensor, weight: Weight, temperatures: torch.Tensor, keys: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip

    def rows(self, starts: np.ndarray, first: np.ndarray, tables: np.ndarray, shape: HeadShape) -> Any:
        """BatchRows over a paged cache: starts int64 [S + 1], first int64 [S], tables int32 [S, P]."""
        ...

    def packed_rows(self, lengths: np.ndarray, shape: HeadShape) -> Any:
        """BatchRows of whole sequences side by side, each from position 0; lengths int64 [S]."""
        ...
