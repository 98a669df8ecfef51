"""GPU implementations of the contract's ops. Importing this room loads neither numba nor triton."""
