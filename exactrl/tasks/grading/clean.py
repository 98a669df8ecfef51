"""One spelling for answers that are written in many: LaTeX dress, spaces, fonts, delimiters."""

from __future__ import annotations

import re
import unicodedata

_CHARACTERS = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u2010": "-", "\u2011": "-", "×": r"\times ", "·": r"\cdot ",
        "⋅": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
        "√": r"\sqrt ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}",
        "±": r"\pm ",
        "°": r"^\circ ", "²": "^2", "³": "^3", "…": r"\ldots ", "，": ",", "；": ";", "。": ".", "\u00a0": " ",
        "\u200b": "", "\u2060": "", "\ufeff": "", "’": "'",
    }
)  # fmt: skip

_FONTS = r"text(?:rm|bf|it|sf|tt|normal|up|sc)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|bf|rm|operatorname\*?"
_WORDS_AND_LISTS = re.compile(r"\\text\{([^{}]*?)(?<![^\W\d_])(and|or)(?![^\W\d_])([^{}]*)\}")
_NUMERIC_TEXT = re.compile(r"\\text\{([-+\d.,/%()=\s^*:]*|\s*\(?[A-Za-z]\)?\s*)\}")

# Applied in this order. What a pattern removes is only dress: no pattern may change a value.
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<!\\)\\\\(?=[A-Za-z])(?![^&]*\\end\{)", r"\\"),  # doubled escapes of commands, outside matrices
        (r"(?<!\\)\\\$|(?<!\\)\$|[€£¥₹]", ""),
        (r"(?<!\\)\\[()\[\]]", " "),
        (r"(?<!\\)\\!", ""),
        (r"(?<=\d)(?:(?<!\\)\\,|\{,\})(?=\d{3}(?!\d))", ""),  # thousands: 2\,400 and 2{,}400
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![A-Za-z])", " "),
        (r"\s+", " "),  # once more at the end; here so that no pattern below meets long runs of spaces
        (r"\\(?:left|right)\s*\.", ""),
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])", ""),
        (r"\\(?:display|text|script)style(?![A-Za-z])|\\(?:no)?limits(?![A-Za-z])|\\mathstrut", ""),
        (rf"\\(?:{_FONTS})\s*\{{", r"\\text{"),
        (r"\\(?:rm|bf|it)(?![A-Za-z])\s*", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*(?=\{)", r"\\frac{\1}"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\\sqrt\s*(\d|[A-Za-z](?![A-Za-z]))", r"\\sqrt{\1}"),
        (
            r"\\(sin|cos|tan|cot|sec|csc)\s*(?:\(\s*(\d+)\s*\^\s*(?:\\circ(?![A-Za-z])\s*|\{\s*\\circ\s*\}\s*)\)"
            r"|\{?\s*(\d+)\s*\^\s*(?:\\circ(?![A-Za-z])\s*|\{\s*\\circ\s*\}\s*)\}?)",
            r"\\\1(\\frac{\2\3\\pi}{180})",
        ),
        (r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])", ""),
        (r"\\%|\s*\\?\bper\s?cent\b|\s*\\text\{\s*per\s?cent\s*\}", "%"),
        (r"\\(?:leq?|leqslant)(?![A-Za-z])", r"\\le "),
        (r"\\(?:geq?|geqslant)(?![A-Za-z])", r"\\ge "),
        (r"\\neq?(?![A-Za-z])", r"\\ne "),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:dots[cb]?|cdots|ldots|hdots)(?![A-Za-z])|\.\.\.", r"\\ldots "),
        (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\(?:Longr|Leftr|r|R)ightarrow(?![A-Za-z])|\\implies(?![A-Za-z])", r"\\to "),
        (r"\*\*", "^"),
        (r"\s+", " "),
    )
)
_BRACED_THOUSANDS = re.compile(r"(?<!\\)\{\s*(-?\d{1,3}(?:,\d{3})+(?:\.\d+)?)\s*\}")
_SPACES = re.compile(r"(?<![\d,])\s+|\s+(?!\d)")
# "where k is an integer" says nothing about the value.
_ANY_INTEGER = re.compile(
    r"[,;(]?\s*(?:\\text\{\s*(?:where|for|with)\s*\})?\s*[a-z]\s*\\in\s*\\mathbb\{?[ZN]\}?\s*\)?$"
)


def clean(text: str) -> str:
    """The answer in one spelling; the same text for what differs in dress only. Quadratic in its length at worst."""
    text = unicodedata.normalize("NFC", text).translate(_CHARACTERS)
    text = "".join(chr(ord(c) - 0xFEE0) if "\uff01" <= c <= "\uff5e" else c for c in text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _WORDS_AND_LISTS.sub(_split_words, text) if re.search(r"\d", text) else text
    text = _NUMERIC_TEXT.sub(r"\1", text)
    text = _BRACED_THOUSANDS.sub(lambda match: "{" + match[1].replace(",", "") + "}", text)
    return _trim(_ANY_INTEGER.sub("", text) or text)


def _split_words(match: re.Match[str]) -> str:
    """`\\text{ chickens and }` between numbers is a unit, the word of a list, and nothing."""
    before, word, after = match[1].strip(), match[2], match[3].strip()
    return (rf"\text{{{before}}}" if before else "") + f" {word} " + (rf"\text{{{after}}}" if after else "")


def _trim(text: str) -> str:
    """Without spaces and punctuation at the ends, and without braces or \\text{} around all of it."""
    while True:
        before = text
        text = text.strip()
        if text.endswith((".", ",", ";", ":")) and not text.endswith("\\ldots."):
            text = text[:-1]
        if text.startswith("{") and closing(text, 0) == len(text) - 1:
            text = text[1:-1]
        if text == before:
            return text


def closing(text: str, start: int) -> int:
    """Where the brace that opens at `start` closes; -1 where it does not."""
    depth = 0
    position = start
    while position < len(text):
        if text[position] == "\\":
            position += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
        position += 1
    return -1


def key(text: str) -> str:
    """What two cleaned answers must share to be the same text: everything but fonts, optional braces, and spaces
    that part no numbers: `3 1/4` is not 31/4, and `1, 234` is not 1,234."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"([_^])\{(\w)\}", r"\1\2", text)
    return _SPACES.sub("", text)
