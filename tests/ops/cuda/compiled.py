"""Compiles Triton kernels for sm90 without a GPU and counts instructions in their PTX. Runs outside the interpreter.

`python -m tests.ops.cuda.compiled` prints JSON: kernel -> counts.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
import triton.language as tl

from exactrl.ops.cuda import triton_logprob as kernels
from tests.ops.cuda.ptx import to_ptx

INSTRUCTIONS = {
    "fma": r"\bfma\.",
    "ieee_division": r"div\.rn\.f32",
    "approximate_division": r"div\.(?:full|approx)|rcp\.",
    "exp2": r"ex2\.approx\.ftz\.f32",
    "other_approximation": r"(?:lg2|sqrt|rsqrt|sin|cos|tanh)\.approx|ex2\.approx\.f32",
}
TYPES = {
    "keys": "*i64",
    "positions": "*i64",
    "targets": "*i64",
    "digests": "*i64",
    "token": "*i32",
    "d_logits": "*bf16",
}
V = 151936
SIZES = ("V", "rows", "groups", "stride")


@triton.jit
def _ln(x, y):
    i = tl.arange(0, 128)
    tl.store(y + i, tl.log(tl.load(x + i)))


NOT_SAMPLING = {"keys": None, "positions": None, "best": None, "token": None}
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ln": (_ln, {}),
    "blocks": (kernels._blocks, {**NOT_SAMPLING, "V": V, "N": 4, "SPAN": 4, "SAMPLE": False, "ENTROPY": True}),
    "blocks sampling": (kernels._blocks, {"V": V, "N": 4, "SPAN": 4, "SAMPLE": True, "ENTROPY": False}),
    "merge": (
        kernels._merge,
        {
            "best": None,
            "token": None,
            "SAMPLE": False,
            "ENTROPY": True,
            "BLOCKS": 1187,
            "WIDTH": 256,
            "CHAIN": kernels.CHAIN,
        },
    ),
    "merge sampling": (
        kernels._merge,
        {"SAMPLE": True, "ENTROPY": False, "BLOCKS": 1187, "WIDTH": 256, "CHAIN": kernels.CHAIN},
    ),
    "all": (kernels._all, {"digests": None, "V": V, "COUNT": 2048, "DIGEST": False}),
    "digest": (kernels._all, {"out": None, "V": V, "COUNT": 2048, "DIGEST": True}),
    "backward": (kernels._backward, {"V": V, "COUNT": 2048}),
}


def ptx(function, constants: dict[str, Any], options: dict[str, Any]) -> str:
    kinds = {name: "i32" if name in SIZES else TYPES.get(name, "*fp32") for name in function.arg_names}
    pointers = {name for name, kind in kinds.items() if kind.startswith("*") and name not in constants}
    sizes = {"V", "stride"} - set(constants)
    aligned = [i for i, name in enumerate(kinds) if name in pointers | sizes]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}  # as for a vocabulary that 16 divides
    return to_ptx(function, kinds, constants, options, attributes)


def counts(options: dict[str, Any]) -> dict[str, dict[str, int]]:
    found = {
        name: ptx(function, constants, kernels.ALONE if function in (kernels._blocks, kernels._merge) else options)
        for name, (function, constants) in KERNELS.items()
    }
    return {
        name: {
            **{what: len(re.findall(pattern, text)) for what, pattern in INSTRUCTIONS.items()},
            "barrier_after_stores": barriers_after_stores(text),
            "waits_first": waits_first(text),
        }
        for name, text in found.items()
    }


def barriers_after_stores(text: str) -> int:
    """Places where global stores are followed by a barrier and then by global loads."""
    events = re.findall(r"(?:ld|st)\.global|bar\.(?:warp\.)?sync", text)
    return len(re.findall("SBL", "".join({"ld": "L", "st": "S", "ba": "B"}[event[:2]] for event in events)))


def waits_first(text: str) -> bool:
    """Memory is touched only after the kernel before this one is done; the next one may come and wait before that."""
    events = re.findall(r"griddepcontrol\.\w+|(?:ld|st)\.global", text)
    controls = ["griddepcontrol.launch_dependents", "griddepcontrol.wait"]
    return events[:2] == controls and not any(event in controls for event in events[2:])


if __name__ == "__main__":
    json.dump(counts(kernels.LAUNCH), sys.stdout)
