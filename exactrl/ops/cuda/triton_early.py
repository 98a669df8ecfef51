"""Kernels that are launched while the one before them in the stream still runs (programmatic dependent launch).

Why no read and no write can overtake: each of these kernels waits before it touches memory. griddepcontrol.wait returns
when the kernel that this one follows is done and what it wrote is visible, also when that one knows nothing of early
launches, and in a graph. Since every early kernel waits, one that is done means that all before it are: memory that the
allocator hands on in stream order is free when it is written. Any number may be there and wait; a kernel starts only
when all programs of the one before have, so that what runs never lacks room because of those that wait.

One thing is read before the wait: wgmma_matmul.cu's weights, in captured graphs, which write none.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from exactrl.ops.cuda.triton_exact import EXACT

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
EARLY = {**EXACT, "launch_pdl": True}
"""Options of every launch of a kernel that begins with `wait`."""


@triton.jit
def wait():
    """The next kernel may start before this one has waited: a product then fetches weights while this one, and the one
    before it, still run."""
    if COMPILED:
        gdc_launch_dependents()
        gdc_wait()
