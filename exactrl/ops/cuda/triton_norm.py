"""RMSNorm and add + RMSNorm in Triton; definition in norm.py. Legend: T rows, N row length, P next power of two."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from exactrl.ops.cuda.triton_exact import EXACT
from exactrl.ops.cuda.triton_rows import JOB, LONGEST_ROW, inverse_rms, row_stride, row_tree, warps_for


@triton.jit
def rms_norm_kernel(h, x, w, h_out, y, stride_h, stride_x, eps, N: tl.constexpr, P: tl.constexpr):
    """One row. With x (else None): h_out = h + x is stored, and its rounded value normalised."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    inside = i < N
    v = tl.load(h + row * stride_h + i, mask=inside, other=0.0).to(tl.float32)
    if x is not None:
        v = v + tl.load(x + row * stride_x + i, mask=inside, other=0.0).to(tl.float32)
        rounded = v.to(h_out.dtype.element_ty)
        tl.store(h_out + row * N + i, rounded, mask=inside)
        v = rounded.to(tl.float32)
    r = inverse_rms(row_tree((v * v)[None, :]), eps, N)
    scaled = (v[None, :] * r[:, None]).reshape([P]) * tl.load(w + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * N + i, scaled.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def rms_norm_backward_kernel(
    h, w, dy, extra, dh, dx, parts, T, stride_h, eps, N: tl.constexpr, P: tl.constexpr, JOB: tl.constexpr
):
    """JOB rows, ascending; parts fp32 [jobs, N] or None. dx: dh once more in x's dtype, or None."""
    job, i = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    inside = i < N
    weight = tl.load(w + i, mask=inside, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros((1, P), tl.float32)
    for row in range(job * JOB, tl.minimum(job * JOB + JOB, T)):
        v = tl.load(h + row * stride_h + i, mask=inside, other=0.0).to(tl.float32)[None, :]
        g = tl.load(dy + row * N + i, mask=inside, other=0.0).to(tl.float32)[None, :]
        r = inverse_rms(row_tree(v * v), eps, N)[:, None]
        unit = v * r
        dw = dw + g * unit
        g = g * weight
        mean = tl.div_rn(row_tree(g * unit), tl.full((1,), N, tl.float32))[:, None]
        d = (r * (g - unit * mean)).reshape([P])
        if extra is not None:
            d = d + tl.load(extra + row * N + i, mask=inside, other=0.0).to(tl.float32)
        rounded = d.to(dh.dtype.element_ty)
        tl.store(dh + row * N + i, rounded, mask=inside)
        if dx is not None:
            tl.store(dx + row * N + i, rounded.to(dx.dtype.element_ty), mask=inside)
    if parts is not None:
        tl.store(parts + job * N + i, dw.reshape([P]), mask=inside)


def _padded(n: int) -> int:
    assert 0 < n <= LONGEST_ROW, f"rows of {n} do not fit one program, which holds {LONGEST_ROW}"
    return triton.next_power_of_2(n)


def _warps(p: int) -> int:
    """Decides time, never bits. 4 for 4096: a thread then holds elements 1024 apart, and a step of the tree that adds
    them asks no other warp (backward of 8192 rows of 2560 on an H200: 117 us, with 8 warps 196 us)."""
    return warps_for(p if p <= 2048 else p // 2)


def forward(
    h: torch.Tensor, x: torch.Tensor | None, w: torch.Tensor, eps: float
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """h, x [T, N], w [N] -> (h + x in h's dtype, or None without x; its norm in w's dtype)."""
    rows, n = h.shape
    assert w.shape == (n,), (w.shape, n)
    assert x is None or x.shape == h.shape, (x.shape, h.shape)
    p = _padded(n)
    h_out = None if x is None else torch.empty(rows, n, dtype=h.dtype, device=h.device)
    y = torch.empty(rows, n, dtype=w.dtype, device=h.device)
    row_stride(w)
    rms_norm_kernel[(rows,)](
        h, x, w, h_out, y, row_stride(h), 0 if x is None else row_stride(x), eps, n, p, num_warps=_warps(p), **EXACT
    )
    return h_out, y


def backward(
    h: torch.Tensor,
    w: torch.Tensor,
    dy: torch.Tensor,
    extra: torch.Tensor | None,
    eps: float,
    x_dtype: torch.dtype,
    with_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(dh, dx, fp32 partial sums [jobs, N] of dw or None); dy and `extra`, the gradient of h itself, are contiguous."""
    rows, n = h.shape
    p, jobs = _padded(n), triton.cdiv(rows, JOB)
    dh = torch.empty(rows, n, dtype=h.dtype, device=h.device)
    dx = None if x_dtype == h.dtype else torch.empty(rows, n, dtype=x_dtype, device=h.device)
    parts = torch.empty(jobs, n, dtype=torch.float32, device=h.device) if with_weight else None
    rms_norm_backward_kernel[(jobs,)](
        h, w, dy, extra, dh, dx, parts, rows, row_stride(h), eps, n, p, JOB, num_warps=_warps(p), **EXACT
    )
    return dh, dh if dx is None else dx, parts
