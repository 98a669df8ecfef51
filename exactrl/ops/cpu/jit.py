"""How the CPU kernels are compiled, cached and run on threads.

A kernel is a "range kernel": `kernel(first, stop, stride, ...)` does the jobs first, first + stride, … below stop, and
jobs are independent, so the split over threads changes no bit. Beside it stands a `parallel=True` wrapper; it casts its
loop index to int64, so that it calls the very code that runs on one thread (prange counts in uint64).

numba notices a changed source file only for the file that a function stands in. Kernels here are built from shared
pieces, so the cache folder carries a digest of all sources of this folder: a stale kernel can never be loaded.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Two OpenMP pools (torch's and numba's) that spin for long on few cores starve each other. Read when a pool starts.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import numba
import numpy as np
import torch
from filelock import FileLock
from numba.core.caching import FunctionCache

from exactrl.errors import EnvironmentProblem

# Below this many multiply-adds waking a second thread costs more than it saves.
MIN_PARALLEL_WORK = 400_000.0

_numba: Any = numba.config  # a module without declared attributes


def sources_digest() -> str:
    """Digest of everything a compiled kernel is made from."""
    h = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        h.update(path.read_bytes())
    return h.hexdigest()


def cache_dir() -> Path:
    root = os.environ.get("EXACTRL_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(root) / "exactrl" / f"kernels-{sources_digest()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(folder)
    except OSError:  # a read-only home: kernels are then compiled anew in each process
        folder = Path(tempfile.mkdtemp(prefix="exactrl-kernels-"))
    return folder


_CACHE = str(cache_dir())


@functools.cache
def _cache_lock(process: int) -> FileLock:
    """The lock of the cache for one process: a forked child must not use its parent's."""
    return FileLock(str(Path(_CACHE) / ".lock"))


class _SharedCache(FunctionCache):
    """numba's on-disk cache, made safe for processes that compile at the same time.

    numba picks a free file name, then writes index and file, without a lock: two processes can pick the same name, and
    the index then maps one signature to the code of another. Loading that runs a float32 kernel on bfloat16 bits,
    silently. So both directions hold a lock, and what is loaded must be of the signature asked for.
    """

    def save_overload(self, sig: Any, data: Any) -> None:
        with _cache_lock(os.getpid()):
            super().save_overload(sig, data)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with _cache_lock(os.getpid()):
            found = super().load_overload(sig, target_context)
        arguments = sig if isinstance(sig, tuple) else sig.args
        return found if found is None or tuple(found.signature.args) == tuple(arguments) else None


def _njit(**options: Any) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        before = _numba.CACHE_DIR
        _numba.CACHE_DIR = _CACHE  # numba reads it when the function is decorated
        try:
            dispatcher = numba.njit(boundscheck=False, error_model="numpy", **options)(function)
            dispatcher._cache = _SharedCache(function)  # what cache=True does, with our class
            return dispatcher
        finally:
            _numba.CACHE_DIR = before

    return decorate


kernel = _njit(nogil=True)
parallel_kernel = _njit(parallel=True)
inline = numba.njit(boundscheck=False, error_model="numpy")


class _Breaker:
    """Falls back to one thread for a while when other processes keep the cores busy.

    A parallel region ends when its last thread has run. On a busy machine that thread may wait milliseconds for a core,
    at every one of hundreds of small regions: 20 to 50 times slower than one thread. A region in which the calling
    thread mostly slept opens the breaker for 20 ms, twice as long each time in a row, at most 2 s. The bits do not
    depend on the number of threads, so this may happen at any moment.
    """

    # A clock of the thread's own CPU time that is too coarse (15 ms on Windows) tells nothing about short regions.
    usable = time.get_clock_info("thread_time").resolution < 1e-5

    def __init__(self) -> None:
        self.open_until, self.penalty = 0.0, 0.02

    def allows(self) -> bool:
        return time.perf_counter() >= self.open_until

    def record(self, seconds: float, cpu_seconds: float) -> None:
        """Wall time of a region, and the CPU time of the calling thread in it (it spins briefly, then sleeps)."""
        slept = seconds - cpu_seconds
        if self.usable and slept > 2e-4 and slept > 0.6 * seconds:
            self.open_until = time.perf_counter() + self.penalty
            self.penalty = min(2 * self.penalty, 2.0)
        else:
            self.penalty = max(self.penalty / 2, 0.02)


_breaker = _Breaker()
_forced: int | None = None


@contextmanager
def forced_threads(n: int) -> Iterator[None]:
    """All kernels on exactly `n` threads, however small the work and however busy the machine (for checks)."""
    global _forced
    before, _forced = _forced, min(n, max_threads())
    try:
        yield
    finally:
        _forced = before


def max_threads() -> int:
    """Threads that numba started with: the most that kernels can use."""
    return int(_numba.NUMBA_NUM_THREADS)


def threads_for(work: float) -> int:
    """Threads to use for `work` multiply-adds: 1, or all that the process was given."""
    if _forced is not None:
        return _forced
    if work < MIN_PARALLEL_WORK or not _breaker.allows():
        return 1
    return numba.get_num_threads()


def run(serial: Any, parallel: Any, jobs: int, work: float, args: tuple[Any, ...]) -> None:
    """Runs a range kernel or its parallel twin over `jobs` independent jobs of `work` multiply-adds in all."""
    threads = threads_for(work)
    if threads == 1 or jobs == 1:
        serial(0, jobs, 1, *args)
        return
    begin, cpu = time.perf_counter(), time.thread_time()
    parallel(threads, jobs, *args)
    _breaker.record(time.perf_counter() - begin, time.thread_time() - cpu)


def sum_rows(x: torch.Tensor) -> torch.Tensor:
    """Column sums of a float32 matrix, rows added in ascending order (torch's sum may split rows over threads)."""
    return torch.from_numpy(np.add.reduce(x.numpy(), axis=0))


def set_num_threads(n: int) -> None:
    """Threads of the CPU kernels and of torch; 1 to the number numba started with."""
    numba.set_num_threads(min(n, max_threads()))
    torch.set_num_threads(n)


def require_denormals() -> None:
    """Raises EnvironmentProblem when this thread flushes denormal numbers to zero: that changes bits, and only on the
    threads that do it."""
    if float(np.float32(1e-40) * np.float32(1.0)) == 0.0 or float(torch.tensor(1e-40).mul(1.0)) == 0.0:
        raise EnvironmentProblem(
            "this process flushes denormal numbers to zero, which changes the bits of results; "
            "call torch.set_flush_denormal(False), and avoid libraries built with -ffast-math"
        )


def flat(t: torch.Tensor) -> np.ndarray:
    """1-D numpy view of a contiguous CPU tensor: float32 as it is, bfloat16 as uint16 bits, integers as they are."""
    if t.dtype == torch.bfloat16:
        t = t.view(torch.uint16)
    return t.detach().reshape(-1).numpy() if t.requires_grad else t.reshape(-1).numpy()
