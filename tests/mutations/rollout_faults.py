"""Faults of the engine: batches, cache, scheduling, and what it records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import numpy as np
import torch

from exactrl.engine.allocator import BlockAllocator
from exactrl.engine.batch import Batch
from exactrl.engine.engine import Engine
from exactrl.engine.scheduler import Scheduler
from exactrl.engine.step import Step
from exactrl.model import attention_state
from exactrl.model.attention_state import PagedState
from exactrl.rl import rollout
from tests.mutations.fault import Apply, Fault, Hits, replacing
from tests.mutations.scenarios import ORACLE_COUNT, ORACLE_TRAIN, Setup, ops_rung, rung, training

LITTLE_CACHE = Setup(limits={"kv_tokens": 96}, new_tokens=30)  # sequences grow to 77 tokens: some are preempted


def batches(change: Callable[[Batch, Step], Batch]) -> Apply:
    """Every batch the engine builds is changed; what `change` returns unchanged does not count."""

    def make(original: Callable, hits: Hits) -> Callable:
        def build(chunks: Step, *rest) -> Batch:
            before = original(chunks, *rest)
            after = change(before, chunks)
            if after is not before:
                hits()
            return after

        return build

    return replacing(Batch, "build", make)


def ids_off_by_one(batch: Batch, chunks: Step) -> Batch:
    """A later chunk of a prompt begins with the last token of the one before."""
    ids, at = batch.ids.clone(), 0
    for c in chunks:
        if c.start and c.num_tokens > 1:
            ids[at : at + c.num_tokens] = torch.tensor(c.seq.token_ids[c.start - 1 : c.start - 1 + c.num_tokens])
        at += c.num_tokens
    return batch if torch.equal(ids, batch.ids) else replace(batch, ids=ids)


def pages_swapped(batch: Batch, chunks: Step) -> Batch:
    """Attention reads the first two pages of a sequence in the wrong order; writing is right."""
    tables = batch.rows.tables.clone()
    long = torch.tensor([c.start + c.num_tokens > 32 for c in chunks])
    if not long.any():
        return batch
    tables[long, :2] = tables[long, :2].flip(1)
    return replace(batch, rows=replace(batch.rows, tables=tables))


def row_before(batch: Batch, chunks: Step) -> Batch:
    """The last prompt token's logits are taken from the row before."""
    counts = torch.tensor([c.num_tokens for c in chunks if c.samples])
    return replace(batch, sample_rows=batch.sample_rows - (counts > 1).long()) if (counts > 1).any() else batch


def first_position(batch: Batch, chunks: Step) -> Batch:
    """Noise is counted from the end of the prompt only: all tokens of a response get the same."""
    return replace(batch, sample_positions=torch.tensor([c.seq.num_prompt for c in chunks if c.samples]))


def _roll(batch: Batch, name: str) -> Batch:
    values = getattr(batch, name)
    if len(values) < 2:
        return batch
    rolled = np.roll(values, 1) if isinstance(values, np.ndarray) else values.roll(1)
    return replace(batch, **{name: rolled})


def chunk_one_short(original: Callable, hits: Hits) -> Callable:
    """A later chunk of a prompt begins one token early and so ends one early."""

    def schedule(self: Scheduler) -> Step:
        step = original(self)
        for i, c in enumerate(step):
            if c.start and c.num_tokens > 1 and c.start + c.num_tokens <= c.seq.num_prompt:
                step.start[i] -= 1
                hits()
        return step

    return schedule


def sampler_key_without_index(original: Callable, hits: Hits) -> Callable:
    def noise_key(seed, stream, step, retry, row_id, sample_index):
        hits()
        return original(seed, stream, step, retry, row_id, 0)

    return noise_key


def counted_keys(original: Callable, hits: Hits) -> Callable:
    """Noise from a running counter instead of the request's own key."""
    calls = count(1)

    def build(chunks, *rest):
        batch = original(chunks, *rest)
        hits()
        return replace(batch, keys=batch.keys + next(calls))

    return build


def never_reset(original: Callable, hits: Hits) -> Callable:
    def reset(self: BlockAllocator, root_key) -> None:
        if not hasattr(self, "root_key"):
            return original(self, root_key)
        hits()
        return None

    return reset


