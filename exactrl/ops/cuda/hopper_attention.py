"""In-order attention in CUDA C++ for sm_90a: prefill, chunks and training, head dims 64 and 128.

Same bits as the reference in triton_attention.py, 0.8 to 0.9 of FlashAttention-3's speed where query heads share keys:
copies by the bulk copy engine, three warpgroups that share the matrix unit, products of one block under the
exponentials of the next, items taken as multiprocessors become free. Definition: attention.py; kernel:
hopper_attention.cu with attention_rows.cuh and hopper.cuh.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from exactrl.contract import AttentionShape
from exactrl.ops.cuda.attention_host import multiprocessors, page_map, scale_of
from exactrl.ops.cuda.nvrtc import Kernel, Launch, TensorMap, tensor_map

if TYPE_CHECKING:
    from exactrl.ops.cuda.attention import AttentionRows

FOLDER = Path(__file__).parent
DIMS = (64, 128)
BLOCK = 64  # keys
ROWS = 64  # query rows of one warpgroup
CONSUMERS = 3  # warpgroups that share an item
STAGES = {64: 4, 128: 2}  # blocks of keys, and of values, on their way or in use: what fits
THREADS = 128 * (1 + CONSUMERS)
L2_BYTES = 24 << 20  # keys and values that neighbouring items share should stay in the L2 with room to spare


class _Arguments(ctypes.Structure):
    """`Arguments` of hopper_attention.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tables", "starts", "lengths", "items", "counters", "out", "lse")),
        *((name, ctypes.c_int32) for name in ("table_width", "num_items", "kv_heads", "num_tokens", "split_blocks")),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class _Items:
    """On the device.

    items       int32 [N, 4]: (sequence, kv head, first token within the batch's of the sequence, 0)
    counters    int32 [2]: next item, blocks that found none; 0 between launches, of which no two may run at a time
    launches    made ready in the first layer, with their arguments, by (head dimension, page size, keys of a split)
    """

    items: torch.Tensor
    counters: torch.Tensor
    launches: dict[tuple[int, int, int], tuple[Launch, _Arguments]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def refresh(self) -> None:
        """Nothing: the kernel reads lengths from the device; the order of items changes no bit."""


def serves(shape: AttentionShape) -> bool:
    group = shape.heads // shape.kv_heads
    pages = shape.page_size == 0 or (shape.page_size >= 16 and shape.page_size & (shape.page_size - 1) == 0)
    return shape.dim in DIMS and shape.heads % shape.kv_heads == 0 and group <= ROWS and pages


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: AttentionRows,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sequences: np.ndarray,
    *,
    kv_split: int = 512,
) -> None:
    """As AttentionImplementation.attend. Inner strides of q, k and v are 1, others multiples of 8."""
    tokens, heads, dim = q.shape
    kv_heads, page_size = k.shape[-2], k.shape[1] if rows.tables is not None else 0
    group = heads // kv_heads
    assert out.is_contiguous(), out.stride()
    assert kv_split % BLOCK == 0, kv_split
    assert kv_split >= CONSUMERS * ROWS, "the kernel takes it that rows have seen a key of every split but the last"
    assert out.data_ptr() % 16 == 0, "rows are stored 16 bytes at a time"
    plan = _plan(rows, sequences, kv_heads, group, dim)
    maps = (_queries(q, kv_heads, group), _keys(k, page_size), _keys(v, page_size))
    key = dim, page_size, kv_split
    if key not in plan.launches:
        arguments = _Arguments(
            tables=None if rows.tables is None else rows.tables.data_ptr(),
            starts=rows.starts.data_ptr(),
            lengths=rows.lengths.data_ptr(),
            items=plan.items.data_ptr(),
            counters=plan.counters.data_ptr(),
            table_width=0 if rows.tables is None else rows.tables.stride(0),
            num_items=len(plan.items),
            kv_heads=kv_heads,
            split_blocks=kv_split // BLOCK,
            scale=scale_of(dim),
        )
        kernel, blocks = _kernel(dim, group, page_size, torch.cuda.current_device()), multiprocessors(q.device)
        launch = kernel.ready((min(blocks, len(plan.items)), 1, 1), THREADS, (*maps, arguments))
        plan.launches[key] = launch, arguments
    launch, arguments = plan.launches[key]
    arguments.out, arguments.num_tokens = out.data_ptr(), tokens
    arguments.lse = None if lse is None else lse.data_ptr()
    for place, tensors in enumerate(maps):
        launch.replace(place, tensors)
    launch()


