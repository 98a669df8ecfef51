"""Whether two answers are the same: shapes first, then exact numbers; formulas go to `symbolic` where it is given."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from exactrl.tasks.grading import words
from exactrl.tasks.grading.clean import clean, key
from exactrl.tasks.grading.extract import unboxed
from exactrl.tasks.grading.number import Improper, number, same_number
from exactrl.tasks.grading.outcome import DIFFERENT, EQUAL, TOO_LARGE, UNPARSEABLE_GOLD, UNPARSED
from exactrl.tasks.grading.shape import Many, assignment, is_balanced, is_set, shape, sides_of
from exactrl.tasks.grading.size import too_large

# Longer answers are compared as text only.
MAX_ANSWER = 2_000
MAX_COMPARISONS = 1_000

# symbolic("value" | "equation" | "set", answer, gold) -> a word of outcome.py
Symbolic = Callable[[str, str, str], str]
_BASE = re.compile(r"(-?[0-9A-Za-z]+)_\{?(?:\\text\{)?(\d+)\}*", re.ASCII)


class Undecided(Exception):
    """Raised by `needs_symbolic`: the pair needs a computer algebra system."""


def needs_symbolic(kind: str, answer: str, gold: str) -> str:
    raise Undecided


def compare(answer: str, gold: str, symbolic: Symbolic = needs_symbolic) -> str:
    """A word of outcome.py: "equal", "different", "unparsed", "unparseable_gold" or "too_large".

    Pure: depends on the two texts alone. Raises Undecided where only `symbolic` could tell and none was given.
    """
    answer, gold = unboxed(answer), unboxed(gold)
    if not gold:
        return UNPARSEABLE_GOLD
    if not answer:
        return UNPARSED
    if answer == gold:
        return EQUAL
    if max(len(answer), len(gold)) > MAX_ANSWER:
        return EQUAL if key(answer) == key(gold) else TOO_LARGE
    a, g = clean(answer), clean(gold)
    if not g:
        return UNPARSEABLE_GOLD
    if not a:
        return UNPARSED
    if key(a) == key(g):
        return EQUAL
    if too_large(a) or too_large(g):
        return TOO_LARGE
    try:
        return _whole(a, g, _Judge(symbolic))
    except _TooMany:
        return TOO_LARGE


class _TooMany(Exception):
    pass


@dataclass(slots=True)
class _Judge:
    """`left`: how many more items may be compared; sets of sets would otherwise take time without bound."""

    symbolic: Symbolic
    left: int = MAX_COMPARISONS

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise _TooMany


def _whole(a: str, g: str, judge: _Judge) -> str:
    letter = words.choice(g)
    if letter is not None and words.choice(a) is not None:
        return EQUAL if words.choice(a) == letter else DIFFERENT
    if letter is None and (rest := words.without_choice(a)):
        a = rest
    return _items(a, g, judge)


def _items(a: str, g: str, judge: _Judge) -> str:
    """Two answers or two items of answers."""
    judge.spend()
    if key(a) == key(g):
        return EQUAL
    a_shape, g_shape = shape(_plus_minus(a)), shape(_plus_minus(g))
    if "list" not in (_kind(a_shape), _kind(g_shape)):
        equation = _equations(a, g, judge)
        if equation:
            return equation
        (a_name, a), (g_name, g) = _named(a, g), assignment(g)
        if a_name and g_name and a_name != g_name and not _same_function(a_name, g_name):
            return DIFFERENT
        if (len(sides_of(a)) > 1) != (len(sides_of(g)) > 1):
            return DIFFERENT
        if key(a) == key(g):
            return EQUAL
        a_shape, g_shape = shape(_plus_minus(a)), shape(_plus_minus(g))
    if is_set(a) or is_set(g):
        return judge.symbolic("set", a, g)
    if a_shape is None and g_shape is None:
        return _value(a, g, judge)
    if a_shape is None or g_shape is None:
        return _one_and_many(a, g, a_shape, g_shape, judge)
    return _many(a_shape, g_shape, judge)


def _kind(found: Many | None) -> str:
    return found.kind if found else ""


def _equations(a: str, g: str, judge: _Judge) -> str:
    """The verdict where both are equations and at least one is more than a name and its value; "" otherwise."""
    a_sides, g_sides = sides_of(a), sides_of(g)
    if len(a_sides) != 2 or len(g_sides) != 2 or is_set(a) or is_set(g) or shape(a_sides[1]) or shape(g_sides[1]):
        return ""
    if assignment(a)[0] and assignment(g)[0]:
        return ""
    return judge.symbolic("equation", a, g)


def _named(a: str, g: str) -> tuple[str, str]:
    """The answer's name and value. Where the gold is no equation, the last side of any equation is its value, unless
    that says nothing: `2x-3y+5=0` is no way to answer 0."""
    name, value = assignment(a)
    sides = sides_of(a)
    if not name and len(sides) > 1 and len(sides_of(g)) == 1 and sides[-1] not in ("0", ""):
        return "", sides[-1]
    return name, value


def _same_function(a: str, b: str) -> bool:
    """`f` and `f(x)`, `Area` and `area` name the same thing."""
    a, b = (re.sub(r"\\text|\(.*\)", "", name) for name in (a, b))
    return a == b or (min(len(a), len(b)) > 3 and a.lower() == b.lower())


def _one_and_many(a: str, g: str, a_shape: Many | None, g_shape: Many | None, judge: _Judge) -> str:
    """A set or a bracket of one item is that item; any other number of items is another answer."""
    (many, one) = (a_shape, g) if a_shape else (g_shape, a)
    assert many is not None
    if many.kind == "set" and len(many.items) == 1:
        return _items(many.items[0], g, judge) if a_shape else _items(a, many.items[0], judge)
    if _unreadable(one):
        return UNPARSEABLE_GOLD if a_shape else UNPARSED
    return DIFFERENT


def _unreadable(text: str) -> bool:
    return not is_balanced(text)


def _many(a: Many, g: Many, judge: _Judge) -> str:
    if len(a.items) != len(g.items):
        return DIFFERENT
    kinds = {a.kind, g.kind}
    if kinds <= {"list", "set"} and not _in_order(a, g):
        return _unordered(a.items, g.items, judge)
    if len(kinds) == 1 or kinds in ({"list", "()"}, {"list", "set"}):
        verdicts = [_items(x, y, judge) for x, y in zip(a.items, g.items, strict=True)]
        return next((verdict for verdict in verdicts if verdict != EQUAL), EQUAL)
    return DIFFERENT


def _in_order(a: Many, g: Many) -> bool:
    """Bare lists have no order unless something tells the items apart: dots, words, or names on one side only."""
    if any("\\ldots" in item for item in (*a.items, *g.items)):
        return True
    if any(words.split_unit(item)[1] for item in (*a.items, *g.items)):
        return (
            len({words.split_unit(item)[1] for item in a.items}) > 1
            or len({words.split_unit(item)[1] for item in g.items}) > 1
        )
    a_names, g_names = ({assignment(item)[0] for item in many.items} - {""} for many in (a, g))
    return len(a_names | g_names) > 1 and not (a_names and g_names)


def _unordered(a: tuple[str, ...], g: tuple[str, ...], judge: _Judge) -> str:
    """Each item of one side finds its own on the other; those that are spelled alike first."""
    left, missing = list(map(key, a)), []
    spelled = dict(zip(left, a, strict=True))
    for item in g:
        if key(item) in left:
            left.remove(key(item))
        else:
            missing.append(item)
    for item in missing:
        verdicts = []
        for candidate in left:
            verdicts.append(_items(spelled[candidate], item, judge))
            if verdicts[-1] == EQUAL:
                left.remove(candidate)
                break
        else:
            return next((verdict for verdict in verdicts if verdict != DIFFERENT), DIFFERENT)
    return EQUAL


def _plus_minus(text: str) -> str:
    """`1 \\pm x` as the list of both values; a text with more than one \\pm or with several items stays as it is."""
    if text.count("\\pm") != 1 or shape(text):
        return text
    plus, minus = (re.sub(r"\\pm\s*", sign, text) for sign in ("+", "-"))
    return f"{plus}, {minus}".replace("=+", "=").removeprefix("+")


def _value(a: str, g: str, judge: _Judge) -> str:
    """Two single values: in a base, in words, with a unit, numbers, or formulas."""
    a_base, g_base = _BASE.fullmatch(a), _BASE.fullmatch(g)
    if a_base and g_base:
        return EQUAL if _in_base(a_base) == _in_base(g_base) else DIFFERENT
    if (same := words.same_words(a, g)) is not None:
        return EQUAL if same else DIFFERENT
    if len(a) == len(g) == 1 and a.isalpha() and g.isalpha():
        return DIFFERENT  # two letters in another case, too; equal ones never get here
    (a, a_unit), (g, g_unit) = words.split_unit(a), words.split_unit(g)
    if words.units_differ(a_unit, g_unit):
        return DIFFERENT
    if (a_unit or g_unit) and key(a) == key(g):
        return EQUAL
    try:
        a_number = number(a)
    except Improper:
        return UNPARSED
    try:
        g_number = number(g)
    except Improper:
        return UNPARSEABLE_GOLD
    if a_number and g_number:
        return EQUAL if same_number(a_number, g_number) else DIFFERENT
    if (a_base and g_number) or (g_base and a_number):
        return DIFFERENT
    return judge.symbolic("value", a, g)


def _in_base(match: re.Match[str]) -> tuple[str, str] | int:
    digits, base = match[1], match[2]
    try:
        return int(digits, int(base))
    except ValueError:  # x_2, or a base that Python does not read: the same only if spelled the same
        return digits, base
