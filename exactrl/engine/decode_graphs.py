"""Decode steps on a GPU as captured graphs: one token of each sequence, launched as a whole.

A graph is captured for a number of rows and a longest context, both rounded up. Rows that no sequence needs have no
keys, write nothing to the cache and are not read; that they change no bit of the others is what the ladder shows (rung
`cuda_graphs`), since a row's bits depend on no other row. Inputs go to the device in one copy, into memory that the
graph reads in each replay; what attention kernels prepare once a step they prepare inside the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from exactrl.engine.batch import with_pending
from exactrl.engine.capture import Capture, Replay
from exactrl.engine.results import IN_FLIGHT, Computed, Results
from exactrl.model.attention_state import CacheState
from exactrl.model.qwen3 import Qwen3
from exactrl.ops.cuda.attention import Workspace
from exactrl.ops.rows import row_slots
from exactrl.ops.transfer import key_bits

if TYPE_CHECKING:
    from exactrl.engine.step import Step
    from exactrl.ops.cuda.binding import CudaOps

SHORTEST = 1024  # tokens of the context that the smallest graphs are captured for
FIELDS = {"ids": np.int64, "sources": np.int64, "positions": np.int64, "slots": np.int64, "sample_positions": np.int64,
          "keys": np.int64, "temperatures": np.float32, "lengths": np.int32}  # fmt: skip
Size = tuple[str, np.dtype, tuple[int, ...]]


def rows_of(count: int, max_rows: int) -> int:
    """Rows of the graph that serves `count` sequences: steps of at most a fourth or 8 rows, and `max_rows` itself."""
    step = max(8, 1 << max(0, (count - 1).bit_length() - 3))
    return min(max_rows, count if count <= 2 else 4 if count <= 4 else -(-count // step) * step)


def context_of(longest: int, max_tokens: int) -> int:
    """Tokens of context of the graph that serves sequences of up to `longest`: a power of two, or `max_tokens`."""
    return min(max_tokens, max(SHORTEST, 1 << (longest - 1).bit_length()))


class Inputs:
    """One byte buffer on the device, and views of it; `host` are views of as many pinned buffers as there may be steps
    in flight."""

    def __init__(self, rows: int, pages: int, device: torch.device) -> None:
        sizes: list[Size] = [(name, np.dtype(kind), (rows,)) for name, kind in FIELDS.items()]
        sizes.append(("tables", np.dtype(np.int32), (rows, pages)))
        total = sum(kind.itemsize * int(np.prod(shape)) for _, kind, shape in sizes)
        pinned = device.type == "cuda"
        self._bytes = torch.zeros(total, dtype=torch.uint8, device=device)
        self._pinned = [torch.zeros(total, dtype=torch.uint8, pin_memory=pinned) for _ in range(IN_FLIGHT)]
        self.device = _views(self._bytes, sizes)
        self.host = [{name: x.numpy() for name, x in _views(p, sizes).items()} for p in self._pinned]

    def send(self, turn: int) -> None:
        self._bytes.copy_(self._pinned[turn], non_blocking=True)


def _views(buffer: torch.Tensor, sizes: Sequence[Size]) -> dict[str, torch.Tensor]:
    views, at = {}, 0
    for name, kind, shape in sizes:
        size = kind.itemsize * int(np.prod(shape))
        views[name] = buffer[at : at + size].view(getattr(torch, kind.name)).view(shape)
        at += size
    return views


@dataclass(slots=True)
class Captured:
    """One graph with its inputs; `replay` runs it on the current stream. `held` keeps alive what the graph reads."""

    inputs: Inputs
    replay: Replay
    held: tuple[object, ...]


class Rows:
    """What the sequences of a batch bring along, on the host, by rows; only what changed since the last is written.

    tables int32 [rows, pages], keys int64 [rows] (bits of the noise keys), temperatures fp32 [rows]
    """

    def __init__(self, rows: int, pages: int, page_size: int) -> None:
        self.tables = np.zeros((rows, pages), np.int32)
        self.keys, self.temperatures = np.zeros(rows, np.int64), np.zeros(rows, np.float32)
        self.page_size = page_size
        self._admission = self._pages = np.zeros(0, np.int64)  # of the rows in use: ascending; pages written

    def update(self, step: Step) -> None:
        """Each chunk is one token, the last that its sequence's pages are for. While an admission lasts, a table only
        grows."""
        if not np.array_equal(step.admission, self._admission):
            self._move(step)
        held, pages = self._pages, step.start // self.page_size + 1
        for i in np.flatnonzero(held != pages).tolist():
            self.tables[i, held[i] : pages[i]] = step.seqs[i].block_ids[held[i] :]
        self._pages = pages

    def _move(self, step: Step) -> None:
        """Rows of sequences that stay move to their new places; the others begin anew."""
        n, old = len(step), np.searchsorted(self._admission, step.admission)
        stays = np.append(self._admission, -1)[old] == step.admission
        to, old, new = np.flatnonzero(stays), old[stays], np.flatnonzero(~stays)
        pages, width = np.zeros(n, np.int64), self._pages.max(initial=0)
        pages[to] = self._pages[old]
        self.tables[to, :width] = self.tables[old, :width]
        self.keys[to], self.temperatures[to] = self.keys[old], self.temperatures[old]
        requests = [step.seqs[i].request for i in new.tolist()]
        self.keys[new] = key_bits([request.noise_key for request in requests]).numpy()
        self.temperatures[new] = [request.params.temperature for request in requests]
        self._admission, self._pages = step.admission, pages


def fill(host: dict[str, np.ndarray], step: Step, rows: Rows) -> None:
    """What a graph reads of a decode step: FIELDS and page tables. Rows behind its chunks compute in vain."""
    n, starts = len(step), step.start
    rows.update(step)
    known = np.flatnonzero(step.source < 0)  # the other ids are pending
    host["ids"][known] = [step.seqs[i].token_ids[-1] for i in known.tolist()]
    host["sources"][:n] = step.source
    host["positions"][:n] = starts
    host["slots"][:n] = row_slots(np.arange(n + 1), starts, rows.tables, rows.page_size)
    host["sample_positions"][:n] = host["lengths"][:n] = starts + 1
    host["keys"][:n], host["temperatures"][:n] = rows.keys[:n], rows.temperatures[:n]
    host["tables"][:n] = rows.tables[:n, : host["tables"].shape[1]]
    host["sources"][n:], host["slots"][n:], host["lengths"][n:] = -1, -1, 0
    host["ids"][n:] = host["positions"][n:] = host["keys"][n:] = 0


class DecodeGraphs:
    """See the module."""

    def __init__(self, model: Qwen3, cache: CacheState, results: Results, max_tokens: int, capture: Capture) -> None:
        self.model, self.cache, self.results = model, cache, results
        self.max_rows, self.max_tokens = results.max_rows, max_tokens
        self.ops = cast("CudaOps", model.ops)
        self._capture = capture
        self._graphs: dict[tuple[int, int], Captured] = {}
        self._workspace = Workspace()  # one for all graphs: no two run at the same time
        self._rows = Rows(self.max_rows, -(-max_tokens // self.ops.page_size), self.ops.page_size)
        self._turn = 0
        model.reserve_positions(max_tokens)

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def serves(self, step: Step) -> bool:
        return step.decodes

    def launch(self, step: Step) -> Computed:
        """Starts a step that it `serves`."""
        longest = int(step.start.max()) + 1
        key = rows_of(len(step), self.max_rows), context_of(longest, self.max_tokens)
        if (graph := self._graphs.get(key)) is None:
            floats = self._workspace.floats
            graph = self._captured(*key)
            if self._workspace.floats is not floats:
                self._drop()
            self._graphs[key] = graph
        fill(graph.inputs.host[self._turn], step, self._rows)
        graph.inputs.send(self._turn)
        self._turn = (self._turn + 1) % IN_FLIGHT
        graph.replay()
        return self.results.send(len(step))

    def _drop(self) -> None:
        """All graphs: they keep a smaller workspace, which another one has outgrown."""
        if self.model.ops.device.type == "cuda":
            torch.cuda.synchronize()  # the step before may be one of them
        self._graphs.clear()

    def _captured(self, rows: int, context: int) -> Captured:
        """Captured on rows that are all padding: it leaves the cache as it is, and so the results of the last step."""
        inputs = Inputs(rows, -(-context // self.ops.page_size), self.model.ops.device)
        inputs.device["slots"].fill_(-1)
        inputs.device["sources"].fill_(-1)
        x = inputs.device
        attention = self.ops.decode_rows(x["lengths"], x["slots"], x["tables"], context, self._workspace)
        kept = self.results.buffer.clone()

        def decode() -> None:
            self.cache.rows = attention
            attention.attention.refresh()
            ids = with_pending(x["ids"], x["sources"], self.results.tokens)
            hidden = self.model(ids, x["positions"], self.cache)
            sampled = self.ops.sample(hidden, self.model.head, x["temperatures"], x["keys"], x["sample_positions"])
            self.results.store(*sampled)

        (replay,) = self._capture(lambda cut: decode())
        self.results.buffer.copy_(kept)
        return Captured(inputs, replay, (attention, self.model.rope))
