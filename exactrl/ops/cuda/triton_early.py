"""Kernels that are launched while the one before them in the stream still runs (programmatic dependent launch).

Why no read and no write can overtake: each of these kernels begins with `wait`, in every thread and before it touches
memory. griddepcontrol.wait returns when all kernels that this one follows are done and what they wrote is visible, also
when they know nothing of early launches, and in a graph. The next kernel may start only when all programs of this one
have passed their wait. So at most two kernels of a stream are under way, the second has not touched memory, and the
first one's predecessors are done: memory that the allocator hands on in stream order is free when it is written.
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
    """The order of the two decides that a kernel starts early only when the one before the one before it is done."""
    if COMPILED:
        gdc_wait()
        gdc_launch_dependents()
