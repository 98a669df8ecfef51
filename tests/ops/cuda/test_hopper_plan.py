"""What the host prepares for the in-order CUDA kernel: every row once, by tiles that the kernel can hold."""

from __future__ import annotations

import numpy as np
import pytest

from exactrl.contract import AttentionShape
from exactrl.ops.cuda import hopper_attention
from exactrl.ops.cuda.hopper_attention import CONSUMERS, ROWS, plan_items, serves, shared_bytes
from exactrl.ops.cuda.nvrtc import MAX_SHARED


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (2, 4), (3, 5), (2, 7), (1, 64)])
def test_every_row_of_the_asked_sequences_is_in_one_item(kv_heads: int, group: int) -> None:
    counts = np.array([1, 0, 63, 64, 65, 200, 777])
    lengths = counts + np.array([0, 9, 5, 600, 0, 64, 3])
    asked = np.flatnonzero(counts)[::2]
    items = plan_items(counts, lengths, asked, kv_heads, group, 128)
    tokens = CONSUMERS * (ROWS // group)
    seen = {(s, h): np.zeros(counts[s], int) for s in asked for h in range(kv_heads)}
    for sequence, head, first, _ in items:
        assert first < counts[sequence]
        seen[sequence, head][first : first + tokens] += 1
    assert all((rows == 1).all() for rows in seen.values())
    assert len(items) == sum(-(-counts[s] // tokens) for s in asked) * kv_heads


def test_items_of_one_section_come_longest_first() -> None:
    counts = np.array([4096, 512])
    items = plan_items(counts, counts, np.arange(2), 2, 4, 128)
    ends = items[:, 2]  # first token; later tokens see more keys
    assert (np.diff(ends) <= 0).all()


def test_what_cannot_stay_in_the_cache_together_is_not_mixed() -> None:
    counts = np.array([200_000, 200_000])
    items = plan_items(counts, counts, np.arange(2), 1, 4, 128)
    assert (np.diff(items[:, 0]) >= 0).all(), "the second sequence begins after the first"


def test_shared_memory_fits_and_shapes_are_told_apart() -> None:
    assert all(shared_bytes(dim) + 1024 <= MAX_SHARED for dim in hopper_attention.DIMS)
    assert serves(AttentionShape(32, 8, 128, 16))
    assert serves(AttentionShape(32, 8, 64))
    assert not serves(AttentionShape(32, 8, 256)), "its accumulators do not fit"
    assert not serves(AttentionShape(32, 8, 128, 8)), "pages of 8"
    assert not serves(AttentionShape(65 * 2, 2, 128)), "more heads than rows"
    assert not serves(AttentionShape(10, 4, 128)), "heads are not shared evenly"
