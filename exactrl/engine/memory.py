"""How many blocks of the KV cache the memory holds."""

from __future__ import annotations

import os

import torch

from exactrl.errors import EnvironmentProblem
from exactrl.model.qwen3 import Qwen3

KV_SHARE_OF_MEMORY = {"cpu": 0.4, "cuda": 0.85}
"""Of the memory that is free at start, where kv_tokens is 0. A GPU's rest is for activations and graphs: while a
trainer works on the same GPU the cache sleeps."""


def num_blocks(model: Qwen3, kv_tokens: int, wanted_tokens: int, reserve_bytes: int) -> int:
    """Blocks for `kv_tokens`; where that is 0 as many of `wanted_tokens` as fit beside `reserve_bytes`.

    Raises EnvironmentProblem, before any of it is set up, for a cache that the memory does not hold.
    """
    page, device = model.ops.page_size, model.ops.device
    free = free_memory(device) - reserve_bytes
    if kv_tokens:
        _require(-(-kv_tokens // page) * block_bytes(model), kv_tokens, free, reserve_bytes, device)
        return -(-kv_tokens // page)
    fitting = int(free * KV_SHARE_OF_MEMORY[device.type]) // block_bytes(model)
    if fitting < 1:
        raise EnvironmentProblem(
            f"no room for a KV cache: this {_where(device)} has {_gib(free + reserve_bytes)} free"
            + (f", of which the optimizer will take {_gib(reserve_bytes)}" if reserve_bytes else "")
            + "; use a smaller model or a larger machine"
        )
    return min(-(-wanted_tokens // page), fitting)


def block_bytes(model: Qwen3) -> int:
    """Memory of one block of the KV cache over all layers."""
    c = model.config
    dim = c.head_dim + -(-c.head_dim // 16) * 16
    return model.ops.page_size * c.num_layers * c.num_kv_heads * dim * (4 if model.dtype == torch.float32 else 2)


def free_memory(device: torch.device) -> int:
    """Bytes: what is available, or half of what the machine has where the system does not say (macOS, Windows)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):
        return 4 << 30


def _require(size: int, kv_tokens: int, free: int, reserve_bytes: int, device: torch.device) -> None:
    if size > (limit := free if device.type == "cuda" else 2 * free):
        raise EnvironmentProblem(
            f"a KV cache of {kv_tokens} tokens takes {_gib(size)}, this {_where(device)} has about {_gib(limit)}"
            + (f" beside {_gib(reserve_bytes)} for the optimizer" if reserve_bytes else "")
            + "; lower rollout.kv_tokens (--kv-tokens), or 0 for what fits"
        )


def _gib(size: int) -> str:
    return f"{max(0, size) / 2**30:,.1f} GiB"


def _where(device: torch.device) -> str:
    return "GPU" if device.type == "cuda" else "machine"
