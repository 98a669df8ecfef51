"""Text for people: numbers, durations, and the escaping that everything from a run goes through."""

from __future__ import annotations

import math
import re
from html import escape

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f]")


def clean(text: str) -> str:
    """Text as safe HTML. Control characters become their visible pictures, lone surrogates their escapes."""
    text = _CONTROL.sub(lambda match: "\u2421" if match[0] == "\x7f" else chr(0x2400 + ord(match[0])), text)
    return escape(text.encode("utf-8", "backslashreplace").decode("utf-8"))


def plain(value: float | None, digits: int = 4) -> str:
    """A number for people: whole ones with thousands separators, others with `digits` significant digits."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == int(value) and abs(value) < 1e15:
        text = f"{int(value):,}"
    elif 1e-3 <= abs(value) < 1e6:
        text = f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
    else:
        text = f"{value:.3g}"
    return text.replace("-", "−", 1) if text.startswith("-") else text


def duration(seconds: float) -> str:
    """12.3 s, 4 min 05 s or 2 h 07 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"
