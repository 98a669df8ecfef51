"""The ops of one run on a GPU: the contract's kernels, each of them an implementation that this machine certified."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from exactrl.contract import AttentionShape, Contract, LinearShape, read_certificate
from exactrl.ops.cuda import head, norm, swiglu
from exactrl.ops.cuda.attention import (
    PAGE_SIZE,
    AttentionChoice,
    AttentionRows,
    Workspace,
    packed_attention,
    paged_attention,
    shape_of,
)
from exactrl.ops.cuda.embedding import embedding
from exactrl.ops.cuda.linear import certified_product, linear
from exactrl.ops.cuda.mapped_memory import MappedMemory
from exactrl.ops.cuda.qkv import qkv, qkv_into_cache
from exactrl.ops.cuda.sampling import sample_exact
from exactrl.ops.rows import row_owners, row_slots

if TYPE_CHECKING:
    from exactrl.ops.cuda.matmul import Product
    from exactrl.ops.interface import HeadArguments
    from exactrl.ops.qkv import HeadShape, RopeTable
    from exactrl.ops.weight import Weight

VOCAB_BLOCK, KV_SPLIT, KV_BLOCK = 128, 512, 64  # what the kernels are written for


@dataclass(frozen=True, slots=True)
class CudaRows:
    """Query rows of a batch on the GPU.

    attention   what attention kernels read
    slots       int64 [T] on the device: row of the cache that each row's k and v go to; None without a cache
    starts      int64 [S + 1], host: first row of each sequence
    first       int64 [S], host: position of each sequence's first row
    """

    attention: AttentionRows
    slots: torch.Tensor | None
    starts: np.ndarray
    first: np.ndarray

    def owners(self, sequences: torch.Tensor) -> torch.Tensor:
        """int64 [T, 2] on the host: (sequence, position) of every row; `sequences` int64 [S] are their numbers."""
        return torch.from_numpy(row_owners(self.starts, self.first, sequences.numpy()))


@dataclass(frozen=True, slots=True)
class CudaOps:
    """See interface.ModelOps. Everything is bfloat16, with fp32 where the contract says so.

    product     canonical x Wᵀ, see linear.certified_product
    attention   the kernels for a shape, see certified_attention.certified_attention
    proof       the certificate's entries for the model; empty where nobody certified the kernels (tests)
    """

    contract: Contract
    product: Product
    attention: Callable[[AttentionShape], AttentionChoice]
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    page_size: int = PAGE_SIZE
    proof: dict[str, Any] = field(default_factory=dict, compare=False)

    backend = "cuda"
    exact = True
    packs = False

    def __post_init__(self) -> None:
        c = self.contract
        written_for = (VOCAB_BLOCK, KV_SPLIT, KV_BLOCK)
        assert (c.vocab_block, c.kv_split, c.kv_block) == written_for, f"no GPU kernels for {c}"

    def embedding(self, ids: torch.Tensor, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
        return embedding(ids, weight.rows(), dtype, master=weight.master)

    def linear(self, x: torch.Tensor, weight: Weight, leaves: int = 1) -> torch.Tensor:
        return linear(x, weight.rows(), self.product, master=weight.master, leaves=leaves)

    def rms_norm(self, h: torch.Tensor, weight: Weight, eps: float) -> torch.Tensor:
        return norm.rms_norm(h, weight.rows(), eps, master=weight.master)

    def add_rms_norm(
        self, h: torch.Tensor, x: torch.Tensor, weight: Weight, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norm.add_rms_norm(h, x, weight.rows(), eps, master=weight.master)

    def qkv(
        self, x: torch.Tensor, wq: Weight, wk: Weight, rope: RopeTable, positions: torch.Tensor, shape: HeadShape,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        masters = {"master_q": wq.master, "master_k": wk.master}
        return qkv(x, wq.rows(), wk.rows(), rope, positions, shape, eps, **masters)

    def qkv_into_cache(
        self, x: torch.Tensor, heads: HeadArguments, rows: CudaRows, pages: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """q [T, H, D]; k and v of every row are in the pages afterwards."""
        assert rows.slots is not None, "packed rows have no cache"
        wq, wk, rope, positions, shape, eps = heads
        return qkv_into_cache(x, wq.rows(), wk.rows(), rope, positions, shape, eps, *pages, rows.slots)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return swiglu.swiglu(gate_up)

    def logprobs(
        self, hidden: torch.Tensor, weight: Weight, targets: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return head.logprobs_exact(hidden, weight.rows(), targets, temperatures, self.product, master=weight.master)

    def sample(
        self, hidden: torch.Tensor, weight: Weight, temperatures: torch.Tensor, keys: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """See ops.head.sample_exact."""
        tokens, logprobs, _ = self.sample_with_digest(hidden, weight, temperatures, keys, positions, digest=False)
        return tokens, logprobs

    def sample_with_digest(
        self, hidden: torch.Tensor, weight: Weight, temperatures: torch.Tensor, keys: torch.Tensor,
        positions: torch.Tensor, *, digest: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Also int64 [R] digests of the rows' log-probabilities over the whole vocabulary."""
        w = weight.rows()
        size = head.chunk_rows(len(w), head.CHUNK_BYTES)
        parts = [
            sample_exact(
                self.product(hidden[cut], w, torch.float32, 1), temperatures[cut], keys[cut], positions[cut],
                digest=digest,
            )
            for cut in (slice(a, a + size) for a in range(0, max(1, len(hidden)), size))
        ]  # fmt: skip
        if len(parts) == 1:
            return parts[0]
        tokens, logprobs, digests = zip(*parts, strict=True)
        return torch.cat(tokens), torch.cat(logprobs), torch.cat(digests) if digest else None

    def rows(self, starts: np.ndarray, first: np.ndarray, tables: np.ndarray, shape: HeadShape) -> CudaRows:
        """Rows over a paged cache: starts int64 [S + 1], first int64 [S], tables int32 [S, P]."""
        counts = np.diff(starts)
        slots = torch.from_numpy(row_slots(starts, first, tables, self.page_size))
        slots = slots.to(self.device, non_blocking=True)
        return CudaRows(AttentionRows.build(counts, first + counts, tables, self.device), slots, starts, first)

    def decode_rows(
        self, lengths: torch.Tensor, slots: torch.Tensor, tables: torch.Tensor, most_keys: int, workspace: Workspace
    ) -> CudaRows:
        """One row of each of S sequences, for a decode step that is captured once and replayed: lengths int32 [S] (0:
        no sequence), slots int64 [S] (-1 then) and tables int32 [S, P] are read on the device in each replay. No length
        exceeds `most_keys`."""
        starts = np.arange(len(lengths) + 1)
        attention = AttentionRows(
            torch.from_numpy(starts.astype(np.int32)).to(self.device), lengths, tables,
            np.ones(len(lengths), np.int64), np.full(len(lengths), most_keys, np.int64),
            workspace,
        )  # fmt: skip
        return CudaRows(attention, slots, starts, np.zeros(len(lengths), np.int64))

    def decodes_in_graphs(self, shape: HeadShape) -> bool:
        """Whether attention of a decode step finds its work on the device: kernels with splits in parallel do."""
        asked = AttentionShape(shape.heads, shape.kv_heads, shape.dim, self.page_size, order=self.contract.attention)
        return self.attention(asked).split_rows >= shape.heads // shape.kv_heads

    def packed_rows(self, lengths: np.ndarray, shape: HeadShape) -> CudaRows:
        """Whole sequences side by side, each from position 0; lengths int64 [S]."""
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        attention = AttentionRows.build(lengths, lengths, None, self.device)
        return CudaRows(attention, None, starts, np.zeros(len(lengths), np.int64))

    def new_cache(
        self, layers: int, pages: int, shape: HeadShape, dtype: torch.dtype
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], MappedMemory | None]:
        """(K pages, V pages) of each layer, [pages, page_size, HK, D], not initialised, and the memory they lie in,
        which must be kept; None where there is no GPU. Raises torch.OutOfMemoryError."""
        size = (layers, 2, pages, self.page_size, shape.kv_heads, shape.dim)
        memory = None
        if self.device.type == "cuda":
            memory = MappedMemory(math.prod(size) * dtype.itemsize)
            every = memory.tensor()[: math.prod(size) * dtype.itemsize].view(dtype).view(size)
        else:
            every = torch.empty(size, dtype=dtype, device=self.device)
        return [(k, v) for k, v in every], memory

    def paged_attention(
        self, q: torch.Tensor, rows: CudaRows, pages: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """q [T, H, D] -> [T, H, D], `out` when given."""
        return paged_attention(q, *pages, rows.attention, self._choice(q, pages[0]), out=out)

    def packed_attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: CudaRows) -> torch.Tensor:
        """q [T, H, D], k, v [T, HK, D] of whole sequences -> [T, H, D]. Differentiable."""
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        return packed_attention(q, k, v, rows.attention, self._choice(q, k).in_order)

    def _choice(self, q: torch.Tensor, k: torch.Tensor) -> AttentionChoice:
        shape = shape_of(q, k)
        if shape.order != self.contract.attention:
            shape = replace(shape, order=self.contract.attention)
        return self.attention(shape)


