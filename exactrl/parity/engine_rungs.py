"""Rungs of the engine: whole trajectories under everything that must not change a bit."""

from __future__ import annotations

from typing import cast

from exactrl.ops.cpu import jit
from exactrl.parity.compare import Tally
from exactrl.parity.subject import Subject
from exactrl.types import Completion, Request


def batch_composition(subject: Subject, tally: Tally) -> None:
    """1, 2, 3 and 7 at a time, in reverse order, and beside copies with other noise."""
    for n in (1, 2, 3, 7):
        tally.trajectories(subject.make_engine(max_concurrent=n).generate(subject.requests), subject.baseline, f"{n}")
    backwards = subject.make_engine().generate(subject.requests[::-1])[::-1]
    tally.trajectories(backwards, subject.baseline, "reverse order")


def chunk_sizes(subject: Subject, tally: Tally) -> None:
    for n in (1, 3, 16, 50, 129):
        engine = subject.make_engine(chunk_tokens=n, max_concurrent=5)
        tally.trajectories(engine.generate(subject.requests), subject.baseline, f"chunks of {n} tokens")


def prefix_cache(subject: Subject, tally: Tally) -> None:
    """Off, cold, warm; with fewer sequences at a time, later ones find the blocks of earlier ones."""
    cold = subject.make_engine(prefix_cache=False).generate(subject.requests)
    tally.trajectories(cold, subject.baseline, "prefix cache off")
    engine = subject.make_engine(max_concurrent=2)
    for what in ("cold", "warm"):
        tally.trajectories(engine.generate(subject.requests), subject.baseline, what)
    hits = engine.stats.cached_tokens
    tally.require(hits > 0, "no prefix was ever found in the cache")
    tally.notes.append(f"{hits} tokens from the cache")


def _without_the_longest(subject: Subject) -> tuple[list[Request], list[Completion], int]:
    """Requests of which several are under way in the memory that the longest of them needs, what comes of them, and
    how many KV tokens that is."""
    longest = max(len(r.token_ids) + r.params.max_new_tokens for r in subject.requests)
    ids = [r for r in subject.requests if len(r.token_ids) + r.params.max_new_tokens < longest] or subject.requests
    need = max(len(r.token_ids) + r.params.max_new_tokens for r in ids)
    return ids, [c for c in subject.baseline if c.id in {r.id for r in ids}], need


def preemption(subject: Subject, tally: Tally) -> None:
    """A cache that holds little more than the longest sequence."""
    ids, baseline, need = _without_the_longest(subject)
    count = 0
    page = subject.rollout_model.ops.page_size
    for spare in (0, page, 3 * page):
        engine = subject.make_engine(kv_tokens=need + spare)
        tally.trajectories(engine.generate(ids), baseline, f"{need + spare} KV tokens")
        count += engine.stats.preemptions
    tally.require(count > 0, "nothing was preempted")
    tally.notes.append(f"{count} preemptions")


def paging_order(subject: Subject, tally: Tally) -> None:
    for order, seed in (("lifo", 0), ("shuffled", 1), ("shuffled", 2)):
        engine = subject.make_engine(block_order=order, block_seed=seed, max_concurrent=4)
        engine.generate(subject.requests[:3])
        tally.trajectories(engine.generate(subject.requests), subject.baseline, f"blocks {order}")


def nan_cache(subject: Subject, tally: Tally) -> None:
    """Cache memory filled with NaN (and with a huge value) beforehand."""
    for value in (float("nan"), 1e30):
        engine = subject.make_engine(max_concurrent=4)
        engine.cache.fill(value)
        tally.trajectories(engine.generate(subject.requests), subject.baseline, f"cache filled with {value}")


def overlap(subject: Subject, tally: Tally) -> None:
    """Steps one after the other, and each launched before the one before is known; with few blocks, too."""
    ids, baseline, need = _without_the_longest(subject)
    for on in (False, True):
        found = subject.make_engine(overlap=on).generate(subject.requests)
        tally.trajectories(found, subject.baseline, f"overlap {on}")
        engine = subject.make_engine(overlap=on, kv_tokens=need)
        tally.trajectories(engine.generate(ids), baseline, f"overlap {on}, {need} KV tokens")
        tally.require(engine.stats.preemptions > 0, "nothing was preempted")


def cuda_graphs(subject: Subject, tally: Tally) -> None:
    """Steps op by op, and replayed from graphs at other numbers of sequences and tokens than those captured for."""
    for graphs, overlaps in ((False, False), (False, True), (True, False)):
        engine = subject.make_engine(cuda_graphs=graphs, overlap=overlaps)
        tally.trajectories(engine.generate(subject.requests), subject.baseline, f"graphs {graphs}, overlap {overlaps}")
    engine = subject.make_engine(max_concurrent=7)
    engine.cache.fill(float("nan"))
    for what in ("captured", "replayed"):
        tally.trajectories(engine.generate(subject.requests), subject.baseline, what)
    runner = engine.runner
    tally.require(runner.pieces is not None and runner.pieces.num_captured > 0, "no step with prompts was captured")
    if runner.graphs is not None:  # where attention finds its work on the device
        tally.require(runner.graphs.num_captured > 0, "no decode step was captured")


def threads(subject: Subject, tally: Tally) -> None:
    """Every kernel on one thread, and every kernel split over two whatever its size."""
    if subject.rollout_model.ops.device.type != "cpu":
        tally.skipped = "the number of threads is a matter of the CPU kernels"
        return
    if jit.max_threads() < 2:
        tally.skipped = "this machine offers one thread only"
    for n in (1, 2):
        with jit.forced_threads(n):
            tally.trajectories(subject.make_engine().generate(subject.requests), subject.baseline, f"threads: {n}")


def reference_kernels(subject: Subject, tally: Tally) -> None:
    """On a GPU: the bit references of linears and attention, slow kernels of one tile each, in place of the chosen."""
    model, baseline = subject.rollout_model, subject.baseline
    if model.ops.backend != "cuda":
        tally.skipped = "on the CPU every op has one kernel"
        return
    from exactrl.ops.cuda import binding

    chosen = model.ops
    model.ops = binding.with_references(cast("binding.CudaOps", chosen))
    try:
        tally.trajectories(subject.make_engine().generate(subject.requests), baseline, "reference kernels")
    finally:
        model.ops = chosen
