"""Numbers that no computer should be asked to write out: found in the text, before anything is evaluated."""

from __future__ import annotations

import math
import re

# Above this many digits a power or factorial is not evaluated.
MAX_DIGITS = 20_000
MAX_DEPTH = 60

_TOKEN = re.compile(r"\d+(?:\.\d+)?|\\[A-Za-z]+|\\.|.", re.DOTALL)
_OPEN = {"{": "}", "(": ")", "[": "]"}
_HUGE = math.inf


class _TooLarge(Exception):
    pass


def too_large(text: str) -> bool:
    """Whether the text is nested deeper than MAX_DEPTH, or holds a power or factorial of numbers that has more than
    about MAX_DIGITS digits, such as a tower of exponents.

    An estimate from above for numbers; letters count as 1, so powers of symbols are judged by their exponents alone.
    """
    try:
        _Reader(_TOKEN.findall(text)).expression("")
    except _TooLarge:
        return True
    return False


class _Reader:
    """Estimates log10 of a group's size: sums and products both as the sum of the parts' logs, which is never less."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0

    def expression(self, end: str) -> float:
        """log10 of the size of everything up to `end`, which is consumed."""
        self._deeper()
        total, last = 0.0, 0.0
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            self.at += 1
            if token == end:
                break
            if token == "^":
                last = _power(last, self._operand())
            elif token == "!":
                last = _factorial(last)
            elif token == "_":
                last += self._bounds()
            elif not token.isspace():
                total += last
                last = self._size(token)
        self.depth -= 1
        return total + last

    def _bounds(self) -> float:
        """An index, or the bounds of a sum or an integral: what stands after `^` there is no exponent."""
        size = self._operand(tower=False)
        if self.at < len(self.tokens) and self.tokens[self.at] == "^":
            self.at += 1
            size += self._operand()
        return size

    def _deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _TooLarge

    def _operand(self, *, tower: bool = True) -> float:
        while self.at < len(self.tokens) and self.tokens[self.at].isspace():
            self.at += 1
        sign = self.at < len(self.tokens) and self.tokens[self.at] in "+-"
        self.at += sign
        if self.at == len(self.tokens):
            return 0.0
        token = self.tokens[self.at]
        self.at += 1
        size = self._size(token)
        # Plain text: 9^9^9 is a tower, too.
        self._deeper()
        while tower and self.at < len(self.tokens) and self.tokens[self.at] in ("^", "!"):
            self.at += 1
            size = _power(size, self._operand()) if self.tokens[self.at - 1] == "^" else _factorial(size)
        self.depth -= 1
        return size

    def _size(self, token: str) -> float:
        if token in _OPEN:
            return self.expression(_OPEN[token])
        if token[0].isdigit():
            whole = token.partition(".")[0]
            return math.log10(int(whole[:15]) or 1) + max(len(whole) - 15, 0) if whole.isascii() else 0.0
        return 0.0


def _power(base: float, exponent: float) -> float:
    if exponent > math.log10(MAX_DIGITS) + 1 or max(base, 0.302) * 10**exponent > MAX_DIGITS:
        raise _TooLarge
    return base * 10**exponent


def _factorial(size: float) -> float:
    if size > 4:  # 10000! has 35,660 digits
        raise _TooLarge
    value = 10**size
    return max(value * (math.log10(value) - 0.43), 0.0)
