"""Reductions outside the model that must not depend on threads."""

from __future__ import annotations

import numpy as np

from exactrl.ops.cpu.jit import kernel


@kernel
def sum_of_squares(x):
    """float64 sum of x² of a float32 array, 16 lanes added as a balanced tree."""
    lanes = np.zeros(16, np.float64)
    full = x.size // 16 * 16
    for i in range(0, full, 16):
        for j in range(16):
            v = np.float64(x[i + j])
            lanes[j] += v * v
    for i in range(full, x.size):
        v = np.float64(x[i])
        lanes[i - full] += v * v
    width = 8
    while width:
        for j in range(width):
            lanes[j] += lanes[j + width]
        width //= 2
    return lanes[0]
