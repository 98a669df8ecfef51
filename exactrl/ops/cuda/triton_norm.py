"""RMSNorm and add + RMSNorm in Triton; definition in norm.py. Legend: T rows, N row length, P next power of two."""

# tuples grow while a kernel is compiled
# mypy: disable-error-code="assignment, var-annotated, misc, index"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from exactrl.ops.cuda.triton_early import EARLY, wait
from exactrl.ops.cuda.triton_rows import (
    JOB,
    LONGEST_ROW,
    chunked_tree,
    divided,
    inverse_rms,
    row_stride,
    row_tree,
    warps_for,
)

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
def _load(x, N: tl.constexpr, WIDTH: tl.constexpr):
    """A row as a tuple of fp32 chunks [1, WIDTH]."""
    chunks = ()
    for c in tl.static_range((N + WIDTH - 1) // WIDTH):
        i = c * WIDTH + tl.arange(0, WIDTH)[None, :]
        if (c + 1) * WIDTH <= N:
            chunks += (tl.load(x + i).to(tl.float32),)
        else:
            chunks += (tl.load(x + i, mask=i < N, other=0.0).to(tl.float32),)
    return chunks


@triton.jit
def _store(y, chunks, N: tl.constexpr, WIDTH: tl.constexpr):
    for c in tl.static_range(len(chunks)):
        i = c * WIDTH + tl.arange(0, WIDTH)[None, :]
        if (c + 1) * WIDTH <= N:
            tl.store(y + i, chunks[c].to(y.dtype.element_ty))
        else:
            tl.store(y + i, chunks[c].to(y.dtype.element_ty), mask=i < N)


@triton.jit
def _products(a, b):
    products = ()
    for c in tl.static_range(len(a)):
        products += (a[c] * b[c],)
    return products


@triton.jit(do_not_specialize=["T"])
def rms_norm_backward_kernel(
    h, w, dy, extra, dh, dx, parts, T, stride_h, eps,
    N: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, JOB: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """JOB rows, ascending; parts fp32 [jobs, N] or None. dx: dh once more in x's dtype, or None."""
    wait()
    job = tl.program_id(0).to(tl.int64)
    weight, dw = _load(w, N, WIDTH), ()
    for _ in tl.static_range(len(weight)):
        dw += (tl.zeros((1, WIDTH), tl.float32),)
    for row in tl.range(job * JOB, tl.minimum(job * JOB + JOB, T), num_stages=STAGES):
        v, g = _load(h + row * stride_h, N, WIDTH), _load(dy + row * N, N, WIDTH)
        more = None if extra is None else _load(extra + row * N, N, WIDTH)
        r = inverse_rms(chunked_tree(_products(v, v), P), eps, N)[:, None]
        unit, total, weighted, d, copied = (), (), _products(g, weight), (), ()
        for c in tl.static_range(len(weight)):
            unit += (v[c] * r,)
            total += (dw[c] + g[c] * unit[c],)
        dw = total
        mean = divided(chunked_tree(_products(weighted, unit), P), N)[:, None]
        for c in tl.static_range(len(weight)):
            part = r * (weighted[c] - unit[c] * mean)
            if extra is not None:
                part = part + more[c]
            d += (part,)
            copied += (part.to(dh.dtype.element_ty),)
        _store(dh + row * N, d, N, WIDTH)
        if dx is not None:
            _store(dx + row * N, copied, N, WIDTH)
    if parts is not None:
        _store(parts + job * N, dw, N, WIDTH)


@triton.jit
def _two_trees(a, b):
    """row_tree of two rows [1, P], which wait for other threads together."""
    P: tl.constexpr = a.shape[1]
    both = row_tree(tl.join(a, b).permute(0, 2, 1).reshape([2, P]))
    return tl.split(both.reshape([1, 2]))


@triton.jit(do_not_specialize=["T"])
def rms_norm_backward_pairs_kernel(
    h, w, dy, extra, dh, dx, parts, T, stride_h, eps,
    N: tl.constexpr, P: tl.constexpr, JOB: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """rms_norm_backward_kernel for short rows, two at a time; JOB is even. The second one counts as 0 from T on."""
    wait()
    job, i = tl.program_id(0).to(tl.int64), tl.arange(0, P)[None, :]
    inside = i < N
    weight, dw = tl.load(w + i, mask=inside, other=0.0).to(tl.float32), tl.zeros((1, P), tl.float32)
    for row in tl.range(job * JOB, tl.minimum(job * JOB + JOB, T), 2, num_stages=STAGES):
        there = row + 1 < T
        both = inside & there
        va = tl.load(h + row * stride_h + i, mask=inside, other=0.0).to(tl.float32)
        vb = tl.load(h + (row + 1) * stride_h + i, mask=both, other=0.0).to(tl.float32)
        ga = tl.load(dy + row * N + i, mask=inside, other=0.0).to(tl.float32)
        gb = tl.load(dy + (row + 1) * N + i, mask=both, other=0.0).to(tl.float32)
        if extra is not None:
            more_a = tl.load(extra + row * N + i, mask=inside, other=0.0).to(tl.float32)
            more_b = tl.load(extra + (row + 1) * N + i, mask=both, other=0.0).to(tl.float32)
        sa, sb = _two_trees(va * va, vb * vb)
        ra = inverse_rms(sa, eps, N)[:, None]
        rb = tl.where(there, inverse_rms(sb, eps, N), 0.0)[:, None]  # infinite for zeros and eps 0
        ua, ub = va * ra, vb * rb
        dw = (dw + ga * ua) + gb * ub
        ga, gb = ga * weight, gb * weight
        ca, cb = _two_trees(ga * ua, gb * ub)
        da = ra * (ga - ua * divided(ca, N)[:, None])
        db = rb * (gb - ub * divided(cb, N)[:, None])
        if extra is not None:
            da, db = da + more_a, db + more_b
        da, db = da.to(dh.dtype.element_ty), db.to(dh.dtype.element_ty)
        tl.store(dh + row * N + i, da, mask=inside)
        tl.store(dh + (row + 1) * N + i, db, mask=both)
        if dx is not None:
            tl.store(dx + row * N + i, da.to(dx.dtype.element_ty), mask=inside)
            tl.store(dx + (row + 1) * N + i, db.to(dx.dtype.element_ty), mask=both)
    if parts is not None:
        tl.store(parts + job * N + i, dw, mask=inside)


def _padded(n: int) -> int:
    assert 0 < n <= LONGEST_ROW, f"rows of {n} do not fit one program, which holds {LONGEST_ROW}"
    return triton.next_power_of_2(n)


def _chunks(padded: int) -> tuple[int, int, int]:
    """(width of chunks or 0 for pairs of rows, stages, warps) of the backward; decides time, never bits. Two short rows
    hide each other's waits; two long ones do not fit into the registers, nor many stages into shared memory."""
    if padded <= SHORT:
        return 0, STAGES, 4
    return (512, STAGES, 4) if padded <= 4096 else (1024, 2 if padded <= 8192 else 1, 8)


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
    width, stages, warps = _chunks(p)
    arguments = (h, w, dy, extra, dh, dx, parts, rows, row_stride(h), eps, n, p)
    if width == 0:
        rms_norm_backward_pairs_kernel[(jobs,)](*arguments, JOB, stages, num_warps=warps, **EARLY)
    else:
        rms_norm_backward_kernel[(jobs,)](*arguments, width, JOB, stages, num_warps=warps, **EARLY)
    return dh, dh if dx is None else dx, parts
