"""Attention of the contract "exact-v1-fa3": Flash Attention 3 with one split, in rollout and training alike.

FA3 picks its kernel from the largest number of query rows of any sequence in the call. Where that is 1 it drops the
causal mask for head dimensions other than 128 and for packed keys, and may change its tile with the mask (hopper/
flash_api.cpp): a decode row could get other bits alone than in a batch with a prefill. So the number given is never
below 2, which is an upper bound all the same. The other switch (keys through the bulk copy engine where a page is a
multiple of the key tile) changed no bit at head dimensions 64, 128 and 256 and pages of 16 to 256 (docs/log.md).

Forward only; the gradient comes from attention_backward.py as in "exact-v1".
"""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import torch

from exactrl.contract import AttentionShape
from exactrl.errors import EnvironmentProblem
from exactrl.ops.cuda.attention import AttentionChoice, AttentionImplementation, AttentionRows

HEAD_DIMS = (64, 128, 256)
LEAST_ROWS = 2


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: AttentionRows,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sequences: np.ndarray,
) -> None:
    import flash_attn_interface

    assert len(sequences) == np.count_nonzero(rows.counts), "FA3 takes a batch as a whole"
    most = max(LEAST_ROWS, int(rows.counts.max()))
    common = {"causal": True, "num_splits": 1}
    if rows.tables is None:
        found, sums = flash_attn_interface.flash_attn_varlen_func(
            q, k, v, rows.starts, rows.starts, most, most, return_attn_probs=True, **common
        )
    else:
        found, sums, *_ = flash_attn_interface.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=rows.lengths, page_table=rows.tables, cu_seqlens_q=rows.starts, max_seqlen_q=most,
            return_softmax_lse=True, **common,
        )  # fmt: skip
    out.copy_(found)
    if lse is not None:
        lse.copy_(sums)


def _serves(shape: AttentionShape) -> bool:
    return shape.dim in HEAD_DIMS and shape.heads % shape.kv_heads == 0


def fa3_implementation() -> AttentionImplementation:
    """Raises EnvironmentProblem where Flash Attention 3 is not installed."""
    if find_spec("flash_attn_interface") is None:
        raise EnvironmentProblem(
            "contract 'exact-v1-fa3' needs Flash Attention 3 (module flash_attn_interface), which is not installed; "
            "run: pip install 'exactrl[fa3]', or use contract 'exact-v1'"
        )
    return AttentionImplementation("fa3", "in_order", _attend, _serves)


def fa3_choice() -> AttentionChoice:
    """Everything through one call: decode rows and prefill rows of a batch share a kernel."""
    implementation = fa3_implementation()
    return AttentionChoice(implementation, implementation, 0)
