"""`python -m exactrl.ops.cpu.compile`: compiles every CPU kernel once into the cache, with a line per op.

Kernels compile by themselves at first use; doing it at installation keeps the first run free of pauses.
"""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import torch

from exactrl.contract import get_contract
from exactrl.ops import Ops, attention, head
from exactrl.ops.cpu import jit
from exactrl.ops.cpu.reduce import sum_of_squares
from exactrl.ops.qkv import HeadShape, RopeTable
from exactrl.ops.weight import Weight


def _weight(shape: tuple[int, ...], dtype: torch.dtype, packed: bool = True) -> Weight:
    weight = Weight(shape, dtype, trainable=True, packed=packed)
    weight.assign(torch.ones(shape))
    return weight


def _run(dtype: torch.dtype, rows: int) -> None:
    """Forward and backward of every op on `rows` rows: few take the serial kernels, many the parallel ones."""
    ops, shape = Ops(get_contract("exact-v1")), HeadShape(2, 1, 16)
    residual = torch.randn(rows, 64).to(dtype).requires_grad_()
    norm_w, head_w = _weight((64,), dtype, packed=False), _weight((16,), dtype, packed=False)
    ids = torch.zeros(rows, dtype=torch.int64)
    h = ops.embedding(ids, _weight((9, 64), dtype), dtype)
    y = ops.rms_norm(h + residual, norm_w, 1e-6)
    qkv = ops.linear(y, _weight((64, 64), dtype))
    q, k, v = ops.qkv(qkv, head_w, head_w, RopeTable.build(1e4, 16, rows), torch.arange(rows), shape, 1e-6)
    half = rows // 2
    pages = np.arange(2 * -(-half // 16), dtype=np.int32).reshape(2, -1)
    batch = attention.Rows.build(np.array([0, half, rows]), np.zeros(2, np.int64), pages, shape)
    a = attention.packed_attention(q, k, v, batch, ops.contract)
    h, y = ops.add_rms_norm(h, ops.linear(a.flatten(1), _weight((64, 32), dtype)), norm_w, 1e-6)
    y = ops.linear(ops.swiglu(ops.linear(y, _weight((128, 64), dtype))), _weight((64, 64), dtype))
    lp, entropy = ops.logprobs(y, _weight((300, 64), dtype), ids, torch.ones(rows))
    (lp.sum() + entropy.sum()).backward()
    sum_of_squares(jit.flat(y.detach().float()))
    with torch.no_grad():
        keys = torch.zeros(rows, dtype=torch.int64)
        for op in (ops, Ops(ops.contract, exact=False)):
            op.sample(y, _weight((300, 64), dtype), torch.ones(rows), keys, ids)
        attention.paged_attention(
            q, batch, *attention.new_pages(pages.size, shape, dtype), ops.contract, torch.empty(0)
        )
    head.gumbel_uniforms(0, 0, 4)


def main(arguments: list[str]) -> int:
    """Without arguments: one process per dtype, so that two cores are used; with a dtype: compiles that one."""
    begin = time.perf_counter()
    if arguments:
        for rows in (2, 4096):
            with jit.forced_threads(1 if rows == 2 else 2):
                _run(getattr(torch, arguments[0]), rows)
            print(f"  {arguments[0]}, {'one thread' if rows == 2 else 'threads'}: {time.perf_counter() - begin:.0f} s")
        return 0
    print(f"compiling the CPU kernels into {jit.cache_dir()} (once, about half a minute)", flush=True)
    command = [sys.executable, "-u", "-m", "exactrl.ops.cpu.compile"]
    processes = [subprocess.Popen([*command, dtype]) for dtype in ("float32", "bfloat16")]
    codes = [p.wait() for p in processes]
    print(f"kernels ready after {time.perf_counter() - begin:.0f} s")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
