"""What the CUDA C++ kernels with splits in parallel share on the host: split_items.cuh and list_splits.cu.

The list of a batch's splits is that of triton_split_attention.py; here each gets its pages, once a step. At most
WARP_ROWS rows x grouped heads of a sequence.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from exactrl.contract import AttentionShape
from exactrl.ops.cuda.attention_host import multiprocessors, scale_of
from exactrl.ops.cuda.attention_tiles import WARP_ROWS
from exactrl.ops.cuda.nvrtc import Kernel, Launch
from exactrl.ops.cuda.triton_attention import strides
from exactrl.ops.cuda.triton_split_attention import SPLIT, SplitPlan, split_plan

if TYPE_CHECKING:
    from exactrl.ops.cuda.attention import AttentionRows

FOLDER = Path(__file__).parent
LISTED = 40  # words of an item: 8, and the pages of every 16th key


def source_of(*names: str) -> str:
    return "".join((FOLDER / name).read_text() for name in ("hopper.cuh", "warp_tiles.cuh", "split_items.cuh", *names))


def options_of(shape: AttentionShape, **others: int) -> list[str]:
    values = {
        "DIM": shape.dim,
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "PAGE_SIZE": shape.page_size,
        **others,
    }
    return ["--fmad=false", *(f"-D{name}={value}" for name, value in values.items())]


@functools.cache
def _lister(shape: AttentionShape, device: int) -> Kernel:
    return Kernel(source_of("list_splits.cu"), "list_items", options_of(shape))


class Arguments(ctypes.Structure):
    """`Arguments` of split_items.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse", "items", "total", "partial", "stats")),
        *((name, ctypes.c_int32) for name in ("tokens", "held", "stride_q", "stride_k", "stride_v")),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class ListedPlan:
    """What is made once for a batch and used in every layer.

    most_keys    no sequence has more keys
    pairs        most (split, kv head) pairs that there may be
    items        int32 [capacity, LISTED]
    launches     made ready in the first layer, by name
    """

    shape: AttentionShape
    splits: SplitPlan
    most_keys: int
    pairs: int
    items: torch.Tensor
    _arguments: Arguments
    launches: dict[str, Launch] = field(default_factory=dict, repr=False, compare=False)

    def refresh(self) -> None:
        """After that of `splits`."""
        splits, rows = self.splits, self.splits.rows
        assert rows.tables is not None, "splits in parallel read pages"
        _lister(self.shape, torch.cuda.current_device()).launch((len(self.items), 1, 1), 32, (
            splits.items, splits.total, rows.starts, rows.lengths, rows.tables, rows.tables.stride(0), self.items,
        ))  # fmt: skip

    def blocks(self, on_each: int) -> int:
        """Of a launch: `on_each` multiprocessor, and no more than there may be items."""
        return min(len(self.items) * self.shape.kv_heads, multiprocessors(self.items.device) * on_each)

    def ready(self, name: str, make: Callable[[], Launch]) -> Launch:
        """The launch of this name; `make` makes it the first time."""
        found = self.launches.get(name)
        if found is None:
            found = self.launches[name] = make()
        return found

    def arguments(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
    ) -> Arguments:
        """One object, filled anew at every call. Row strides of q are even, those of k and v multiples of 8."""
        assert out.is_contiguous(), out.stride()
        a = self._arguments
        a.q, a.k, a.v, a.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        a.lse, a.tokens = None if lse is None else lse.data_ptr(), len(q)
        a.stride_q, a.stride_k, a.stride_v = strides(q, k, v, self.shape.page_size)
        return a


def listed_plan(q: torch.Tensor, k: torch.Tensor, rows: AttentionRows, sequences: np.ndarray) -> ListedPlan:
    """Made once for a batch."""
    assert rows.tables is not None, "splits in parallel read pages"
    (_, heads, dim), (_, page_size, kv_heads, _) = q.shape, k.shape
    key = ("listed", heads, kv_heads, dim, page_size, sequences.tobytes())
    if key not in rows.plans:
        most = int(rows.counts[sequences].max()) * (heads // kv_heads)
        assert most <= WARP_ROWS, f"{most} rows x grouped heads of one sequence, but the kernels hold {WARP_ROWS}"
        splits = split_plan(rows, sequences, heads, kv_heads, dim)  # refreshed before what is added here
        items = torch.empty(len(splits.items), LISTED, dtype=torch.int32, device=q.device)
        most_keys = rows.most_keys[sequences]
        pairs = int((-(-most_keys // SPLIT)).sum()) * kv_heads
        shape = AttentionShape(heads, kv_heads, dim, page_size)
        arguments = Arguments(
            items=items.data_ptr(), total=splits.total.data_ptr(), partial=splits.partial.data_ptr(),
            stats=splits.stats.data_ptr(), held=splits.held, scale=scale_of(dim),
        )  # fmt: skip
        plan = ListedPlan(shape, splits, int(most_keys.max()), pairs, items, arguments)
        plan.refresh()
        rows.plans[key] = plan
    return rows.plans[key]