def certified_ops(contract: Contract, linears: Sequence[LinearShape], attention: Sequence[AttentionShape]) -> CudaOps:
    """Ops that run only what this machine's certificate names.

    Raises CertificationError, before any work, when one of the model's shapes (`linears`, `attention`) has no
    certificate, and says how to make one.
    """
    from exactrl.ops.cuda.attention import attention_implementations
    from exactrl.ops.cuda.certified_attention import certified_attention
    from exactrl.ops.cuda.fa3_attention import fa3_implementation
    from exactrl.ops.cuda.machine import machine
    from exactrl.ops.cuda.matmul import implementations

    certificate = read_certificate(machine())
    proof = {"device": "cuda", "kernels": "exact-v1, certified", **certificate.excerpt(linears, attention)}
    attends = attention_implementations()
    if contract.attention == "fa3":
        attends["fa3"] = fa3_implementation()
    choice = certified_attention(certificate, attends)
    for shape in attention:
        choice(shape)
    return CudaOps(contract, certified_product(certificate, implementations()), choice, proof=proof)


def with_references(ops: CudaOps) -> CudaOps:
    """The same ops on the bit references of linears and, where the order is ours, attention."""
    from exactrl.ops.cuda.attention import attention_implementations
    from exactrl.ops.cuda.matmul import reference

    if ops.contract.attention != "canonical":
        return replace(ops, product=reference)
    slow = attention_implementations()["reference"]
    choice = AttentionChoice(slow, slow, 0)
    return replace(ops, product=reference, attention=lambda shape: choice)
