"""DAPO's overlong penalty, point by point."""

from __future__ import annotations

import pytest

from exactrl.algo.overlong import overlong_penalty


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0), (1, 0), (80, 0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1), (101, -1)]
)
def test_penalty(length, expected):
    assert overlong_penalty(length, 100, 20) == pytest.approx(expected, abs=1e-12)


def test_the_papers_lengths():
    """16,384 tokens and a cache of 4,096 beyond them: arXiv:2503.14476, section 4.1."""
    assert overlong_penalty(16384, 20480, 4096) == 0
    assert overlong_penalty(18432, 20480, 4096) == -0.5
    assert overlong_penalty(20480, 20480, 4096) == -1


@pytest.mark.parametrize("length", [0, 5, 100, 1000])
def test_no_cache_is_no_penalty(length):
    assert overlong_penalty(length, 100, 0) == overlong_penalty(length, 0, 0) == 0
