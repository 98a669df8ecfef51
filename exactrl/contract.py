"""The numerics contract as data: what fixes the bits of a logprob (docs/numerics.md).

A contract names the canonical order of every reduction and where results are rounded. Kernels may parallelise in any
way that gives the same bits. The digest goes into prefix-cache keys, run folders and certificates.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, dataclass, replace

from exactrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Contract:
    """Parameters of the canonical order. Lengths are in tokens or elements.

    k_leaves        leaves of row-parallel linears (o_proj, down_proj), added as a balanced fp32 tree
    residual_dtype  "bfloat16" or "float32"; a float32 model always has a float32 residual stream
    kv_split        attention: KV cut at absolute multiples of this, splits merged ascending
    kv_block        attention: online-softmax block inside a split
    vocab_block     log-softmax: (max, sum) per block of the vocabulary, merged ascending
    lanes           CPU row reductions: element i belongs to lane i % lanes, lanes added as a balanced tree
    """

    name: str = "exact-v1"
    k_leaves: int = 1
    residual_dtype: str = "bfloat16"
    kv_split: int = 512
    kv_block: int = 64
    vocab_block: int = 128
    lanes: int = 16

    @property
    def digest(self) -> str:
        return hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=16).hexdigest()


CONTRACTS = {"exact-v1": Contract()}


def get_contract(name: str, *, k_leaves: int = 1, residual_dtype: str = "bfloat16") -> Contract:
    """The named contract with the two parameters a recipe may choose.

    Raises ConfigError for an unknown name, a k_leaves that is not a power of two, or another residual dtype.
    """
    if name not in CONTRACTS:
        raise ConfigError(f"contract.name {name!r} is unknown; known contracts: {', '.join(CONTRACTS)}")
    if k_leaves < 1 or k_leaves & (k_leaves - 1):
        raise ConfigError(f"contract.k_leaves must be a power of two, not {k_leaves}")
    if residual_dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"contract.residual_dtype must be 'bfloat16' or 'float32', not {residual_dtype!r}")
    return replace(CONTRACTS[name], k_leaves=k_leaves, residual_dtype=residual_dtype)


def noise_key(seed: int, stream: str, step: int, retry: int, row_id: str, sample_index: int) -> int:
    """64-bit Philox key of one response: all that its sampling noise depends on besides position and vocabulary index.

    `stream` separates uses of the same seed ("train", "eval/<name>", "generate"), `row_id` is the prompt's unique id.
    """
    row = hashlib.blake2b(row_id.encode(), digest_size=8).digest()
    head = struct.pack("<qqqq", seed, step, retry, sample_index)
    return int.from_bytes(hashlib.blake2b(head + row + stream.encode(), digest_size=8).digest(), "little")
