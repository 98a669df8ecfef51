"""What the launches of all attention kernels share on the host, in Triton or CUDA C++."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

from exactrl.ops.cuda.nvrtc import TensorMap, tensor_map


@functools.cache
def scale_of(dim: int) -> float:
    """log2(e) / sqrt(D), rounded to fp32."""
    return float(np.float32(math.log2(math.e) / math.sqrt(dim)))


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def page_map(pages: torch.Tensor, rows: int) -> TensorMap:
    """Keys or values [pages, page_size, HK, D], read in boxes of `rows` rows of one head and 64 elements."""
    count, page_size, kv_heads, dim = pages.shape
    strides = (1, pages.stride(2), pages.stride(1), pages.stride(0))
    return tensor_map(pages, (dim, kv_heads, page_size, count), strides, (64, 1, rows, 1))
