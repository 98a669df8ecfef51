"""DAPO's overlong reward shaping."""

from __future__ import annotations


def overlong_penalty(length: int, max_length: int, cache: int) -> float:
    """What a response of `length` tokens loses: 0 up to max_length - cache, then linearly down to -1 at max_length.

    Source: DAPO, arXiv:2503.14476, eq. 13. Decided by the length alone: a response that ends by itself exactly at
    max_length loses 1, as one that was cut there. cache = 0 means no shaping: always 0.
    """
    assert 0 <= cache <= max_length, (cache, max_length)
    over = length - (max_length - cache)
    if cache == 0 or over <= 0:
        return 0.0
    return -min(over / cache, 1.0)
