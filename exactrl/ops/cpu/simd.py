"""A 16-lane fp32 vector type for numba, and the arithmetic the CPU kernels are written in.

Every operation here is one IEEE-754 operation per lane (or a fixed sequence of them): nothing is reassociated or
contracted, so the bits do not depend on the vector width the machine happens to have. LLVM splits the vectors where
the hardware is narrower.

Storage is float32, or bfloat16 held in uint16 arrays (`load*` widens, `store*` rounds to nearest even).
All arrays are flat and C-contiguous; offsets are in elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

LANES = 16
F32, I16, I32 = ir.FloatType(), ir.IntType(16), ir.IntType(32)
VF32, VI16, VI32 = (ir.VectorType(t, LANES) for t in (F32, I16, I32))


class VecType(types.Type):
    """numba type of a 16-lane float32 vector; a local value only, never stored in Python objects."""

    def __init__(self) -> None:
        super().__init__(name="f32x16")


vec = VecType()


@register_model(VecType)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, VF32)


# --- IR helpers: they work on a float and on a vector of floats alike, so scalar and vector code have the same bits ---


def const(like: ir.Value, x: float) -> ir.Constant:
    """Float constant x of the type of `like` (scalar or vector)."""
    x = float(np.float32(x))
    return ir.Constant(like.type, [x] * LANES if isinstance(like.type, ir.VectorType) else x)


def iconst(like: ir.Value, x: int) -> ir.Constant:
    return ir.Constant(like.type, [x] * LANES if isinstance(like.type, ir.VectorType) else x)


def _as_int(bld: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return bld.bitcast(x, VI32 if isinstance(x.type, ir.VectorType) else I32)


def _as_float(bld: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return bld.bitcast(x, VF32 if isinstance(x.type, ir.VectorType) else F32)


def ir_call(bld: ir.IRBuilder, name: str, *args: ir.Value) -> ir.Value:
    """LLVM intrinsic `llvm.NAME` on values of one type."""
    ty = args[0].type
    suffix = f"v{LANES}f32" if isinstance(ty, ir.VectorType) else "f32"
    fn = cgutils.get_or_insert_function(bld.module, ir.FunctionType(ty, [ty] * len(args)), f"llvm.{name}.{suffix}")
    return bld.call(fn, args)


def ir_fma(bld: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return ir_call(bld, "fma", a, b, c)


def _poly(bld: ir.IRBuilder, x: ir.Value, coefficients: tuple[float, ...]) -> ir.Value:
    """Horner by fused multiply-add, highest power first."""
    p = const(x, coefficients[0])
    for c in coefficients[1:]:
        p = ir_fma(bld, p, x, const(x, c))
    return p


def _scale_by_power(bld: ir.IRBuilder, p: ir.Value, n: ir.Value) -> ir.Value:
    """p * 2**n for an integral float n in [-126, 127]."""
    ty = VI32 if isinstance(p.type, ir.VectorType) else I32
    i = bld.fptosi(n, ty)
    i = bld.shl(bld.add(i, iconst(i, 127)), iconst(i, 23))
    return bld.fmul(p, _as_float(bld, i))


def _round_integral(bld: ir.IRBuilder, x: ir.Value) -> ir.Value:
    magic = const(x, 12582912.0)  # 1.5 * 2**23: adding it leaves the nearest integer in the low mantissa bits
    return bld.fsub(bld.fadd(x, magic), magic)


def _clamp(bld: ir.IRBuilder, x: ir.Value, low: float, high: float) -> ir.Value:
    """x clamped to [low, high]; NaN becomes low here and is put back by `_keep_nan`."""
    lo, hi = const(x, low), const(x, high)
    x = bld.select(bld.fcmp_ordered(">", x, lo), x, lo)
    return bld.select(bld.fcmp_ordered("<", x, hi), x, hi)


def _keep_nan(bld: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return bld.select(bld.fcmp_unordered("uno", x, x), x, y)


def ir_exp2(bld: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2**x: 0 below -126, +inf from 128, NaN kept. Cephes exp2f polynomial on [-0.5, 0.5]."""
    c = _clamp(bld, x, -126.0, 127.99999)
    n = _round_integral(bld, c)
    n = bld.select(bld.fcmp_ordered("<", n, const(n, 127.0)), n, const(n, 127.0))
    r = bld.fsub(c, n)
    coefficients = (
        1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2,
        2.402264791363012e-1, 6.931472028550421e-1, 1.0,
    )  # fmt: skip
    y = _scale_by_power(bld, _poly(bld, r, coefficients), n)
    y = bld.select(bld.fcmp_ordered("<", x, const(x, -126.0)), const(x, 0.0), y)
    y = bld.select(bld.fcmp_ordered(">=", x, const(x, 128.0)), const(x, float("inf")), y)
    return _keep_nan(bld, x, y)


