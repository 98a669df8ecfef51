"""The answer in a response: the last box after the thinking. Linear in the length of the response."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\(?:boxed|fbox)\s*[\w.+-]+|\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$]|\\[()])*(?:,|;|and|or|,\s*(?:and|or)|\\text\s*\{\s*(?:and|or)\s*\})(?:[\s$]|\\[()])*"
)
_MAX_BETWEEN = 30
_BARE = re.compile(r"\\(?:boxed|fbox)\s*([\w.+-]+)", re.ASCII)

Span = tuple[int, int, str]


def extract_answer(response: str) -> str | None:
    """The content of the last \\boxed{} or \\fbox{} with balanced braces; None where there is none.

    Only text after the last `</think>` counts; text after a `<think>` that nothing closes does not count. Boxes that
    only a comma, `and` or `or` separates from the last one belong to it: the answer is then the list of all of them.
    """
    text = response.rpartition("</think>")[2]
    text = text.partition("<think>")[0]
    if not (spans := boxes(text)):
        return None
    first = len(spans) - 1
    while first > 0 and _joined(text, spans[first - 1], spans[first]):
        first -= 1
    return ", ".join(unboxed(content) for _, _, content in spans[first:])


def boxes(text: str) -> list[Span]:
    """(start, end, content) of every outermost complete box, in order; a box that is never closed is no box."""
    if "boxed" not in text and "fbox" not in text:
        return []
    found: list[Span] = []
    opened: list[tuple[int, int] | None] = []  # (start of the command, start of the content), None for a plain brace
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token == "{":
            opened.append(None)
        elif token == "}":
            if opened and (box := opened.pop()):
                while found and found[-1][0] > box[0]:
                    found.pop()
                found.append((box[0], match.end(), text[box[1] : match.start()]))
        elif token.startswith(("\\boxed", "\\fbox")):
            if token.endswith("{"):
                opened.append((match.start(), match.end()))
            elif bare := _BARE.fullmatch(token):
                found.append((match.start(), match.end(), bare[1].rstrip(".")))
    return found


def unboxed(text: str) -> str:
    """The text without a box around all of it, or boxes inside one another."""
    text = text.strip()
    while (spans := boxes(text)) and spans[-1][:2] == (0, len(text)):
        text = spans[-1][2].strip()
    return text


def _joined(text: str, left: Span, right: Span) -> bool:
    between = text[left[1] : right[0]]
    return len(between) <= _MAX_BETWEEN and _BETWEEN_BOXES.fullmatch(between) is not None
