"""Gold labels as data sets hold them."""

from __future__ import annotations

import math
from typing import Any


def gold_text(value: Any) -> str:
    """A label as text: a string, a number, or a list of exactly one of them (33, 33.0, "33" and ["33"] all mean 33).

    Raises ValueError, which says what the value is, for anything else; an empty text is a label, if a useless one.
    """
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        kind = "null" if value is None else type(value).__name__
        size = f" of {len(value)} items" if isinstance(value, list | tuple) else ""
        raise ValueError(f"must be a text, a number, or a list of one of them, not {kind}{size}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"must be a finite number, not {value}")
    return str(value)


def gold_answer(gold: str) -> str:
    """The answer in a label: what stands behind the last `####`, as GSM8K writes it, else all of it."""
    return gold.rpartition("####")[2].strip()
