"""attention on a GPU: causal, grouped-query; decode, chunks, mixed batches, prefill and training are one definition.

Definition on `sm90`, which every kernel gives bit for bit. Positions are the sequence's own. Per query row and head:

    c = fp32(log2(e) / sqrt(D));  s_j = rn(dot(q, k_j) * c), the dot in the matrix unit, D ascending
    keys that a row may not see: s = -inf, by select
    per block of kv_block = 64 keys (absolute multiples), ascending:
        mn = max(m, max_j s_j);  mz = 0 where mn is -inf, else mn
        p_j = exp2(s_j - mz);  al = exp2(m - mz);  pb = bf16(p)
        l = P 1 through the matrix unit, the accumulator starts at rn(l * al)
        acc = P V likewise from rn(acc * al);  m = mn
    a split = kv_split = 512 keys at absolute multiples; starts at m = -inf, l = 0, acc = 0
    splits merged ascending from M = -inf, L = 0, A = 0 (the first one, too):
        mn = max(M, m);  a = exp2(M - mn);  b = exp2(m - mn)
        A = rn(rn(A * a) + rn(acc * b));  L = rn(rn(L * a) + rn(l * b));  M = mn
    a split in which the row sees no key is left out by select
    out = bf16(A / L), IEEE division;  lse = rn(rn(M + log2(L)) * ln 2), log2 as libdevice computes it

V counts as 0 from the sequence's length on, so that unused slots may hold NaN. Nothing is contracted: every launch has
enable_fp_fusion=False. exp2 is ex2.approx.ftz.f32; mul, add, sub, max and div.rn are not .ftz (PTX of Triton 3.6.0).
Values in the cache below a sequence's length are finite: an infinite V turns rows of its block into NaN.

Splits are defined over absolute positions: it does not matter which device or page holds a key, so that attention heads
sharded over devices (Ulysses) or gathered KV give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from exactrl.contract import AttentionShape
from exactrl.ops.cuda.attention_tiles import IN_ORDER, SPLIT, WARP_ROWS, AttentionTile

PAGE_SIZE = 64  # tokens of one page of the engine's cache: a block of the order
HEAD_DIMS = (32, 64, 128, 256)
SHARED_BYTES = 228 * 1024  # of a multiprocessor, for all its programs
RESERVED_BYTES = 1024  # that each program takes besides its own


@dataclass(slots=True)
class Workspace:
    """Memory for partial results, for batches of which no two run at the same time; made when first needed."""

    floats: torch.Tensor | None = None

    def take(self, count: int, device: torch.device) -> torch.Tensor:
        """`count` floats. Where there are fewer, new ones, at least half as many again; those taken before stay as they
        are, and keep their memory."""
        held = 0 if self.floats is None else self.floats.numel()
        if self.floats is None or held < count:
            self.floats = torch.empty(max(count, held * 3 // 2), device=device)
        return self.floats[:count]


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Which query rows a batch holds; rows of one sequence are consecutive, the last one is its newest position.

    starts        int32 [S + 1] on the device: first row of each sequence
    lengths       int32 [S] on the device: keys of each sequence once this batch's are written
    tables        int32 [S, P] on the device: pages of each sequence, in order; None: k and v are packed [T, HK, D],
                  whole sequences from position 0, key row = starts[s] + position
    counts        int64 [S], host: rows of each sequence
    most_keys     int64 [S], host: lengths, or upper bounds of what they become when a captured graph is replayed
    workspace     where kernels keep partial results; of this batch alone unless given
    plans         what kernels prepare once for a batch and use in every layer
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor | None
    counts: np.ndarray
    most_keys: np.ndarray
    workspace: Workspace = field(default_factory=Workspace, repr=False, compare=False)
    plans: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def build(
        cls,
        counts: np.ndarray,
        lengths: np.ndarray,
        tables: np.ndarray | torch.Tensor | None,
        device: torch.device | str = "cuda",
        most_keys: np.ndarray | None = None,
    ) -> AttentionRows:
        """counts, lengths [S]; tables int32 [S, P] or None. Nothing waits for the device."""
        counts, lengths = np.asarray(counts, np.int64), np.asarray(lengths, np.int64)
        assert (lengths >= counts).all(), "a sequence has fewer keys than rows"
        assert tables is not None or (lengths == counts).all(), "packed sequences are whole"
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        moved = None if tables is None else torch.as_tensor(tables).to(device, torch.int32, non_blocking=True)
        return cls(
            torch.from_numpy(starts).to(device, non_blocking=True),
            torch.from_numpy(lengths.astype(np.int32)).to(device, non_blocking=True),
            moved,
            counts,
            lengths if most_keys is None else np.asarray(most_keys, np.int64),
        )

    def refresh(self) -> None:
        """Brings prepared plans up to the present `starts` and `lengths`: once a step, before the first layer of a
        captured graph. Counts and bounds on the host stay those of the capture."""
        for plan in self.plans.values():
            plan.refresh()


Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, AttentionRows, torch.Tensor, torch.Tensor | None, np.ndarray], None
]


@dataclass(frozen=True, slots=True)
class AttentionImplementation:
    """attend(q [T, H, D], k, v, rows, out [T, H, D], lse fp32 [H, T] or None, sequences) fills the rows of the named
    sequences (int64, host) and no other. k, v are [pages, page_size, HK, D], or [T, HK, D] without tables.

    kind        "split": splits in parallel, for few rows of each sequence; "in_order": any number of rows
    serves      whether it is offered for a shape
    most_rows   largest rows x (H / HK) of one sequence; None: no limit
    """

    name: str
    kind: str
    attend: Attend
    serves: Callable[[AttentionShape], bool]
    most_rows: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """Implementations to use: sequences with at most `split_rows` rows x grouped heads go to `split`, the others to
    `in_order`."""

    split: AttentionImplementation
    in_order: AttentionImplementation
    split_rows: int


def shape_of(q: torch.Tensor, k: torch.Tensor) -> AttentionShape:
    page_size = k.shape[1] if k.dim() == 4 else 0
    return AttentionShape(q.shape[1], k.shape[-2], q.shape[2], page_size)


def _serves(shape: AttentionShape) -> bool:
    pages = shape.page_size == 0 or (16 <= shape.page_size <= 256 and shape.page_size & (shape.page_size - 1) == 0)
    return shape.dim in HEAD_DIMS and shape.heads % shape.kv_heads == 0 and pages


def _reference(q, k, v, rows, out, lse, sequences) -> None:
    from exactrl.ops.cuda.triton_attention import attend_reference

    attend_reference(q, k, v, rows, out, lse, sequences)


def _in_order(q, k, v, rows, out, lse, sequences, tile: AttentionTile) -> None:
    from exactrl.ops.cuda.triton_attention import attend_in_order

    attend_in_order(q, k, v, rows, out, lse, sequences, tile)


def _split(q, k, v, rows, out, lse, sequences, tile: AttentionTile) -> None:
    from exactrl.ops.cuda.triton_split_attention import attend_splits

    attend_splits(q, k, v, rows, out, lse, sequences, tile)


def _in_order_serves(shape: AttentionShape, tile: AttentionTile) -> bool:
    whole_blocks = shape.page_size == 0 or shape.page_size >= shape.kv_block
    return _serves(shape) and (shape.dim <= 128 or tile.rows <= 64) and (whole_blocks or not tile.tma)


def _split_serves(shape: AttentionShape, tile: AttentionTile) -> bool:
    fits = tile.ctas * (tile.shared_bytes(shape.dim) + RESERVED_BYTES) <= SHARED_BYTES
    return _serves(shape) and shape.page_size > 0 and shape.heads // shape.kv_heads <= tile.rows and fits


def _compiled_split_serves(shape: AttentionShape) -> bool:
    """Copies take 64 elements of a head at once."""
    return _serves(shape) and shape.dim >= 64 and shape.page_size > 0 and shape.heads // shape.kv_heads <= WARP_ROWS


def attention_implementations() -> dict[str, AttentionImplementation]:
    """Everything that can run here. "reference" is the bit reference of `sm90`: one tile, plain pointers, masks
    everywhere."""
    found = [
        AttentionImplementation("reference", "in_order", _reference, _serves),
        *(
            AttentionImplementation(
                f"triton-in-order:{tile}",
                "in_order",
                partial(_in_order, tile=tile),
                partial(_in_order_serves, tile=tile),
            )
            for tile in IN_ORDER
        ),
        *(
            AttentionImplementation(
                f"triton-split:{tile}",
                "split",
                partial(_split, tile=tile),
                partial(_split_serves, tile=tile),
                tile.rows,
            )
            for tile in SPLIT
        ),
        *_compiled(),
    ]
    return {implementation.name: implementation for implementation in found}


def _compiled() -> list[AttentionImplementation]:
    """The kernels in CUDA C++, where they can be compiled."""
    from exactrl.ops.cuda import hopper_attention, nvrtc

    if not nvrtc.available():
        return []
    from exactrl.ops.cuda.decode_attention import attend_few_or_many
    from exactrl.ops.cuda.split_attention import attend_splits
    from exactrl.ops.cuda.stream_attention import attend_stream

    splits = {"cuda-split": attend_splits, "cuda-stream": attend_stream, "cuda-decode": attend_few_or_many}
    return [
        AttentionImplementation("hopper", "in_order", hopper_attention.attend, hopper_attention.serves),
        *(AttentionImplementation(n, "split", f, _compiled_split_serves, WARP_ROWS) for n, f in splits.items()),
    ]


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: AttentionRows,
    choice: AttentionChoice,
    lse: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, H, D] against pages k, v [pages, page_size, HK, D] -> [T, H, D], `out` when given. `lse` fp32 [H, T] is
    filled when given."""
    if out is None:
        out = torch.empty_like(q)
    for implementation, sequences in _shares(rows, choice, q.shape[1] // k.shape[-2]):
        implementation.attend(q, k, v, rows, out, lse, sequences)
    return out


class _Shares(list[tuple[AttentionImplementation, np.ndarray]]):
    """Which implementation computes which sequences of a batch, in every layer."""

    def refresh(self) -> None:
        """Nothing: it follows from numbers of rows, which stay."""


def _shares(rows: AttentionRows, choice: AttentionChoice, group: int) -> _Shares:
    key = ("shares", choice.split.name, choice.in_order.name, choice.split_rows, group)
    if key not in rows.plans:
        some, few = rows.counts > 0, rows.counts * group <= choice.split_rows
        parts = ((choice.split, np.flatnonzero(some & few)), (choice.in_order, np.flatnonzero(some & ~few)))
        rows.plans[key] = _Shares(part for part in parts if len(part[1]))
    return rows.plans[key]


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, rows, implementation):
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        implementation.attend(q, k, v, rows, out, lse, np.flatnonzero(rows.counts))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rows = rows
        return out

    @staticmethod
    def backward(ctx, d_out):
        from exactrl.ops.cuda.attention_backward import packed_backward

        q, k, v, out, lse = ctx.saved_tensors
        return *packed_backward(d_out, q, k, v, out, lse, ctx.rows), None, None


def packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: AttentionRows, implementation: AttentionImplementation
) -> torch.Tensor:
    """Whole sequences side by side: q [T, H, D], k, v [T, HK, D] -> [T, H, D]. Differentiable."""
    return _PackedAttention.apply(q, k, v, rows, implementation)