def ir_exp(bld: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e**x: 0 below -87.3, +inf above 88.7, NaN kept. Cephes expf: two-step reduction by ln 2."""
    c = _clamp(bld, x, -87.3, 88.7)
    n = _round_integral(bld, bld.fmul(c, const(x, 1.44269504)))
    n = bld.select(bld.fcmp_ordered("<", n, const(n, 127.0)), n, const(n, 127.0))
    r = ir_fma(bld, n, const(x, -0.693359375), c)
    r = ir_fma(bld, n, const(x, 2.12194440e-4), r)
    coefficients = (
        1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
    )  # fmt: skip
    p = ir_fma(bld, _poly(bld, r, coefficients), bld.fmul(r, r), r)
    y = _scale_by_power(bld, bld.fadd(p, const(x, 1.0)), n)
    y = bld.select(bld.fcmp_ordered("<", x, const(x, -87.3)), const(x, 0.0), y)
    y = bld.select(bld.fcmp_ordered(">", x, const(x, 88.7)), const(x, float("inf")), y)
    return _keep_nan(bld, x, y)


def ir_log(bld: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """ln x for finite normal x > 0 (Cephes logf); +inf and NaN are returned as they are; other x are undefined."""
    i = _as_int(bld, x)
    e = bld.sub(bld.lshr(i, iconst(i, 23)), iconst(i, 126))
    m = _as_float(bld, bld.or_(bld.and_(i, iconst(i, 0x007FFFFF)), iconst(i, 0x3F000000)))
    small = bld.fcmp_ordered("<", m, const(m, 0.707106781186547524))
    e = bld.select(small, bld.sub(e, iconst(e, 1)), e)
    m = bld.select(small, bld.fadd(m, m), m)
    f = bld.fsub(m, const(m, 1.0))
    z = bld.fmul(f, f)
    coefficients = (
        7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
        -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
    )  # fmt: skip
    y = bld.fmul(bld.fmul(_poly(bld, f, coefficients), f), z)
    n = bld.sitofp(e, x.type)
    y = ir_fma(bld, n, const(x, -2.12194440e-4), y)
    y = ir_fma(bld, z, const(x, -0.5), y)
    y = ir_fma(bld, n, const(x, 0.693359375), bld.fadd(f, y))
    y = bld.select(bld.fcmp_ordered("==", x, const(x, float("inf"))), x, y)
    return _keep_nan(bld, x, y)


def ir_to_bf16(bld: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Round to nearest even to bfloat16 bits (i16); NaN becomes the canonical quiet NaN with its sign."""
    vector = isinstance(x.type, ir.VectorType)
    i = _as_int(bld, x)
    odd = bld.and_(bld.lshr(i, iconst(i, 16)), iconst(i, 1))
    rounded = bld.lshr(bld.add(i, bld.add(odd, iconst(i, 0x7FFF))), iconst(i, 16))
    nan = bld.or_(bld.and_(bld.lshr(i, iconst(i, 16)), iconst(i, 0x8000)), iconst(i, 0x7FC0))
    return bld.trunc(bld.select(bld.fcmp_unordered("uno", x, x), nan, rounded), VI16 if vector else I16)


def ir_from_bf16(bld: ir.IRBuilder, x: ir.Value) -> ir.Value:
    wide = bld.zext(x, VI32 if isinstance(x.type, ir.VectorType) else I32)
    return _as_float(bld, bld.shl(wide, iconst(wide, 16)))


def ir_splat(bld: ir.IRBuilder, x: ir.Value) -> ir.Value:
    undef = ir.Constant(VF32, ir.Undefined)
    return bld.shuffle_vector(bld.insert_element(undef, x, I32(0)), undef, ir.Constant(VI32, [0] * LANES))


def pointer(ctx: Any, bld: ir.IRBuilder, ty: Any, array: ir.Value, offset: ir.Value) -> ir.Value:
    return bld.gep(ctx.make_array(ty)(ctx, bld, array).data, [offset])


def is_bf16(array_type: Any) -> bool:
    return array_type.dtype == types.uint16


def ir_vload(bld: ir.IRBuilder, ptr: ir.Value, bf16: bool) -> ir.Value:
    ld = bld.load(bld.bitcast(ptr, (VI16 if bf16 else VF32).as_pointer()))
    ld.align = 2 if bf16 else 4
    return ir_from_bf16(bld, ld) if bf16 else ld


def ir_vstore(bld: ir.IRBuilder, value: ir.Value, ptr: ir.Value, bf16: bool) -> None:
    value = ir_to_bf16(bld, value) if bf16 else value
    st = bld.store(value, bld.bitcast(ptr, value.type.as_pointer()))
    st.align = 2 if bf16 else 4


# --- numba intrinsics ---


def _arithmetic(emit: Callable[..., ir.Value], count: int) -> tuple[Any, Any]:
    """(scalar, vector) intrinsics of `count` operands from one IR emitter."""

    def build(ty: Any) -> Any:
        def codegen(ctx: Any, bld: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            return emit(bld, *args)

        if count == 1:
            return intrinsic(lambda tc, a: (ty(ty), codegen))
        if count == 2:
            return intrinsic(lambda tc, a, b: (ty(ty, ty), codegen))
        return intrinsic(lambda tc, a, b, c: (ty(ty, ty, ty), codegen))

    return build(types.float32), build(vec)


fma, vfma = _arithmetic(ir_fma, 3)
exp2, vexp2 = _arithmetic(ir_exp2, 1)
exp, vexp = _arithmetic(ir_exp, 1)
log, vlog = _arithmetic(ir_log, 1)
_, vneg = _arithmetic(lambda bld, a: bld.fneg(a), 1)
_, vadd = _arithmetic(lambda bld, a, b: bld.fadd(a, b), 2)
_, vsub = _arithmetic(lambda bld, a, b: bld.fsub(a, b), 2)
_, vmul = _arithmetic(lambda bld, a, b: bld.fmul(a, b), 2)
_, vdiv = _arithmetic(lambda bld, a, b: bld.fdiv(a, b), 2)
# The second operand only where it is greater: NaN in b is ignored, which is right for a running maximum.
_, vmax = _arithmetic(lambda bld, a, b: bld.select(bld.fcmp_ordered(">", b, a), b, a), 2)


@intrinsic
def vsplat(tc: Any, x: Any) -> Any:
    return vec(types.float32), lambda ctx, bld, sig, args: ir_splat(bld, args[0])


@intrinsic
def vfirst(tc: Any, v: Any, n: Any, fill: Any) -> Any:
    """Lanes below n from v, the others `fill`."""

    def codegen(ctx: Any, bld: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        v, n, fill = args
        iota = ir.Constant(VI32, list(range(LANES)))
        n32 = bld.trunc(n, I32)
        undef = ir.Constant(VI32, ir.Undefined)
        nv = bld.shuffle_vector(bld.insert_element(undef, n32, I32(0)), undef, ir.Constant(VI32, [0] * LANES))
        return bld.select(bld.icmp_signed("<", iota, nv), v, ir_splat(bld, fill))

    return vec(vec, types.int64, types.float32), codegen


def _tree(combine: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]) -> Any:
    """Reduction of the 16 lanes as the balanced tree (i, i+8), (i, i+4), (i, i+2), (i, i+1)."""

    def codegen(ctx: Any, bld: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        v = args[0]
        lanes = [bld.extract_element(v, I32(i)) for i in range(LANES)]
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [combine(bld, lanes[i], lanes[i + half]) for i in range(half)]
        return lanes[0]

    return intrinsic(lambda tc, v: (types.float32(vec), codegen))


vsum = _tree(lambda bld, a, b: bld.fadd(a, b))
vmaximum = _tree(lambda bld, a, b: bld.select(bld.fcmp_ordered(">", b, a), b, a))


@intrinsic
def vload(tc: Any, a: Any, o: Any) -> Any:
    """Lanes a[o : o + 16]."""

    def codegen(ctx: Any, bld: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return ir_vload(bld, pointer(ctx, bld, sig.args[0], args[0], args[1]), is_bf16(sig.args[0]))

    return vec(a, types.intp), codegen


@intrinsic
def vstore(tc: Any, a: Any, o: Any, v: Any) -> Any:
    def codegen(ctx: Any, bld: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        ir_vstore(bld, args[2], pointer(ctx, bld, sig.args[0], args[0], args[1]), is_bf16(sig.args[0]))
        return ctx.get_dummy_value()

    return types.void(a, types.intp, vec), codegen


def _scratch(bld: ir.IRBuilder) -> tuple[ir.Value, ir.Value]:
    space = cgutils.alloca_once(bld, VF32)
    return space, bld.bitcast(space, F32.as_pointer())


@intrinsic
def vload_n(tc: Any, a: Any, o: Any, n: Any) -> Any:
    """Lanes a[o : o + n], the others +0; reads nothing beyond."""

    def codegen(ctx: Any, bld: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        a, o, n = args
        space, lanes = _scratch(bld)
        bld.store(ir.Constant(VF32, [0.0] * LANES), space)
        with cgutils.for_range(bld, n) as loop:
            x = bld.load(pointer(ctx, bld, sig.args[0], a, bld.add(o, loop.index)))
            x = ir_from_bf16(bld, x) if is_bf16(sig.args[0]) else x
            bld.store(x, bld.gep(lanes, [loop.index]))
        return bld.load(space)

    return vec(a, types.intp, types.intp), codegen


@intrinsic
def vstore_n(tc: Any, a: Any, o: Any, v: Any, n: Any) -> Any:
    """First n lanes to a[o : o + n]; writes nothing beyond."""

    def codegen(ctx: Any, bld: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        a, o, v, n = args
        space, lanes = _scratch(bld)
        bld.store(v, space)
        with cgutils.for_range(bld, n) as loop:
            x = bld.load(bld.gep(lanes, [loop.index]))
            x = ir_to_bf16(bld, x) if is_bf16(sig.args[0]) else x
            bld.store(x, pointer(ctx, bld, sig.args[0], a, bld.add(o, loop.index)))
        return ctx.get_dummy_value()

    return types.void(a, types.intp, vec, types.intp), codegen


@intrinsic
def vround(tc: Any, v: Any, like: Any) -> Any:
    """v rounded to the storage dtype of array `like` and widened again."""

    def codegen(ctx: Any, bld: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return ir_from_bf16(bld, ir_to_bf16(bld, args[0])) if is_bf16(sig.args[1]) else args[0]

    return vec(vec, like), codegen


@intrinsic
def load(tc: Any, a: Any, o: Any) -> Any:
    def codegen(ctx: Any, bld: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        x = bld.load(pointer(ctx, bld, sig.args[0], args[0], args[1]))
        return ir_from_bf16(bld, x) if is_bf16(sig.args[0]) else x

    return types.float32(a, types.intp), codegen


@intrinsic
def store(tc: Any, a: Any, o: Any, x: Any) -> Any:
    def codegen(ctx: Any, bld: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        x = ir_to_bf16(bld, args[2]) if is_bf16(sig.args[0]) else args[2]
        bld.store(x, pointer(ctx, bld, sig.args[0], args[0], args[1]))
        return ctx.get_dummy_value()

    return types.void(a, types.intp, types.float32), codegen


@intrinsic
def sqrt(tc: Any, x: Any) -> Any:
    """IEEE square root (correctly rounded)."""
    return types.float32(types.float32), lambda ctx, bld, sig, args: ir_call(bld, "sqrt", args[0])


@numba.njit(boundscheck=False)
def load_lanes(a, o, n):
    """min(n, 16) lanes from a[o], the others +0: the fast path for whole vectors."""
    if n >= 16:
        return vload(a, o)
    return vload_n(a, o, n)


@numba.njit(boundscheck=False)
def store_lanes(a, o, v, n):
    """min(n, 16) lanes to a[o]."""
    if n >= 16:
        vstore(a, o, v)
    else:
        vstore_n(a, o, v, n)