def matched_out_of_order(original: Callable, hits: Hits) -> Callable:
    def match_prefix(self: BlockAllocator, token_ids) -> list[int]:
        blocks = original(self, token_ids)
        if len(blocks) > 1:
            hits()
            blocks[0], blocks[1] = blocks[1], blocks[0]
        return blocks

    return match_prefix


def matched_by_length(original: Callable, hits: Hits) -> Callable:
    """Any cached block is taken for the first one of a prompt: the tokens are not compared."""

    def match_prefix(self: BlockAllocator, token_ids) -> list[int]:
        blocks = original(self, token_ids)
        if not blocks and len(token_ids) > 16 and self._cached:
            hits()
            return [next(iter(self._cached.values()))]
        return blocks

    return match_prefix


def on_preemption(change: Callable[[list[float]], None]) -> Apply:
    def make(original: Callable, hits: Hits) -> Callable:
        def preempt(self: Scheduler) -> None:
            original(self)
            logprobs = self.waiting[0].logprobs
            if len(logprobs) > 1:
                hits()
                change(logprobs)

        return preempt

    return replacing(Scheduler, "_preempt_last", make)


def _one_dropped_one_doubled(logprobs: list[float]) -> None:
    logprobs.append(logprobs[-1])
    del logprobs[0]


def completions(change: Callable[[np.ndarray], np.ndarray]) -> Apply:
    """The logprobs of every completion are changed after they were recorded."""

    def make(original: Callable, hits: Hits) -> Callable:
        def complete(self: Engine, seq):
            completion = original(self, seq)
            hits()
            completion.logprobs = change(completion.logprobs)
            return completion

        return complete

    return replacing(Engine, "_completion", make)


def key_never_written(original: Callable, hits: Hits) -> Callable:
    """The last row of a chunk overwrites the first row's slot instead of filling its own."""

    def write_kv(k, v, rows, k_pages, v_pages) -> None:
        if len(rows.slots) > 1:
            hits()
            slots = rows.slots.clone()
            slots[-1] = slots[0]
            rows = replace(rows, slots=slots)
        original(k, v, rows, k_pages, v_pages)

    return write_kv


def rounded_cache(original: Callable, hits: Hits) -> Callable:
    """Keys are stored rounded to bfloat16 in a float32 model."""

    def write_kv(k, v, rows, k_pages, v_pages) -> None:
        hits()
        original(k.bfloat16().float(), v, rows, k_pages, v_pages)

    return write_kv


def one_layers_pages(original: Callable, hits: Hits) -> Callable:
    """All layers write to and read from the first layer's pages."""

    def attend(self: PagedState, layer, q, k, v):
        hits()
        return original(self, 0, q, k, v)

    return attend


