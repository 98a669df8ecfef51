"""The outer shape of an answer: a list, a set, a tuple or interval, a matrix, a name before a value, or one value."""

from __future__ import annotations

import re
from dataclasses import dataclass

from exactrl.tasks.grading.number import number_like

_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\1\}", re.DOTALL)
_OPENERS, _CLOSERS = "([{", ")]}"
_AND = re.compile(r"(?:and|or)(?![A-Za-z])")
# x, x_1, x_{12}, \theta, f(x), f^{-1}(x), \text{Area}, AB, \angle ABC, |z|, P(A \cap B)
_NAME = re.compile(
    r"(?:\\angle\s*|\\overline\s*|\\vec\s*)?(?:\\[A-Za-z]+(?:\{[^{}]*\})?|\{?[A-Za-z]{1,3}'*\}?|[A-Za-z][a-z]+)"
    r"(?:_\{?[\w, ]+\}?)?(?:\^\{?-1\}?)?\s*(?:\([^()=]*\))?"
)
_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne)(?![A-Za-z])")
_SET = re.compile(r"\\(?:cup|cap|setminus|mathbb|emptyset|backslash)(?![A-Za-z])")


@dataclass(frozen=True, slots=True)
class Many:
    """`kind` is "list" (nothing around it), "set", "()" and the like with the actual brackets, or "matrix 2x3"."""

    kind: str
    items: tuple[str, ...]


def is_set(text: str) -> bool:
    """Whether the text is a relation other than an equation, or an expression of sets: sets decide what it equals."""
    return bool(_RELATION.search(text) or _SET.search(text))


def shape(text: str) -> Many | None:
    """The parts of a cleaned answer that has parts; None for a single value, also for one with unbalanced brackets."""
    if matrix := _MATRIX.fullmatch(text):
        rows = [
            [cell.strip() for cell in row.split("&")] for row in re.split(r"\\\\", matrix[2].strip()) if row.strip()
        ]
        return Many(f"matrix {len(rows)}x{max(map(len, rows), default=0)}", tuple(cell for row in rows for cell in row))
    if number_like(text):
        return None
    if len(items := split(text, lists=True)) > 1:
        return Many("list", items)
    if text.startswith("\\{") and text.endswith("\\}"):
        return Many("set", split(text[2:-2], lists=False)) if is_balanced(text[2:-2]) else None
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and is_balanced(inner := text[1:-1]):
        items = split(inner, lists=False)
        if len(items) > 1:
            return Many(text[0] + text[-1], items)
    return None


def assignment(text: str) -> tuple[str, str]:
    """The name before `=` (or `\\in`, `\\to`), and what it names: the last side of a chain. ("", text) where no single
    name stands there. Spaces in the name are dropped."""
    sides = sides_of(text)
    if len(sides) == 1:
        found = re.match(r"\s*([A-Za-z]|\\[a-z]+)\s*\\(?:in|to)(?![A-Za-z])\s*(.+)", text, re.DOTALL)
        return (found[1], found[2].strip()) if found else ("", text)
    if not _NAME.fullmatch(sides[0]):
        return "", text
    return re.sub(r"[\s{}]", "", sides[0]), sides[-1]


def sides_of(text: str) -> list[str]:
    """The sides of an equation; the text alone where there is no `=` outside brackets."""
    return [text[a:b].strip() for a, b in _pieces(text, lambda at: 1 if text[at] == "=" else 0)]


def split(text: str, *, lists: bool) -> tuple[str, ...]:
    """The items between separators outside of all brackets: `,` and `;`, and with lists `and` and `or`."""

    def separator(at: int) -> int:
        if text[at] in ",;":
            return 1
        if lists and text[at] in "ao" and (at == 0 or not (text[at - 1].isalpha() or text[at - 1] == "\\")):
            match = _AND.match(text, at)
            return len(match[0]) if match else 0
        return 0

    if not is_balanced(text):
        return (text,)
    items = [text[a:b].strip() for a, b in _pieces(text, separator)]
    # "1, 2, and 3" has an empty item before "and"; an empty item elsewhere is a fault that stays visible.
    return tuple(item for i, item in enumerate(items) if item or not (lists and 0 < i < len(items) - 1))


def is_balanced(text: str) -> bool:
    """Every bracket closes, in any mixture: `[0,1)` is balanced."""
    depth = 0
    for at in range(len(text)):
        depth += _step(text, at)
        if depth < 0:
            return False
    return depth == 0


def _step(text: str, at: int) -> int:
    if text[at] in _OPENERS:
        return 1
    return -1 if text[at] in _CLOSERS else 0


def _pieces(text: str, separator) -> list[tuple[int, int]]:
    """(start, end) of the pieces between separators at depth 0; separator(at) is its length, 0 where there is none."""
    pieces, start, depth, at = [], 0, 0, 0
    while at < len(text):
        depth += _step(text, at)
        length = separator(at) if depth == 0 else 0
        if length:
            pieces.append((start, at))
            start = at + length
        at += length or 1
    return [*pieces, (start, len(text))]
