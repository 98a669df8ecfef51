"""The ops of a run on a GPU with exactness off: the fastest kernels, whose bits may depend on the batch.

Linears are whatever product the caller gives: on a GPU the fastest of cuBLAS and others (parity/fastest.py). Attention
is Flash Attention 3 with automatic splits where it is installed, knows the head dimension and is faster; that it is for
prompts and training, and for a single long sequence, but not for decoding many (docs/log.md, 2026-11-30), where our own
kernels run. Its gradient is PyTorch's flash kernel with atomics. Norms, rotary embedding, SwiGLU, log-probabilities,
sampling and embedding are the kernels that exactness uses, too. What exactness costs is measured against this.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from exactrl.contract import AttentionShape, Contract
from exactrl.errors import ConfigError, EnvironmentProblem
from exactrl.ops.cuda.attention import (
    AttentionChoice,
    AttentionImplementation,
    AttentionRows,
    attention_implementations,
)
from exactrl.ops.cuda.attention_backward import packed_backward
from exactrl.ops.cuda.binding import CudaOps, CudaRows
from exactrl.ops.cuda.fa3_attention import HEAD_DIMS as FA3_HEAD_DIMS
from exactrl.ops.cuda.linear import linear_plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from exactrl.ops.cuda.matmul import Product
    from exactrl.ops.qkv import HeadShape

FA3 = "flash_attn_interface"
COMPILED = ("cuda-decode",)
SPLIT = (*COMPILED, "triton-split")
IN_ORDER = ("hopper", "triton-in-order", "reference")
"""Our kernels by the part of their names before the tile, fastest first (docs/log.md, 2026-11-30)."""
ALONE_KEYS = 16384
"""Keys of one sequence alone from which on Flash Attention 3 is faster (docs/log.md, 2026-11-30)."""


@dataclass(frozen=True, slots=True)
class PlainOps(CudaOps):
    """See interface.ModelOps. `fa3`: attention is Flash Attention 3 where it knows the shape; `attention` is ours."""

    fa3: bool = False

    exact = False

    def paged_attention(
        self, q: torch.Tensor, rows: CudaRows, pages: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if self._fa3_serves(q.shape[1], pages[0].shape[2], q.shape[2]) and not self._ours_is_faster(q, pages[0], rows):
            found = fa3_paged(q, *pages, rows.attention)
            return found if out is None else out.copy_(found)
        return CudaOps.paged_attention(self, q, rows, pages, out)  # super() does not know a class with slots

    def packed_attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: CudaRows) -> torch.Tensor:
        if self._fa3_serves(q.shape[1], k.shape[1], q.shape[2]):
            return fa3_packed(q, k, v, rows.attention)
        return CudaOps.packed_attention(self, q, k, v, rows)

    def decodes_in_graphs(self, shape: HeadShape) -> bool:
        return self._fa3_serves(shape.heads, shape.kv_heads, shape.dim) or CudaOps.decodes_in_graphs(self, shape)

    def _fa3_serves(self, heads: int, kv_heads: int, dim: int) -> bool:
        return self.fa3 and dim in FA3_HEAD_DIMS and heads % kv_heads == 0

    def _ours_is_faster(self, q: torch.Tensor, k: torch.Tensor, rows: CudaRows) -> bool:
        """Where every sequence has one row, unless there is one long sequence only. Ours: the compiled kernels."""
        counts, most = rows.attention.counts, rows.attention.most_keys
        if (counts != 1).any() or (len(counts) == 1 and most[0] > ALONE_KEYS):
            return False
        choice = self._choice(q, k)
        return choice.split.name.split(":")[0] in COMPILED and q.shape[1] // k.shape[2] <= choice.split_rows


@dataclass(slots=True)
class Schedule:
    """FA3's division of one decode batch among multiprocessors: made once a step, read by every layer. Kept in one
    place, so that a captured graph makes it anew at every replay."""

    make: Callable[[], torch.Tensor]
    metadata: torch.Tensor

    def refresh(self) -> None:
        self.metadata.copy_(self.make())


def fa3_paged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: AttentionRows) -> torch.Tensor:
    """q [T, H, D] against pages -> [T, H, D]. Nothing waits for the device; in a captured graph lengths, tables and
    starts are read at replay, the numbers of rows on the host are those of the capture."""
    import flash_attn_interface as fa3

    assert rows.tables is not None, "packed keys have no pages"
    common = {"cache_seqlens": rows.lengths, "page_table": rows.tables, "causal": True, "num_splits": 0}
    if (rows.counts == 1).all():
        schedule = _schedule(q, k, rows)
        return fa3.flash_attn_with_kvcache(q[:, None], k, v, scheduler_metadata=schedule.metadata, **common)[:, 0]
    return fa3.flash_attn_with_kvcache(
        q, k, v, cu_seqlens_q=rows.starts, max_seqlen_q=int(rows.counts.max()), **common
    )  # fmt: skip


def _schedule(q: torch.Tensor, k: torch.Tensor, rows: AttentionRows) -> Schedule:
    key = ("fa3", q.shape[1:], k.shape[1:])
    if key not in rows.plans:
        import flash_attn_interface as fa3

        assert rows.tables is not None, "packed keys have no pages"
        make = functools.partial(
            fa3.get_scheduler_metadata, len(rows.counts), 1, rows.tables.shape[1] * k.shape[1], q.shape[1], k.shape[2],
            q.shape[2], rows.lengths, page_size=k.shape[1], causal=True, num_splits=0,
        )  # fmt: skip
        rows.plans[key] = Schedule(make, make())
    return rows.plans[key]


class _Fa3Packed(torch.autograd.Function):
    """The package that FA3 comes in (tokenspeed-fa3) is built without FA3's own gradient."""

    @staticmethod
    def forward(ctx, q, k, v, rows):
        import flash_attn_interface as fa3

        most = int(rows.counts.max())
        out, lse = fa3.flash_attn_varlen_func(
            q, k, v, rows.starts, rows.starts, most, most, causal=True, return_attn_probs=True
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rows = rows
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        return *packed_backward(d_out, q, k, v, out, lse, ctx.rows, deterministic=False), None


def fa3_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: AttentionRows) -> torch.Tensor:
    """Whole sequences side by side: q [T, H, D], k, v [T, HK, D] -> [T, H, D]. Differentiable."""
    return _Fa3Packed.apply(q.contiguous(), k.contiguous(), v.contiguous(), rows)


