"""RMSNorm and add + RMSNorm in Triton; definition in norm.py. Legend: T rows, N row length, P next power of two."""

# tuples grow while a kernel is compiled
# mypy: disable-error-code="assignment, var-annotated, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from exactrl.ops.cuda.triton_early import EARLY, wait
from exactrl.ops.cuda.triton_rows import JOB, LONGEST_ROW, chunked_tree, inverse_rms, row_stride, row_tree, warps_for

STAGES = 3  # rows whose loads are under way where one program takes several
MANY, PROGRAMS = 2048, 792  # as many rows of a short row's norm, and programs that take them: six for each of 132 SMs
SHORT = 1024


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
def rms_norm_rows_kernel(h, w, y, T, stride_h, eps, N: tl.constexpr, P: tl.constexpr, STAGES: tl.constexpr):
    """rms_norm_kernel without x for many short rows: programs take row after row, the next ones' loads under way."""
    wait()
    i = tl.max_contiguous(tl.arange(0, P), 8)[None, :]
    inside = i < N
    weight = tl.load(w + i, mask=inside, other=0.0)
    for row in tl.range(tl.program_id(0).to(tl.int64), T, tl.num_programs(0), num_stages=STAGES):
        v = tl.load(h + row * stride_h + i, mask=inside, other=0.0).to(tl.float32)
        r = inverse_rms(row_tree(v * v), eps, N)[:, None]
        tl.store(y + row * N + i, ((v * r) * weight.to(tl.float32)).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _load(x, there, N: tl.constexpr, WIDTH: tl.constexpr):
    """Rows as a tuple of fp32 chunks [rows, WIDTH]; x [rows, 1] pointers, 0 for rows that are not there."""
    chunks = ()
    for c in tl.static_range((N + WIDTH - 1) // WIDTH):
        i = c * WIDTH + tl.arange(0, WIDTH)[None, :]
        mask = there if (c + 1) * WIDTH <= N else there & (i < N)
        chunks += (tl.load(x + i, mask=mask, other=0.0).to(tl.float32),)
    return chunks


@triton.jit
def _store(y, chunks, there, N: tl.constexpr, WIDTH: tl.constexpr):
    for c in tl.static_range(len(chunks)):
        i = c * WIDTH + tl.arange(0, WIDTH)[None, :]
        mask = there if (c + 1) * WIDTH <= N else there & (i < N)
        tl.store(y + i, chunks[c].to(y.dtype.element_ty), mask=mask)


@triton.jit
def _products(a, b):
    products = ()
    for c in tl.static_range(len(a)):
        products += (a[c] * b[c],)
    return products


@triton.jit
def _rows_added(total, terms):
    """total [1, WIDTH] plus rows of terms [1 or 2, WIDTH], ascending."""
    if terms.shape[0] == 1:
        return total + terms
    else:
        first, second = tl.split(terms.permute(1, 0))
        return (total + first[None, :]) + second[None, :]


@triton.jit(do_not_specialize=["T"])
def rms_norm_backward_kernel(
    h, w, dy, extra, dh, dx, parts, T, stride_h, eps,
    N: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, JOB: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """JOB rows, ascending, ROWS at a time; parts fp32 [jobs, N] or None. dx: dh once more in x's dtype, or None."""
    wait()
    job = tl.program_id(0).to(tl.int64)
    every = tl.full((1, 1), 1, tl.int1)
    weight = _load(w, every, N, WIDTH)
    dw = ()
    for _ in tl.static_range(len(weight)):
        dw += (tl.zeros((1, WIDTH), tl.float32),)
    for first in tl.range(job * JOB, tl.minimum(job * JOB + JOB, T), ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[:, None]
        there = row < T
        v, g = _load(h + row * stride_h, there, N, WIDTH), _load(dy + row * N, there, N, WIDTH)
        r = inverse_rms(chunked_tree(_products(v, v), P), eps, N)[:, None]
        r = tl.where(there, r, 0.0)  # with eps 0 it is infinite for a row of zeros
        unit, total, weighted = (), (), _products(g, weight)
        for c in tl.static_range(len(weight)):
            unit += (v[c] * r,)
            total += (_rows_added(dw[c], g[c] * unit[c]),)
        dw = total
        mean = chunked_tree(_products(weighted, unit), P)
        mean = tl.div_rn(mean, tl.full((ROWS,), N, tl.float32))[:, None]
        d = ()
        for c in tl.static_range(len(weight)):
            d += (r * (weighted[c] - unit[c] * mean),)
        if extra is not None:
            more, found = _load(extra + row * N, there, N, WIDTH), ()
            for c in tl.static_range(len(weight)):
                found += (d[c] + more[c],)
            d = found
        _store(dh + row * N, d, there, N, WIDTH)
        if dx is not None:
            for c in tl.static_range(len(weight)):
                i = c * WIDTH + tl.arange(0, WIDTH)[None, :]
                rounded = d[c].to(dh.dtype.element_ty).to(dx.dtype.element_ty)
                tl.store(dx + row * N + i, rounded, mask=there & (i < N))
    if parts is not None:
        _store(parts + job * N, dw, every, N, WIDTH)


def _padded(n: int) -> int:
    assert 0 < n <= LONGEST_ROW, f"rows of {n} do not fit one program, which holds {LONGEST_ROW}"
    return triton.next_power_of_2(n)


def _chunks(padded: int) -> tuple[int, int, int, int]:
    """(width of chunks, rows at a time, stages, warps) of the backward; decides time, never bits. Two short rows hide
    each other's waits; two long ones do not fit into the registers, nor many stages into shared memory."""
    if padded <= SHORT:
        return padded, 2, STAGES, 4
    return (512, 1, STAGES, 4) if padded <= 4096 else (1024, 1, 2 if padded <= 8192 else 1, 8)


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
    if x is None and n <= SHORT and rows >= MANY:
        rms_norm_rows_kernel[(PROGRAMS,)](h, w, y, rows, row_stride(h), eps, n, p, STAGES, num_warps=4, **EARLY)
        return None, y
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
    width, at_once, stages, warps = _chunks(p)
    rms_norm_backward_kernel[(jobs,)](
        h, w, dy, extra, dh, dx, parts, rows, row_stride(h), eps, n, p, width, at_once, JOB, stages, num_warps=warps,
        **EARLY,
    )  # fmt: skip
    return dh, dh if dx is None else dx, parts
