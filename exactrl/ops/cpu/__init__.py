"""CPU implementations of the contract's ops: numba kernels whose every rounding is spelled out."""
