"""RMSNorm and add + RMSNorm in Triton; definition in norm.py. Legend: T rows, N row length, P next power of two."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from exactrl.ops.cuda.triton_early import EARLY, wait
from exactrl.ops.cuda.triton_rows import JOB, LONGEST_ROW, inverse_rms, row_stride, row_tree, warps_for

STAGES = 3  # rows whose loads are under way in the backward


@triton.jit
def rms_norm_kernel(h, x, w, h_out, y, stride_h, stride_x, eps, N: tl.constexpr, P: tl.constexpr):
    """One row. With x (else None): h_out = h + x is stored, and its rounded value normalised."""
    wait()
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, P)[None, :]
    inside = i < N
    v = tl.load(h + row * stride_h + i, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(w + i, mask=inside, other=0.0)  # with the row: one wait for memory
    if x is not None:
        v = v + tl.load(x + row * stride_x + i, mask=inside, other=0.0).to(tl.float32)
        rounded = v.to(h_out.dtype.element_ty)
        tl.store(h_out + row * N + i, rounded, mask=inside)
        v = rounded.to(tl.float32)
    r = inverse_rms(row_tree(v * v), eps, N)[:, None]
    tl.store(y + row * N + i, ((v * r) * weight.to(tl.float32)).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def rms_norm_backward_kernel(
    h, w, dy, extra, dh, dx, parts, T, stride_h, eps,
    N: tl.constexpr, P: tl.constexpr, JOB: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """JOB rows, ascending; parts fp32 [jobs, N] or None. dx: dh once more in x's dtype, or None."""
    wait()
    job, i = tl.program_id(0).to(tl.int64), tl.max_contiguous(tl.arange(0, P), 4)[None, :]
    inside = i < N
    weight = tl.load(w + i, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros((1, P), tl.float32)
    for row in tl.range(job * JOB, tl.minimum(job * JOB + JOB, T), num_stages=STAGES):
        v = tl.load(h + row * stride_h + i, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(dy + row * N + i, mask=inside, other=0.0).to(tl.float32)
        r = inverse_rms(row_tree(v * v), eps, N)[:, None]
        unit = v * r
        dw = dw + g * unit
        g = g * weight
        mean = tl.div_rn(row_tree(g * unit), tl.full((1,), N, tl.float32))[:, None]
        d = r * (g - unit * mean)
        if extra is not None:
            d = d + tl.load(extra + row * N + i, mask=inside, other=0.0).to(tl.float32)
        rounded = d.to(dh.dtype.element_ty)
        tl.store(dh + row * N + i, rounded, mask=inside)
        if dx is not None:
            tl.store(dx + row * N + i, rounded.to(dx.dtype.element_ty), mask=inside)
    if parts is not None:
        tl.store(parts + job * N + i, dw, mask=inside)


def _padded(n: int) -> int:
    assert 0 < n <= LONGEST_ROW, f"rows of {n} do not fit one program, which holds {LONGEST_ROW}"
    return triton.next_power_of_2(n)


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
        h, x, w, h_out, y, row_stride(h), 0 if x is None else row_stride(x), eps, n, p, num_warps=warps_for(p), **EARLY
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
        h, w, dy, extra, dh, dx, parts, rows, row_stride(h), eps, n, p, JOB, STAGES, num_warps=warps_for(8 * p), **EARLY
    )
    return dh, dh if dx is None else dx, parts