def our_attention(shape: AttentionShape, offered: Mapping[str, AttentionImplementation]) -> AttentionChoice:
    """The fastest of our kernels that serve the shape, going by measurements elsewhere: nothing is timed here."""

    def first(names: tuple[str, ...]) -> AttentionImplementation | None:
        found = (i for name in names for i in offered.values() if i.name.split(":")[0] == name and i.serves(shape))
        return next(found, None)

    in_order, split = first(IN_ORDER), first(SPLIT) if shape.page_size else None
    if in_order is None:
        raise ConfigError(f"no attention kernel on the GPU for {shape}; use the device cpu")
    return AttentionChoice(split, in_order, split.most_rows or 0) if split else AttentionChoice(in_order, in_order, 0)


def plain_ops(contract: Contract, shapes: Sequence[AttentionShape] = (), product: Product = linear_plain) -> PlainOps:
    """Ops that run what is fastest; `contract` gives only what it says about dtypes (k_leaves and orders are not kept).
    Needs no certificate. `product` computes linears. Raises ConfigError for one of the model's attention `shapes` that
    nothing here computes, EnvironmentProblem where Flash Attention 3 is installed and does not load."""
    offered = attention_implementations()
    installed = _fa3_loads()

    @functools.cache  # asked in every layer of every step
    def ours(shape: AttentionShape) -> AttentionChoice:
        return our_attention(shape, offered)

    found = PlainOps(contract, product, ours, proof=_proof(installed), fa3=installed)
    for shape in shapes:
        if not found._fa3_serves(shape.heads, shape.kv_heads, shape.dim):
            ours(shape)
    return found


def _fa3_loads() -> bool:
    if find_spec(FA3) is None:
        return False
    try:
        import_module(FA3)
    except ImportError as error:
        raise EnvironmentProblem(f"Flash Attention 3 is installed but does not load: {error}") from error
    return True


def _proof(fa3: bool) -> dict[str, Any]:
    """What runs and on which machine; nothing is proven about it."""
    from exactrl.ops.cuda.machine import machine

    ours = "the kernels of exact-v1"
    attention = f"Flash Attention 3, automatic splits; decoding {ours} where faster" if fa3 else ours
    linears = "the fastest of cuBLAS as it comes, DeepGEMM and what is certified here"
    return {
        "device": "cuda", "kernels": "plain: the batch may change bits", "linears": linears, "attention": attention,
        "others": ours, "machine": machine(),
    }  # fmt: skip
