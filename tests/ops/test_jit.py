"""Compilation cache under concurrent processes, the busy-machine breaker, and flushed denormals."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from exactrl.errors import EnvironmentProblem
from exactrl.ops.cpu import jit

# Each process compiles the same kernels for another signature into one empty cache, all at once; then each runs what
# the cache holds for all signatures.
COMPILE = """
import sys, time
import numpy as np
from exactrl.ops.cpu import reduce, swiglu
x = np.ones(64, np.float32)
def run(dtype):
    y = np.zeros(32, dtype)
    swiglu.swiglu_range(0, 1, 1, x.astype(dtype), y, 32)
    return y
while time.time() < float(sys.argv[1]): pass
for dtype in sys.argv[2:]: print(dtype, run(np.dtype(dtype)).tolist()[:2])
"""


def test_processes_that_compile_at_once_never_swap_kernels(tmp_path):
    import time

    env = {**os.environ, "EXACTRL_CACHE_DIR": str(tmp_path)}

    def start(*dtypes: str, wait: float) -> subprocess.Popen:
        command = [sys.executable, "-c", COMPILE, str(time.time() + wait), *dtypes]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)

    orders = (["float32", "uint16"], ["uint16", "float32"])
    outputs = [p.communicate(timeout=300)[0] for p in [start(*o, wait=6) for o in orders]]
    outputs.append(start("float32", "uint16", wait=0).communicate(timeout=300)[0])
    expected = sorted(outputs[0].splitlines())
    assert expected[0].startswith("float32 [0.731")
    for out in outputs:
        assert sorted(out.splitlines()) == expected


def test_a_cached_kernel_of_another_signature_is_not_loaded(tmp_path, monkeypatch):
    class Found:
        class signature:
            args = (1, 2)

    monkeypatch.setattr(jit.FunctionCache, "load_overload", lambda self, sig, context: Found)
    cache = object.__new__(jit._SharedCache)
    assert cache.load_overload((1, 2), None) is Found
    assert cache.load_overload((1, 3), None) is None


def test_breaker_opens_for_slow_regions_and_closes_again(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(jit.time, "perf_counter", lambda: now[0])
    breaker = jit._Breaker()
    breaker.record(20e-6, 19e-6)
    breaker.record(5e-3, 3e-3)  # one job more on the other thread: waiting, but not mostly
    assert breaker.allows()
    breaker.record(8e-3, 1e-4)
    assert not breaker.allows()
    now[0] += 0.021
    assert breaker.allows()
    breaker.record(8e-3, 1e-4)
    now[0] += 0.021
    assert not breaker.allows(), "twice in a row: twice as long"
    for _ in range(20):
        now[0] += 10
        breaker.record(8e-3, 1e-4)
    now[0] += 2.1
    assert breaker.allows(), "never longer than 2 s"


def test_forced_threads_ignore_work_and_breaker():
    with jit.forced_threads(1):
        assert jit.threads_for(1e12) == 1
        with jit.forced_threads(2):
            assert jit.threads_for(1) == min(2, jit.numba.config.NUMBA_NUM_THREADS)
    assert jit.threads_for(1) == 1


def test_flushed_denormals_are_refused():
    jit.require_denormals()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        with pytest.raises(EnvironmentProblem, match="denormal"):
            jit.require_denormals()
    finally:
        torch.set_flush_denormal(False)


def test_sum_rows_adds_in_order():
    x = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    assert float(jit.sum_rows(x)) == 1.0  # (1e8 + 1) - 1e8 + 1 in float32
    assert np.float32(np.float32(1e8) + np.float32(1)) == np.float32(1e8)
