"""SwiGLU in Triton; definition in swiglu.py. Legend: T rows, I width of gate and of up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from exactrl.ops.cuda.triton_early import EARLY, wait
from exactrl.ops.cuda.triton_exact import LOG2E
from exactrl.ops.cuda.triton_rows import row_stride

SIZES = ((512, 4, 1024), (1024, 8, 4096), (2048, 8, 1 << 31))
"""(elements of a program, warps, up to so many programs): about 800 programs start in a microsecond. Changes no bit."""


@triton.jit
def _one_plus_exp(g):
    """1 + exp(-g)."""
    return tl.exp2(-g * LOG2E) + 1.0


@triton.jit
def _place(I: tl.constexpr, BLOCK: tl.constexpr):
    """Row and elements of a program; neighbours take one row, so that memory is read in order."""
    blocks: tl.constexpr = (I + BLOCK - 1) // BLOCK
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    return row.to(tl.int64), block * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def swiglu_kernel(gate_up, y, stride, I: tl.constexpr, BLOCK: tl.constexpr):
    wait()
    row, i = _place(I, BLOCK)
    inside = i < I
    g = tl.load(gate_up + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * stride + I + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * I + i, (tl.div_rn(g, _one_plus_exp(g)) * u).to(y.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(gate_up, dy, grad, stride, I: tl.constexpr, BLOCK: tl.constexpr):
    wait()
    row, i = _place(I, BLOCK)
    inside = i < I
    g = tl.load(gate_up + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * stride + I + i, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dy + row * I + i, mask=inside, other=0.0).to(tl.float32)
    s = tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), _one_plus_exp(g))
    silu = g * s
    dg, du = (d * u) * (s * (1.0 + (g - silu))), d * silu
    tl.store(grad + row * 2 * I + i, dg.to(grad.dtype.element_ty), mask=inside)
    tl.store(grad + row * 2 * I + I + i, du.to(grad.dtype.element_ty), mask=inside)


def _sizes(gate_up: torch.Tensor) -> tuple[int, int, int]:
    """(programs, elements of each, warps)."""
    rows, width = gate_up.shape
    assert width % 2 == 0, f"gate and up are halves of a row, not of {width}"
    found = [(rows * triton.cdiv(width // 2, block), block, warps, most) for block, warps, most in SIZES]
    return next((programs, block, warps) for programs, block, warps, most in found if programs <= most)


def forward(gate_up: torch.Tensor) -> torch.Tensor:
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, n, dtype=gate_up.dtype, device=gate_up.device)
    programs, block, warps = _sizes(gate_up)
    swiglu_kernel[(programs,)](gate_up, y, row_stride(gate_up), n, block, num_warps=warps, **EARLY)
    return y


def backward(gate_up: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """dy [T, I], contiguous -> [T, 2 I]."""
    grad = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    n = gate_up.shape[1] // 2
    programs, block, warps = _sizes(gate_up)
    swiglu_backward_kernel[(programs,)](gate_up, dy, grad, row_stride(gate_up), n, block, num_warps=warps, **EARLY)
    return grad
