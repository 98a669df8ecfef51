"""Numbers as answers spell them, with exact values; and when two of them are the same number."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 2_000
MAX_EXPONENT = 1_000
# A decimal with at least this many significant digits may stand for the number that it rounds.
ROUNDED_DIGITS = 6

_DECIMAL = r"(?:\d{1,3}(?:[, ]\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?P<digits>{_DECIMAL})"
    r"(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*(?P<power>[-+]?\d+)\s*\}|(?P<digit>-?\d+))|[eE](?P<e>[-+]?\d+))?",
    re.ASCII,
)
_REPEATING = re.compile(r"(?P<sign>[-+]?)\s*(\d*)\.(\d*)\\(?:overline|bar)\{(\d+)\}", re.ASCII)
_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_FRACTION = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?P<whole>{_INTEGER})(?P<gap>\s*))??"
    rf"(?:\\frac\s*\{{\s*(?P<nsign>-?)\s*(?P<top>{_INTEGER})\s*\}}\s*\{{\s*(?P<bottom>{_INTEGER})\s*\}}"
    rf"|(?P<ptop>{_INTEGER})\s*/\s*(?P<pbottom>{_INTEGER}))",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Number:
    """`value` is exact. `ulp` is one unit of the last decimal place where the text is a decimal of at least
    ROUNDED_DIGITS significant digits, else 0."""

    value: Fraction
    percent: bool = False
    ulp: Fraction = Fraction(0)


class Improper(ValueError):
    """A whole number before an improper fraction, `5 9/4`: no mixed number and no product."""


def number(text: str) -> Number | None:
    """The number that all of the (cleaned) text spells; None where it spells none, or one beyond MAX_DIGITS.

    Integers, decimals, thousands separators, scientific notation, fractions, mixed numbers, each with an optional `%`.
    Raises Improper.
    """
    text = text.strip()
    if len(text) > MAX_DIGITS:
        return None
    percent = text.endswith("%")
    if percent:
        text = text[:-1].rstrip()
    if match := _NUMBER.fullmatch(text):
        return _decimal(match, percent)
    if match := _FRACTION.fullmatch(text):
        return _fraction(match, percent)
    if match := _REPEATING.fullmatch(text):
        return _repeating(match, percent)
    return None


def number_like(text: str) -> bool:
    """Whether the text spells one number, however large; the commas of such a text separate thousands, not items."""
    bare = text.strip().removesuffix("%").rstrip()
    return bool(_NUMBER.fullmatch(bare) or _FRACTION.fullmatch(bare) or _REPEATING.fullmatch(bare))


def _decimal(match: re.Match[str], percent: bool) -> Number | None:
    digits = match["digits"].replace(",", "").replace(" ", "")
    exponent = int((match["power"] or match["digit"] or match["e"] or "0")[:12])
    if abs(exponent) > MAX_EXPONENT:
        return None
    whole, _, places = digits.partition(".")
    scale = Fraction(10) ** (exponent - len(places))
    unsigned = int(whole + places)
    rounded = bool(places) and len(str(unsigned)) >= ROUNDED_DIGITS
    value = unsigned * scale * (-1 if match["sign"] == "-" else 1)
    return Number(value, percent, scale if rounded else Fraction(0))


def _fraction(match: re.Match[str], percent: bool) -> Number | None:
    top, bottom = (int((match[a] or match[b]).replace(",", "")) for a, b in (("top", "ptop"), ("bottom", "pbottom")))
    if bottom == 0:
        return None
    value = Fraction(-top if match["nsign"] == "-" else top, bottom)
    if match["whole"]:
        if not 0 < value < 1 or (match["ptop"] and not match["gap"]):
            raise Improper(match[0])
        value += int(match["whole"].replace(",", ""))
    return Number(-value if match["sign"] == "-" else value, percent)


def _repeating(match: re.Match[str], percent: bool) -> Number:
    """0.1\\overline{6}: the digits once with the period and once without it, over 9s and 0s."""
    whole, fixed, period = match[2], match[3], match[4]
    numerator = int(whole + fixed + period) - int((whole + fixed) or "0")
    value = Fraction(numerator, (10 ** len(period) - 1) * 10 ** len(fixed))
    return Number(-value if match["sign"] == "-" else value, percent)


def same_number(a: Number, b: Number) -> bool:
    """Equal values; or one a decimal that is the other one rounded or cut off, at ROUNDED_DIGITS digits or more.

    Where one side alone has a percent sign, 35% is both 0.35 and 35: questions that ask "what percent" have golds with
    and without the sign.
    """
    if a.percent == b.percent:
        return _same(a.value, b.value, max(a.ulp, b.ulp))
    percent, plain = (a, b) if a.percent else (b, a)
    return _same(percent.value, plain.value, max(percent.ulp, plain.ulp)) or _same(
        percent.value / 100, plain.value, max(percent.ulp / 100, plain.ulp)
    )


def _same(a: Fraction, b: Fraction, ulp: Fraction) -> bool:
    return a == b or abs(a - b) < ulp
