"""Times of GPU functions as a decoder meets them: inside a CUDA graph, weights cold, activations warm.

Each function is captured once, called several times on copies of its weights that together exceed the L2 by far, so
that every call streams its weights from memory. Replays of different functions alternate, so that drift hits all alike.
Where one call takes long (many rows) its weights are a small part of the traffic, and fewer copies are made.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from exactrl.contract import LinearShape
from exactrl.ops.cuda.matmul import Product
from exactrl.parity.adversarial import linear_inputs

T = TypeVar("T")
KEPT_BYTES = 40_000_000_000
COLD_BYTES = 160_000_000  # three times the L2 of an H200


def cold_copies(w: torch.Tensor, most: int = 64) -> list[torch.Tensor]:
    """w and as many copies as it takes to leave no part of one in the L2 when its turn comes again."""
    count = min(most, max(1, -(-COLD_BYTES // (w.numel() * w.element_size()))))
    return [w, *(w.clone() for _ in range(count - 1))]


def capture(function: Callable[[T], object], weights: Sequence[T], pool: Any) -> torch.cuda.CUDAGraph:
    """A graph that calls `function` on each of `weights` in turn, after a warm-up outside the graph. Graphs with one
    `pool` write their results to the same memory.

    Without torch.cuda.graph(), which collects garbage and empties the allocator each time: thousands are captured.
    """
    function(weights[0])
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool)
        try:
            for w in weights:
                function(w)
        finally:  # or nothing can be captured after a function that fails
            graph.capture_end()
    return graph


def times(graphs: dict[str, torch.cuda.CUDAGraph], calls: int, repeats: int) -> dict[str, list[float]]:
    """Seconds per call of each graph, `repeats` values each, replayed in turn after one uncounted round."""
    events = {
        name: [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for name in graphs
    }
    for graph in graphs.values():
        graph.replay()
    for i in range(repeats):
        for name, graph in graphs.items():
            begin, end = events[name][i]
            begin.record()
            graph.replay()
            end.record()
    torch.cuda.synchronize()
    return {name: [b.elapsed_time(e) * 1e-3 / calls for b, e in pairs] for name, pairs in events.items()}


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def linear_times(
    shape: LinearShape, products: Mapping[str, Product], m: int, *, budget_s: float = 2e-3, repeats: int = 5
) -> dict[str, float]:
    """Median seconds per call of each product on random inputs. `budget_s` bounds one replay where calls are long."""
    return {name: median(t) for name, t in linear_samples(shape, products, m, budget_s, repeats).items()}


def linear_samples(
    shape: LinearShape, products: Mapping[str, Product], m: int, budget_s: float, repeats: int
) -> dict[str, list[float]]:
    """Seconds per call, `repeats` values for each product, interleaved."""
    x, w = linear_inputs(shape, m, "random", "cuda")
    floor = 2.0 * m * shape.n * shape.k / 800e12
    weights = cold_copies(w, most=max(1, min(64, int(budget_s / floor))))
    dtype = getattr(torch, shape.out_dtype)
    pool = torch.cuda.graph_pool_handle()
    graphs = {
        name: capture(lambda v, product=product: product(x, v, dtype, shape.leaves), weights, pool)  # type: ignore[misc]
        for name, product in products.items()
    }
    measured = times(graphs, len(weights), repeats)
    graphs.clear()
    if torch.cuda.memory_reserved() > KEPT_BYTES:  # what a graph had is not reused otherwise
        torch.cuda.empty_cache()
    return measured
