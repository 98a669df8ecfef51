"""Answers in words: text answers, choice letters, and units behind a value."""

from __future__ import annotations

import re

_MATH_NAMES = (
    "pi sqrt sin cos tan cot sec csc log ln exp arcsin arccos arctan sinh cosh tanh inf infinity infty theta alpha "
    "beta gamma delta lambda sigma omega phi mu tau frac cdot times abs max min gcd lcm mod deg det and or"
)
_MATH_WORDS = frozenset(_MATH_NAMES.split())
_WORD = re.compile(r"[^\W\d_]+")
_CHOICE = re.compile(r"\(?\s*([A-Z])\s*\)?[.:]?")
_LABELLED = re.compile(r"(?:\(([A-Z])\)|([A-Z])[).:])\s*(.+)", re.DOTALL)
_TEXT_UNIT = re.compile(r"(.*[^\s\\])\s*\\text\{([^{}]*)\}(\s*\^\s*\{?\d\}?)?(.*)", re.DOTALL)
_PLAIN_UNIT = re.compile(
    r"([-+]?[\d.,/ ]*\d%?)(?:\s+(?=[a-z]{2})|\s*(?=[^\x00-\x7f]))([a-z\s/.]+|[^\x00-\x7f]+)(\s*\^\s*\{?\d\}?)?",
    re.IGNORECASE,
)
_UNIT_NAMES = (
    "cm centimeter centimetre", "mm millimeter millimetre", "m meter metre", "km kilometer kilometre", "in inch inche",
    "ft foot feet", "yd yard", "mi mile", "g gram", "kg kilogram", "mg milligram", "lb pound", "oz ounce",
    "s sec second", "min minute", "h hr hour", "day", "week", "month", "year yr", "l liter litre", "ml milliliter",
    "gallon gal", "mph", "dollar", "cent", "degree deg", "radian rad",
)  # fmt: skip
_UNITS = {name: names.split()[0] for names in _UNIT_NAMES for name in names.split()}


def same_words(a: str, b: str) -> bool | None:
    """Whether two answers in words are the same ones, in any case; None where neither is in words."""
    first, second = words(a), words(b)
    if first is None and second is None:
        return None
    return (first or words(a, short=True)) == (second or words(b, short=True))


def words(text: str, *, short: bool = False) -> str | None:
    """The words of an answer that is no formula, in lower case and joined; None for a formula.

    A formula here is anything with a digit, an operator or a command, and letters that could be variables: runs of
    fewer than four outside `\\text{}` (which `short` admits), and the names of functions.
    """
    plain = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    if not plain.strip() or re.search(r"[\d\\=+*/^_<>|{}\[\]%]", plain):
        return None
    found = _WORD.findall(plain)
    if not found or all(word.lower() in _MATH_WORDS for word in found):
        return None
    if not short and "\\text{" not in text and max(map(len, found)) < 4 and plain.isascii():
        return None
    if "(" in text and "\\text{" not in text:
        return None
    return "".join(found).casefold()


def choice(text: str) -> str | None:
    """The letter of `B`, `(B)`, `B.` or `(B)` before something."""
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip()
    if match := _CHOICE.fullmatch(plain):
        return match[1]
    if match := _LABELLED.fullmatch(plain):
        return match[1] or match[2]
    return None


def without_choice(text: str) -> str | None:
    """What stands behind a choice letter, `(B) 12`; None where there is none."""
    match = _LABELLED.fullmatch(text)
    return match[3].strip() if match else None


def split_unit(text: str) -> tuple[str, str]:
    """A value and the unit behind it, which may be any words: ("36", "cm^2"). ("...", "") where there is none."""
    if (match := _TEXT_UNIT.fullmatch(text)) and not match[4].strip() and _WORD.search(match[2]):
        value, unit, power = match[1], match[2], match[3]
    elif match := _PLAIN_UNIT.fullmatch(text):
        value, unit, power = match[1], match[2], match[3]
        if unit.strip().lower() in _MATH_WORDS:
            return text, ""
    else:
        return text, ""
    return value.strip(), unit.strip() + re.sub(r"[\s{}]", "", power or "")


def units_differ(a: str, b: str) -> bool:
    """Whether both are units of the table and not the same one; an unknown or absent unit differs from none."""
    first, second = _canonical(a), _canonical(b)
    return bool(first and second and first != second)


def _canonical(unit: str) -> str:
    name, _, power = unit.lower().replace(".", "").partition("^")
    for prefix, exponent in (("square ", "2"), ("sq ", "2"), ("cubic ", "3"), ("cu ", "3")):
        if name.startswith(prefix):
            name, power = name.removeprefix(prefix), exponent
    name = name.strip()
    known = _UNITS.get(name) or _UNITS.get(name.removesuffix("s"))
    return f"{known}^{power or 1}" if known else ""
