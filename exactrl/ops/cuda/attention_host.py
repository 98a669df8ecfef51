"""What the launches of all attention kernels share on the host, in Triton or CUDA C++."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

from exactrl.ops.cuda.nvrtc import TensorMap, map_of


@functools.cache
def scale_of(dim: int) -> float:
    """log2(e) / sqrt(D), rounded to fp32."""
    return float(np.float32(math.log2(math.e) / math.sqrt(dim)))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def page_map(pages: torch.Tensor, rows: int) -> TensorMap:
    """Keys or values [pages, page_size, HK, D] in bf16, read in boxes of `rows` rows of one head and 64 elements."""
    assert pages.dtype == torch.bfloat16, pages.dtype
    return _page_map(pages.data_ptr(), pages.shape, pages.stride(), rows)


@functools.lru_cache(maxsize=4096)  # asked in every layer of every step
def _page_map(address: int, shape: tuple[int, ...], strides: tuple[int, ...], rows: int) -> TensorMap:
    count, page_size, kv_heads, dim = shape
    assert strides[3] == 1, strides
    return map_of(address, (dim, kv_heads, page_size, count), (1, *strides[2::-1]), (64, 1, rows, 1))
