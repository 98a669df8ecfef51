"""What every Triton kernel of the contract shares."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

EXACT = {"enable_fp_fusion": False}
"""Options of every launch: a product and a sum are never contracted."""
LOG2E = tl.constexpr(1.44269502162933349609375)  # log2 e as fp32
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
EARLY = {**EXACT, "launch_pdl": True}
"""Options of kernels that begin with `wait`: launched while the kernel before them still runs."""


@triton.jit
def wait():
    """Returns when the kernel before this one is done and its results are visible; lets the next one be launched."""
    if COMPILED:
        gdc_wait()
        gdc_launch_dependents()
