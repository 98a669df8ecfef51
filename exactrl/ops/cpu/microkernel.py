"""Register-blocked matrix micro-kernels: C[r, :] (+)= A[r, k] B[k, :], one fused multiply-add chain per element.

The chain over k ascends and starts from +0 or from what C holds, so cutting K into pieces that are run one after the
other changes no bit; nor do the number of rows, the number of vectors, or the machine's vector width.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from exactrl.ops.cpu.simd import LANES, VF32, ir_fma, ir_from_bf16, ir_splat, ir_vload, ir_vstore, is_bf16

MAX_ROWS = 8


def _make(rows: int, vectors: int, scattered: bool = False) -> Any:
    """Intrinsic for `rows` rows of A and `vectors` * 16 columns of B; C is float32.

    scattered: `bo` is an array with one offset into B per vector of 16 columns (pages of a KV cache).
    """

    @intrinsic
    def kernel(tc: Any, a: Any, ao: Any, rs: Any, cs: Any, b: Any, bo: Any, ldb: Any, k: Any, c: Any, co: Any, ldc: Any,
               add: Any) -> Any:  # fmt: skip
        index = types.intp
        sig = types.void(a, index, index, index, b, bo if scattered else index, index, index, c, index, index,
                         types.boolean)  # fmt: skip

        def codegen(ctx: Any, bld: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            _, ao, rs, cs, _, bo, ldb, k, _, co, ldc, add = args
            data = [ctx.make_array(sig.args[i])(ctx, bld, args[i]).data for i in (0, 4, 8)]
            a_bf16, b_bf16 = is_bf16(sig.args[0]), is_bf16(sig.args[4])
            i = lambda x: ir.Constant(k.type, x)  # noqa: E731
            if scattered:
                table = ctx.make_array(sig.args[5])(ctx, bld, bo).data
                starts = [bld.load(bld.gep(table, [i(j)])) for j in range(vectors)]
            else:
                starts = [bld.add(bo, i(j * LANES)) for j in range(vectors)]
            at_c = lambda m, j: bld.gep(data[2], [bld.add(bld.add(co, bld.mul(ldc, i(m))), i(j * LANES))])  # noqa: E731
            acc = [[cgutils.alloca_once(bld, VF32) for _ in range(vectors)] for _ in range(rows)]
            with bld.if_else(add) as (then, otherwise):
                with then:
                    for m in range(rows):
                        for j in range(vectors):
                            bld.store(ir_vload(bld, at_c(m, j), False), acc[m][j])
                with otherwise:
                    for m in range(rows):
                        for j in range(vectors):
                            bld.store(ir.Constant(VF32, [0.0] * LANES), acc[m][j])
            with cgutils.for_range(bld, k) as loop:
                down = bld.mul(loop.index, ldb)
                columns = [ir_vload(bld, bld.gep(data[1], [bld.add(at, down)]), b_bf16) for at in starts]
                along = bld.add(ao, bld.mul(loop.index, cs))
                for m in range(rows):
                    x = bld.load(bld.gep(data[0], [bld.add(along, bld.mul(rs, i(m)))]))
                    x = ir_splat(bld, ir_from_bf16(bld, x) if a_bf16 else x)
                    for j in range(vectors):
                        bld.store(ir_fma(bld, x, columns[j], bld.load(acc[m][j])), acc[m][j])
            for m in range(rows):
                for j in range(vectors):
                    ir_vstore(bld, bld.load(acc[m][j]), at_c(m, j), False)
            return ctx.get_dummy_value()

        return sig, codegen

    return kernel


def _dispatch(vectors: int, max_rows: int, scattered: bool = False) -> Any:
    """njit function running the kernel with a number of rows known at run time (1 to max_rows).

    Its name is unique and stable. Object code in the cache calls functions by qualified name and a number that counts
    compilations; two functions of one name could swap when object files of processes that compiled in another order
    meet.
    """
    name = f"run_{vectors}{'_pages' if scattered else ''}"
    names = {f"k{r}": _make(r, vectors, scattered) for r in range(1, max_rows + 1)}
    arguments = "a, ao, rs, cs, b, bo, ldb, k, c, co, ldc, add"
    lines = [f"def {name}(rows, {arguments}):"]
    for r in range(max_rows, 0, -1):
        lines.append(f"    {'if' if r == max_rows else 'elif'} rows == {r}: k{r}({arguments})")
    exec("\n".join(lines), names)
    return numba.njit(names[name], nogil=True, boundscheck=False, error_model="numpy")


# run_V(rows, a, a_offset, a_row_stride, a_column_stride, b, b_offset, ldb, k, c, c_offset, ldc, add):
# C[rows, 16 V] = or += A[rows, k] B[k, 16 V]; all arrays flat, offsets and strides in elements.
run_1 = _dispatch(1, MAX_ROWS)
run_2 = _dispatch(2, MAX_ROWS)
run_4 = _dispatch(4, MAX_ROWS // 2)
# The same with the four column vectors of B at their own offsets: b_offset is an int64 array of four.
run_pages = _dispatch(4, MAX_ROWS // 2, scattered=True)
