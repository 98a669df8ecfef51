"""Compiles the fused kernels for sm90, without a GPU: `python -m tests.ops.cuda.ptx` prints their PTX as JSON.

A process of its own, because in the interpreter's process kernels are plain Python. With --contract multiply-add fusion
is left to the compiler, to see that it would be noticed.
"""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from exactrl.ops.cuda import triton_early, triton_embedding, triton_norm, triton_qkv, triton_rows, triton_swiglu

BF16, F32, I64 = "*bf16", "*fp32", "*i64"
NORM = {"h": BF16, "w": BF16, "y": BF16, "stride_h": "i32", "stride_x": "i32", "eps": "fp32"}
HEADS = {"H": 16, "HK": 8, "D": 128, "HEADS": 8}
QKV = {
    **dict.fromkeys(("qkv", "wq", "wk", "q", "k", "v", "dq", "dk", "dv", "dqkv"), BF16),
    **dict.fromkeys(("cos", "sin", "parts_q", "parts_k"), F32),
    **dict.fromkeys(("positions", "slots"), I64),
    **dict.fromkeys(("POSITIONS", "T", "stride", "stride_k", "stride_v"), "i32"),
    "eps": "fp32",
}
CASES = {
    "rms_norm": (triton_norm.rms_norm_kernel, NORM, {"x": None, "h_out": None, "N": 2560, "P": 4096}),
    "add_rms_norm": (triton_norm.rms_norm_kernel, {**NORM, "x": BF16, "h_out": BF16}, {"N": 2560, "P": 4096}),
    "rms_norm_backward": (
        triton_norm.rms_norm_backward_kernel,
        {**NORM, "dy": BF16, "extra": BF16, "dh": BF16, "parts": F32, "T": "i32"},
        {"dx": None, "N": 2560, "P": 4096, "WIDTH": 512, "ROWS": 1, "JOB": triton_rows.JOB, "STAGES": 3},
    ),
    "rms_norm_backward_two": (
        triton_norm.rms_norm_backward_kernel,
        {**NORM, "dy": BF16, "extra": BF16, "dh": BF16, "parts": F32, "T": "i32"},
        {"dx": None, "N": 1024, "P": 1024, "WIDTH": 1024, "ROWS": 2, "JOB": triton_rows.JOB, "STAGES": 3},
    ),
    "rms_norm_rows": (triton_norm.rms_norm_rows_kernel, {**NORM, "T": "i32"}, {"N": 1024, "P": 1024, "STAGES": 3}),
    "qkv": (triton_qkv.qkv_kernel, QKV, {**HEADS, "TOKENS": 4, "slots": None}),
    "qkv_into_cache": (triton_qkv.qkv_kernel, QKV, {**HEADS, "TOKENS": 1}),
    "qkv_backward": (triton_qkv.qkv_backward_kernel, QKV, {**HEADS, "JOB": triton_rows.JOB, "STAGES": 3}),
    "swiglu": (
        triton_swiglu.swiglu_kernel,
        {"gate_up": BF16, "y": BF16, "stride": "i32"},
        {"I": 9728, "BLOCK": 512},
    ),
    "swiglu_backward": (
        triton_swiglu.swiglu_backward_kernel,
        {"gate_up": BF16, "dy": BF16, "grad": BF16, "stride": "i32"},
        {"I": 9728, "BLOCK": 512},
    ),
    "column_tree": (
        triton_rows.column_tree_kernel,
        {"parts": F32, "sums": F32, "rows": "i32", "N": "i32"},
        {"ROWS": triton_rows.CHUNK, "OWN": triton_rows.OWN, "COLUMNS": triton_rows.COLUMNS, "LAST": True},
    ),
    "embedding_backward": (
        triton_embedding.embedding_backward_kernel,
        {"dy": BF16, "sorted_ids": I64, "order": I64, "stops": I64, "grad": F32, "N": "i32"},
        {"BLOCK": triton_embedding.BLOCK},
    ),
}


def to_ptx(kernel, signature: dict[str, str], constants: dict, options: dict, attributes: dict | None = None) -> str:
    """`signature` without the constants."""
    types = {name: "constexpr" if name in constants else signature[name] for name in kernel.arg_names}
    source = ASTSource(kernel, types, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def ptx(name: str, options: dict[str, bool]) -> str:
    return to_ptx(*CASES[name], {"num_warps": 4, **options})


if __name__ == "__main__":
    chosen: dict[str, bool] = {} if "--contract" in sys.argv else triton_early.EARLY
    json.dump({name: ptx(name, chosen) for name in CASES}, sys.stdout)
