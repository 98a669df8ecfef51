"""`python -m exactrl.ops.cpu.compile`: compiles every CPU kernel once into the cache, with a line per op.

Kernels compile by themselves at first use; doing it at installation keeps the first run free of pauses.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from exactrl.contract import get_contract
from exactrl.ops import Ops, attention, head
from exactrl.ops.cpu import jit
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
    starts, pages = np.array([0, rows]), np.arange(-(-rows // 16), dtype=np.int32)[None]
    batch = attention.Rows.build(starts, np.zeros(1, np.int64), pages, shape)
    a = attention.packed_attention(q, k, v, batch, ops.contract)
    h, y = ops.add_rms_norm(h, ops.linear(a.flatten(1), _weight((64, 32), dtype)), norm_w, 1e-6)
    y = ops.linear(ops.swiglu(ops.linear(y, _weight((128, 64), dtype))), _weight((64, 64), dtype))
    lp, entropy = ops.logprobs(y, _weight((300, 64), dtype), ids, torch.ones(rows))
    (lp.sum() + entropy.sum()).backward()
    with torch.no_grad():
        keys = np.zeros(rows, np.uint64)
        for op in (ops, Ops(ops.contract, exact=False)):
            op.sample(y, _weight((300, 64), dtype), torch.ones(rows), keys, ids)
        attention.paged_attention(q, batch, *attention.new_pages(pages.size, shape, dtype), ops.contract, torch.empty(0))
    head.gumbel_uniforms(0, 0, 4)


def compile_kernels(report=print) -> float:
    """Compiles what is not in the cache yet; returns seconds."""
    begin = time.perf_counter()
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (2, 4096):
            _run(dtype, rows)
            report(f"kernels {str(dtype)[6:]}, {rows} rows: {time.perf_counter() - begin:.1f} s")
    return time.perf_counter() - begin


if __name__ == "__main__":
    print(f"compiling the CPU kernels into {jit.cache_dir()} (once)")
    compile_kernels()
