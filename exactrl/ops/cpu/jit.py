"""How the CPU kernels are compiled, cached and run on threads.

A kernel is a "range kernel": `kernel(first, stop, stride, ...)` does the jobs first, first + stride, … below stop, and
jobs are independent, so the split over threads changes no bit. Beside it stands a `parallel=True` wrapper.

numba notices a changed source file only for the file that a function stands in. Kernels here are built from shared
pieces, so the cache folder carries a digest of all sources of this folder: a stale kernel can never be loaded.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Two OpenMP pools (torch's and numba's) that spin for long on few cores starve each other. Read when a pool starts.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import numba
import numpy as np
import torch

# Below this many multiply-adds waking a second thread costs more than it saves.
MIN_PARALLEL_WORK = 400_000


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
    except OSError:  # a read-only home: kernels are then compiled anew in each process
        folder = Path(tempfile.mkdtemp(prefix="exactrl-kernels-"))
    return folder


_CACHE = str(cache_dir())


def _njit(**options: Any) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = _CACHE  # numba reads it when the function is decorated
        try:
            return numba.njit(boundscheck=False, error_model="numpy", cache=True, **options)(function)
        finally:
            numba.config.CACHE_DIR = before

    return decorate


kernel = _njit(nogil=True)
parallel_kernel = _njit(parallel=True)
inline = numba.njit(boundscheck=False, error_model="numpy")


def threads_for(work: float) -> int:
    """Threads to use for `work` multiply-adds: 1, or all that the process was given."""
    return 1 if work < MIN_PARALLEL_WORK else numba.get_num_threads()


def set_num_threads(n: int) -> None:
    """Threads of the CPU kernels and of torch; 1 to the number numba started with."""
    numba.set_num_threads(min(n, numba.config.NUMBA_NUM_THREADS))
    torch.set_num_threads(n)


def flat(t: torch.Tensor) -> np.ndarray:
    """1-D numpy view of a contiguous CPU tensor: float32 as it is, bfloat16 as uint16 bits, integers as they are."""
    if t.dtype == torch.bfloat16:
        t = t.view(torch.uint16)
    return t.detach().reshape(-1).numpy() if t.requires_grad else t.reshape(-1).numpy()
