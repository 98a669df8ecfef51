"""How many blocks of the KV cache the memory holds."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from exactrl.errors import EnvironmentProblem
from exactrl.model.qwen3 import Qwen3

CONTAINER = Path("/sys/fs/cgroup")
GROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Of a control group, version 2 and 1: limit, use, counts, and the count of pages that only cache files."""
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
    """Bytes that can be taken without swapping: pages that only cache files count, what a container does not allow
    does not."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil  # where there is a GPU nobody needs it

    return min(psutil.virtual_memory().available, left_in_container(CONTAINER))


def left_in_container(folder: Path) -> int:
    """Bytes below the limit of the control group at `folder`, cached files not counted; more than any machine has where
    there is no limit."""
    for limit, used, stat, cached in GROUP_FILES:
        try:
            counts = dict(line.split() for line in (folder / stat).read_text().splitlines())
            most, taken = (int((folder / name).read_text()) for name in (limit, used))  # "max" is no number
            return most - taken + int(counts[cached])
        except (OSError, ValueError, KeyError):
            continue
    return sys.maxsize


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