def _queries(q: torch.Tensor, kv_heads: int, group: int) -> TensorMap:
    tokens, _, dim = q.shape
    strides = (1, q.stride(1), group * q.stride(1), q.stride(0))
    return tensor_map(q, (dim, group, kv_heads, tokens), strides, (64, group, 1, ROWS // group))


def _keys(k: torch.Tensor, page_size: int) -> TensorMap:
    """[pages, page_size, HK, D], or [T, HK, D] as one page."""
    return page_map(k, min(BLOCK, page_size)) if page_size else page_map(k[None], BLOCK)


@functools.cache
def _kernel(dim: int, group: int, page_size: int, device: int) -> Kernel:
    options = source_options(dim, group, page_size)
    return Kernel(source(), "attend", options, 1024 + shared_bytes(dim), label="hopper_attention")


def source() -> str:
    return "".join((FOLDER / name).read_text() for name in ("hopper.cuh", "attention_rows.cuh", "hopper_attention.cu"))


def source_options(dim: int, group: int, page_size: int) -> list[str]:
    values = {
        "DIM": dim, "GROUP": group, "PAGED": int(page_size > 0), "PAGE_SIZE": page_size or 1,
        "PAGE_BOX": min(BLOCK, page_size) if page_size else BLOCK, "STAGES": STAGES[dim],
        "SHARED_BYTES": shared_bytes(dim),
    }  # fmt: skip
    return ["--fmad=false", *(f"-D{name}={value}" for name, value in values.items())]


def shared_bytes(dim: int) -> int:
    """Size of `Shared` in hopper_attention.cu: queries, keys and values, ones, merged splits, two items, barriers."""
    keys_and_values = STAGES[dim] * (2 * BLOCK * dim * 2 + BLOCK * 128)
    barriers = 8 * (4 + 2 * CONSUMERS + 4 * STAGES[dim])
    return CONSUMERS * ROWS * dim * (2 + 4) + keys_and_values + 2 * 32 + barriers


def _plan(rows: AttentionRows, sequences: np.ndarray, kv_heads: int, group: int, dim: int) -> _Items:
    key = ("hopper", kv_heads, group, sequences.tobytes())
    if key not in rows.plans:
        items = plan_items(rows.counts, rows.most_keys, sequences, kv_heads, group, dim)
        device = rows.starts.device
        counters = torch.zeros(2, dtype=torch.int32, device=device)
        rows.plans[key] = _Items(torch.from_numpy(items).to(device, non_blocking=True), counters)
    return rows.plans[key]


def plan_items(
    counts: np.ndarray, lengths: np.ndarray, sequences: np.ndarray, kv_heads: int, group: int, dim: int
) -> np.ndarray:
    """int32 [N, 4]. Sequences and heads are taken in sections whose keys and values fit the L2; in each section the
    items with most keys come first, so that no block is left with a long one at the end."""
    per_item = CONSUMERS * (ROWS // group)
    counts, lengths = counts[sequences], lengths[sequences]
    tiles = -(-counts // per_item)
    sequence = np.repeat(np.arange(len(counts)), tiles)
    first = (np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * per_item
    keys = (lengths - counts)[sequence] + np.minimum(first + per_item, counts[sequence])
    items = np.zeros((kv_heads, len(sequence), 4), np.int32)
    items[:, :, 0], items[:, :, 2] = sequences[sequence], first
    items[:, :, 1] = np.arange(kv_heads)[:, None]
    # Position of each (sequence, head) in the stream of keys and values, sequence by sequence, head by head.
    bytes_of = lengths * dim * 4
    before = (np.cumsum(bytes_of) - bytes_of) * kv_heads
    section = (before[sequence] + np.arange(kv_heads)[:, None] * bytes_of[sequence]) // L2_BYTES
    order = np.lexsort((items[:, :, 0].ravel(), -np.broadcast_to(keys, section.shape).ravel(), section.ravel()))
    return np.ascontiguousarray(items.reshape(-1, 4)[order])