def sorted_pages(original: Callable, hits: Hits) -> Callable:
    """Pages are read in the order of their numbers, which is right only while blocks are handed out in that order."""

    def paged_attention(q, rows, *rest):
        tables = rows.tables.clone()
        for i, (a, n) in enumerate(zip(rows.first.tolist(), rows.starts.diff().tolist(), strict=True)):
            used = -(-(a + n) // 16)
            tables[i, :used] = tables[i, :used].sort()[0]
        if not torch.equal(tables, rows.tables):
            hits()
        return original(q, replace(rows, tables=tables), *rest)

    return paged_attention


def _temperatures(change: Callable[[torch.Tensor], torch.Tensor]) -> Apply:
    return batches(lambda batch, _: replace(batch, temperatures=change(batch.temperatures)))


def _first_rows(t: torch.Tensor) -> torch.Tensor:
    return t[:1].expand(len(t)).contiguous()


FAULTS = [
    Fault("position/engine", "positions are one too large", batches(lambda b, _: replace(b, positions=b.positions + 1)),
          ops_rung("positions")),
    Fault("temperature/twice-engine", "the engine divides logits by the temperature twice",
          _temperatures(lambda t: t * t), ORACLE_TRAIN),
    Fault("temperature/never-engine", "the engine ignores the temperature", _temperatures(torch.ones_like),
          ORACLE_TRAIN),
    Fault("row_temperature/engine", "each row is sampled at its neighbour's temperature",
          batches(lambda b, _: _roll(b, "temperatures")), ops_rung("(sample|logprob)")),
    Fault("row_temperature/first-of-batch", "all rows are sampled at the first row's temperature",
          _temperatures(_first_rows), rung("batch_composition")),
    Fault("noise/every-token-the-same", "all tokens of a response get the same noise", batches(first_position),
          ops_rung("sample")),
    Fault("noise/position-off-by-one", "noise is counted by the position before",
          batches(lambda b, _: replace(b, sample_positions=b.sample_positions - 1)), ops_rung("sample")),
    Fault("noise/key-of-another-sample", "rows of a batch use each other's noise",
          batches(lambda b, _: _roll(b, "keys")), ops_rung("sample")),
    Fault("noise/two-samples-the-same", "samples of a group get the same noise",
          replacing(rollout, "noise_key", sampler_key_without_index),
          training("own noise per response", "ParityError: requests .* have the same noise key")),
    Fault("noise/from-a-counter", "noise depends on how many batches came before",
          replacing(Batch, "build", counted_keys), ops_rung("sample")),
    Fault("chunk/ids-off-by-one", "a later chunk repeats the token before it", batches(ids_off_by_one),
          ops_rung("ids")),
    Fault("chunk/one-short", "a later chunk begins and ends one token early",
          replacing(Scheduler, "schedule", chunk_one_short), rung("chunk_sizes"),
          Setup(limits={"prefix_cache": False})),
    Fault("chunk/one-short-cached", "the same, with blocks published for the prefix cache",
          replacing(Scheduler, "schedule", chunk_one_short),
          training("invariant of the block allocator", "AssertionError: block .* is published twice"),
          Setup(limits={"chunk_tokens": 24})),
    Fault("logits_row/engine", "a prompt's first token is sampled from the row before", batches(row_before),
          ORACLE_TRAIN),
    Fault("pages/swapped", "two entries of a page table are swapped", batches(pages_swapped),
          ops_rung(r"layers\.0\.attention")),
    Fault("pages/never-written", "one key and value of a chunk is not written",
          replacing(attention_state, "write_kv", key_never_written), ops_rung(r"layers\.0\.attention")),
    Fault("pages/rounded", "keys are cached in bfloat16", replacing(attention_state, "write_kv", rounded_cache),
          ops_rung(r"layers\.0\.attention")),
    Fault("pages/of-one-layer", "all layers share one layer's cache", replacing(PagedState, "attend", one_layers_pages),
          rung("layer", r"layers\.0\.attention")),
    Fault("pages/in-order-of-number", "pages are read in the order of their numbers",
          replacing(attention_state, "paged_attention", sorted_pages), rung("paging_order")),
    Fault("prefix/stale", "the prefix cache survives a weight update", replacing(BlockAllocator, "reset", never_reset),
          ORACLE_TRAIN),
    Fault("prefix/stale-ladder", "the same, for the ladder", replacing(BlockAllocator, "reset", never_reset),
          rung("after_update", "train/")),
    Fault("prefix/wrong-order", "two blocks of a prefix hit are swapped",
          replacing(BlockAllocator, "match_prefix", matched_out_of_order), rung("prefix_cache")),
    Fault("prefix/wrong-content", "a prefix hit whose tokens are others",
          replacing(BlockAllocator, "match_prefix", matched_by_length), rung("prefix_cache")),
    Fault("preemption/dropped", "a preempted sequence loses a logprob", on_preemption(lambda x: x.__delitem__(-1)),
          ORACLE_COUNT, LITTLE_CACHE),
    Fault("preemption/doubled", "a preempted sequence keeps a logprob twice", on_preemption(lambda x: x.append(x[-1])),
          ORACLE_COUNT, LITTLE_CACHE),
    Fault("preemption/shifted", "a preempted sequence loses one logprob and doubles another",
          on_preemption(_one_dropped_one_doubled), rung("preemption")),
    Fault("preemption/shifted-run", "the same, in a run", on_preemption(_one_dropped_one_doubled), ORACLE_TRAIN,
          LITTLE_CACHE),
    Fault("record/shifted", "logprobs stand beside their neighbour's token", completions(lambda x: np.roll(x, 1)),
          ORACLE_TRAIN),
    Fault("record/rounded", "logprobs are stored in half precision",
          completions(lambda x: x.astype(np.float16).astype(np.float32)), ORACLE_TRAIN),
    Fault("record/float64", "logprobs are recorded in float64", completions(lambda x: x.astype(np.float64)),
          ORACLE_COUNT),
    Fault("record/last-missing", "the last token has no logprob", completions(lambda x: x[:-1].copy()), ORACLE_COUNT),
]  # fmt: skip
