"""No kernel touches memory outside its arrays: every array ends (or begins) at a page that may not be accessed."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from exactrl.ops import attention
from exactrl.ops.cpu import jit
from exactrl.ops.qkv import HeadShape

from . import test_invariance
from .helpers import CONTRACT, DTYPES, packed_rows

ROOT = Path(__file__).parents[2]
PROT_NONE, SIZE = 0, mmap.PAGESIZE
_flat = jit.flat


def fenced(at_end: bool):
    """jit.flat whose arrays are copies that touch a forbidden page. What kernels write is lost: only faults matter."""
    libc = ctypes.CDLL(None, use_errno=True)
    maps: list[mmap.mmap] = []

    def flat(t: torch.Tensor) -> np.ndarray:
        x = _flat(t)
        inner = -(-max(x.nbytes, 1) // SIZE) * SIZE
        memory = mmap.mmap(-1, inner + 2 * SIZE)
        maps.append(memory)
        base = np.frombuffer(memory, np.uint8)
        start = base.ctypes.data
        for fence in (start, start + SIZE + inner):
            assert libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(SIZE), PROT_NONE) == 0
        at = SIZE + (inner - x.nbytes if at_end else 0)
        copy = base[at : at + x.nbytes].view(x.dtype)
        copy[:] = x
        return copy

    return flat


def run_everything(at_end: bool) -> None:
    """Forward and backward of every op; a stray access ends the process."""
    jit.flat = fenced(at_end)
    jit.threads_for = lambda work: 1
    for dtype in DTYPES:
        for build in test_invariance.OPS.values():
            inputs, op = build(dtype)
            for rows in (1, 7, 65):
                args = [x[:rows].clone() for x in inputs]
                for x in args:
                    x.requires_grad_(x.is_floating_point() and x.ndim > 1)
                outputs = [y for y in op(*args) if y.requires_grad]
                if outputs:
                    sum(y.float().sum() for y in outputs).backward()
        for shape in (HeadShape(3, 1, 5), HeadShape(2, 2, 24), HeadShape(9, 1, 80)):
            q, k, v = (x.requires_grad_() for x in test_invariance.qkv_rows(149, shape, dtype))
            attention.packed_attention(q, k, v, packed_rows([17, 1, 131], shape), CONTRACT).float().sum().backward()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs mprotect")
@pytest.mark.parametrize("at_end", [True, False])
def test_no_access_outside_arrays(at_end):
    code = f"from tests.ops.test_bounds import run_everything; run_everything({at_end})"
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs mprotect")
def test_the_fence_works():
    """A kernel told that its array is longer than it is must fault."""
    code = (
        "from tests.ops.test_bounds import *\nfrom exactrl.ops.cpu import norm\nx = fenced(True)(torch.ones(100))\n"
        "norm.rms_norm_range(0, 1, 1, x, x, x, int(__import__('sys').argv[1]), 1e-6)"
    )
    for n, fine in ((100, True), (101, False)):
        done = subprocess.run([sys.executable, "-c", code, str(n)], cwd=ROOT, capture_output=True, check=False)
        assert (done.returncode == 0) == fine, done.stderr[-3000:]
