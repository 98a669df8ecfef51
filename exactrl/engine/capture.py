"""CUDA graphs of an engine: work is recorded once and replayed as a whole, or in pieces with other work in between."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch

Replay = Callable[[], object]
"""Runs what was captured on the current stream."""


class Capture(Protocol):
    def __call__(self, run: Callable[[Callable[[], None]], None]) -> list[Replay]:
        """`run(cut)` calls `cut` between pieces; returns what replays each piece. It is run twice, the first time
        uncaptured: kernels are compiled then, and what a batch needs once is prepared outside the graphs."""
        ...


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One for all graphs of the process: cuBLAS keeps a workspace for every stream it has met."""
    return torch.cuda.Stream(device)


class CudaCapture:
    """All graphs of an engine share one memory pool: no two run at the same time."""

    def __init__(self) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), _capture_stream(torch.cuda.current_device())

    def __call__(self, run: Callable[[Callable[[], None]], None]) -> list[Replay]:
        run(lambda: None)
        torch.cuda.synchronize()
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self.pool)  # torch.cuda.graph() would empty the allocator each time

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        with torch.cuda.stream(self.stream):
            begin()
            try:
                run(cut)
            except BaseException:
                self.pool = torch.cuda.graph_pool_handle()  # one whose graphs are all gone takes no other
                raise
            finally:  # or nothing can be captured after a function that fails
                graphs[-1].capture_end()
        return [graph.replay for graph in graphs]
