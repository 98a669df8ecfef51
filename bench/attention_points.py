"""What bench.attention measures: inputs, calls to Flash Attention 3 and PyTorch, graphs, and times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from exactrl.ops.cuda.attention import AttentionImplementation, AttentionRows
from exactrl.parity.compare import differing
from exactrl.parity.gpu_timing import COLD_BYTES, capture, median, times

DEVICE = "cuda"
BF16 = torch.bfloat16
MOST_COPIES = 48
Call = Callable[[tuple[torch.Tensor, torch.Tensor]], object]


@dataclass(frozen=True, slots=True)
class Heads:
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128

    @property
    def key_bytes(self) -> int:
        """Of one key and its value."""
        return self.kv_heads * self.dim * 2 * 2


@dataclass(slots=True)
class Pool:
    """K and V of `tokens` keys, random: what the points take their caches from, so that none is filled twice."""

    shape: Heads
    tokens: int
    k: torch.Tensor = field(init=False)
    v: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator(DEVICE).manual_seed(1)
        size = (self.tokens, self.shape.kv_heads, self.shape.dim)
        self.k, self.v = (torch.empty(size, dtype=BF16, device=DEVICE).normal_(generator=g) for _ in range(2))

    def caches(self, tokens: int, page_size: int, most: int = MOST_COPIES) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """As many (k, v) of `tokens` keys, one after another, as it takes to leave none in the L2 until its next turn;
        in pages, or packed when page_size is 0."""
        wanted = -(-COLD_BYTES // (tokens * self.shape.key_bytes))
        count = max(1, min(most, wanted, self.tokens // tokens))
        assert tokens <= self.tokens, (tokens, self.tokens)
        pages = (tokens // page_size, page_size) if page_size else (tokens,)
        cut = [slice(i * tokens, (i + 1) * tokens) for i in range(count)]
        return [tuple(x[at].view(*pages, *x.shape[1:]) for x in (self.k, self.v)) for at in cut]  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class Point:
    """A batch: query rows, and caches of which each call takes the next."""

    q: torch.Tensor
    rows: AttentionRows
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    out: torch.Tensor
    lse: torch.Tensor

    @property
    def sequences(self) -> np.ndarray:
        return np.flatnonzero(self.rows.counts)

    def ours(self, implementation: AttentionImplementation) -> Call:
        return lambda cache: implementation.attend(self.q, *cache, self.rows, self.out, self.lse, self.sequences)

    def mismatched_rows(self, implementation: AttentionImplementation, reference: AttentionImplementation) -> int:
        """Rows whose output or log-sum-exp differs from the reference's, on the first cache."""
        found = []
        for i in (reference, implementation):
            self.out.fill_(torch.nan)
            self.lse.fill_(torch.nan)
            self.ours(i)(self.caches[0])
            found.append((self.out.clone(), self.lse.clone()))
        (out, lse), (other, other_lse) = found
        return int((differing(out, other).flatten(1).any(1) | differing(lse, other_lse).any(0)).sum())


def paged(pool: Pool, counts: Sequence[int], lengths: Sequence[int], page_size: int) -> Point:
    """Sequences with pages in shuffled order, the last `counts` of `lengths` keys in this batch."""
    shape, needed = pool.shape, -(-np.asarray(lengths) // page_size)
    total, width = int(needed.sum()), int(needed.max())
    tables = np.zeros((len(needed), width), np.int32)
    tables[np.arange(width) < needed[:, None]] = np.random.default_rng(total).permutation(total)
    rows = AttentionRows.build(np.asarray(counts), np.asarray(lengths), tables, DEVICE)
    return _point(shape, rows, int(np.sum(counts)), pool.caches(total * page_size, page_size))


def packed(pool: Pool, lengths: Sequence[int]) -> Point:
    rows = AttentionRows.build(np.asarray(lengths), np.asarray(lengths), None, DEVICE)
    return _point(pool.shape, rows, sum(lengths), pool.caches(sum(lengths), 0, most=1))


def _point(shape: Heads, rows: AttentionRows, t: int, caches: list[tuple[torch.Tensor, torch.Tensor]]) -> Point:
    g = torch.Generator(DEVICE).manual_seed(2)
    q = torch.randn(t, shape.heads, shape.dim, generator=g, device=DEVICE, dtype=BF16)
    return Point(q, rows, caches, torch.empty_like(q), torch.empty(shape.heads, t, device=DEVICE))


def fa3_decode(point: Point, splits: int, with_metadata: bool) -> Call:
    """One row of each sequence through Flash Attention 3; splits 0 lets it choose. Its scheduling, which a step's
    layers share, is made beforehand `with_metadata`."""
    import flash_attn_interface as fa3

    rows, q, (k, _) = point.rows, point.q, point.caches[0]
    assert rows.tables is not None, "decode reads pages"
    metadata = None
    if with_metadata:
        keys = rows.tables.shape[1] * k.shape[1]
        metadata = fa3.get_scheduler_metadata(
            len(rows.counts), 1, keys, q.shape[1], k.shape[2], q.shape[2], rows.lengths, page_size=k.shape[1],
            causal=True, num_splits=splits,
        )  # fmt: skip
    return lambda cache: fa3.flash_attn_with_kvcache(
        q[:, None], *cache, cache_seqlens=rows.lengths, page_table=rows.tables, causal=True, num_splits=splits,
        scheduler_metadata=metadata,
    )  # fmt: skip


def fa3_prefill(point: Point) -> Call:
    """Packed or paged, num_splits=1, as training and prefill call it."""
    import flash_attn_interface as fa3

    rows, q, most = point.rows, point.q, int(point.rows.counts.max())
    if rows.tables is None:
        return lambda cache: fa3.flash_attn_varlen_func(
            q, *cache, rows.starts, rows.starts, most, most, causal=True, num_splits=1
        )
    return lambda cache: fa3.flash_attn_with_kvcache(
        q, *cache, cache_seqlens=rows.lengths, page_table=rows.tables, cu_seqlens_q=rows.starts, max_seqlen_q=most,
        causal=True, num_splits=1,
    )  # fmt: skip


def seconds(calls: Mapping[str, Call], point: Point, repeats: int) -> dict[str, float]:
    """Median seconds per call of each, graphs replayed in turn."""
    pool = torch.cuda.graph_pool_handle()
    graphs = {name: capture(call, point.caches, pool) for name, call in calls.items()}
    found = {name: median(t) for name, t in times(graphs, len(point.caches), repeats).items()}
    graphs.clear()
    return found


def event_seconds(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each, in turn, between events; for calls that take milliseconds."""
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in functions}
    for i in range(repeats + 1):
        for name, function in functions.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            function()
            end.record()
            if i:
                events[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: median([b.elapsed_time(e) * 1e-3 for b, e in pairs]) for name, pairs in events.items()}


def copy_bandwidth(size: int = 8 << 30) -> float:
    """Bytes per second that a copy from device to device reads and writes."""
    a = torch.empty(size // 2, dtype=torch.uint8, device=DEVICE).random_()
    b = torch.empty_like(a)
    return 2 * a.numel() / event_seconds({"copy": lambda: b.copy_(a)}, 9)["copy"]


def launch_seconds() -> float:
    """Of a kernel that does next to nothing, in a graph of 48."""
    x = torch.zeros(1, device=DEVICE)
    graph = capture(lambda y: y.add_(1), [x] * 48, torch.cuda.graph_pool_handle())
    return median(times({"one": graph}, 48, 21)["one"])
