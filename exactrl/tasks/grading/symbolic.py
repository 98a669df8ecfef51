"""Equality of formulas: math-verify reads them, exact arithmetic at many digits and points compares them.

Only worker processes import this file: nothing here limits its own time or memory.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from exactrl.tasks.grading.number import number
from exactrl.tasks.grading.outcome import DIFFERENT, EQUAL, UNPARSEABLE_GOLD, UNPARSED
from exactrl.tasks.grading.shape import sides_of

# Units and boxes are gone when a formula gets here; math-verify's own unit list would take the d of 3d for days.
_CONFIG = LatexExtractionConfig(
    boxed_match_priority=-1,
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none"
    ),
)
_PLAIN_FUNCTIONS = re.compile(
    r"(?<![A-Za-z\\])(pi|sqrt|exp|sin|cos|tan|cot|sec|csc|log|ln|arcsin|arccos|arctan|sinh|cosh|tanh|theta|infty)(?![A-Za-z])"
)
# The parser reads capitals as small letters; R - r must not be 0. A capital alone becomes a small letter with an index.
_CAPITAL = re.compile(
    r"\\(?:math(?:bb|cal|frak|scr)|text|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+|(?<![A-Za-z])([A-Z])(?![A-Za-z_(']|\^\{?[A-Z'])"
)
# Where formulas with free symbols are compared: both signs, no special values.
_POINTS = tuple(
    sympy.Rational(a, b) for a, b in ((37, 29), (-41, 31), (113, 47), (-61, 83), (19, 71), (-211, 67), (307, 101))
)
_MIN_REAL_POINTS = 2
_DIGITS = 15
_MAX_DIGITS = 100


class Unreadable(ValueError):
    """math-verify finds no formula in the text."""


def symbolic(kind: str, answer: str, gold: str) -> str:
    """compare.Symbolic: two values, two equations, or two sets or relations."""
    read = _read_equation if kind == "equation" else _read
    try:
        g = read(gold)
    except Unreadable:
        return UNPARSEABLE_GOLD
    try:
        a = read(answer)
    except Unreadable:
        return UNPARSED
    same = {"value": _same_value, "equation": _proportional, "set": _same_set}[kind]
    if same(a, g) or (kind == "value" and _rounded(answer, gold, a, g)):
        return EQUAL
    return DIFFERENT


def _rounded(answer: str, gold: str, a: Any, g: Any) -> bool:
    """Whether one side is a decimal that stands for the other one: 3.141593 for pi (number.py has the rule)."""
    ulp = max((found.ulp for found in (number(answer), number(gold)) if found), default=0)
    if not ulp or not _is_number(a - g):
        return False
    difference = (a - g).evalf(_DIGITS, maxn=_MAX_DIGITS)
    return bool(difference.is_real and abs(difference) < sympy.Rational(ulp.numerator, ulp.denominator))


@lru_cache(maxsize=256)  # one gold meets many answers
def _read(text: str) -> Any:
    latex = _PLAIN_FUNCTIONS.sub(r"\\\1", text)
    latex = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", latex)
    latex = _CAPITAL.sub(lambda match: f"{{{match[1].lower()}_{{90}}}}" if match[1] else match[0], _mixed_to_sum(latex))
    try:
        found = parse(f"${latex}$", [_CONFIG], fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True)
    except RecursionError as error:
        raise Unreadable(text) from error
    except MemoryError:
        raise
    except Exception as error:  # ANTLR and sympy raise whatever a malformed formula leads them to
        raise Unreadable(text) from error
    if len(found) != 1:
        raise Unreadable(text)
    return _exact(found[0])


def _mixed_to_sum(latex: str) -> str:
    """`3\\frac{1}{4}` within a larger formula is 3 + 1/4, as it is alone."""
    pattern = r"(?<![\d.^}])(\d+)\s*(\\frac\{(\d+)\}\{(\d+)\})"

    def change(match: re.Match[str]) -> str:
        proper = int(match[3]) < int(match[4])
        return f"({match[1]}+{match[2]})" if proper else match[0]

    return re.sub(pattern, change, latex)


def _read_equation(text: str) -> Any:
    left, right = sides_of(text)
    return _read(left) - _read(right)


def _exact(expr: Any) -> Any:
    """Decimals as the fractions that they spell; a bare i among numbers as the imaginary unit."""
    if not isinstance(expr, sympy.Basic):
        return expr
    exact = {f: sympy.Rational(str(f)) for f in expr.atoms(sympy.Float)}
    if {s.name for s in expr.free_symbols if isinstance(s, sympy.Symbol)} == {"i"}:
        exact |= {s: sympy.I for s in expr.free_symbols}
    expr = expr.xreplace(exact)
    return expr.doit() if expr.has(sympy.Limit, sympy.Derivative) else expr


def _same_value(a: Any, g: Any) -> bool:
    if not (isinstance(a, sympy.Expr) and isinstance(g, sympy.Expr)):
        return bool(type(a) is type(g) and a == g) or _verified(a, g)
    names = sorted({s.name for s in a.free_symbols | g.free_symbols})
    if {s.name for s in a.free_symbols} != {s.name for s in g.free_symbols} and not _vanish(a, g):
        return False
    if a.atoms(sympy.core.function.AppliedUndef) | g.atoms(sympy.core.function.AppliedUndef):
        return bool(a == g) or _verified(a, g)
    if not names:
        return _is_zero(a - g)
    real, complex_ = 0, 0
    for x, y in (_at_point(a, g, names, shift) for shift in range(len(_POINTS))):
        if not (_is_number(x) and _is_number(y)):
            continue
        complex_ += 1
        if not (_is_real(x) and _is_real(y)):
            continue  # branches of roots and logarithms: equal where both are real is equal
        real += 1
        if not _is_zero(x - y):
            return False
    return real >= _MIN_REAL_POINTS or (complex_ > 0 and _verified(a, g))


def _vanish(a: Any, g: Any) -> bool:
    """Whether symbols that only one side has may cancel there: x - x + 3 is 3."""
    return sympy.simplify(a).free_symbols == sympy.simplify(g).free_symbols


def _at_point(a: Any, g: Any, names: list[str], shift: int) -> tuple[Any, Any]:
    """Both at one point; symbols are matched by name, since their assumptions depend on the formula around them."""
    values = {name: _POINTS[(shift + i) % len(_POINTS)] + i for i, name in enumerate(names)}
    x, y = (e.subs({s: values[s.name] for s in e.free_symbols}) for e in (a, g))
    return x, y


def _is_number(value: Any) -> bool:
    try:
        number = value.evalf(_DIGITS, maxn=_MAX_DIGITS)
    except (ValueError, TypeError, ArithmeticError, NotImplementedError):
        return False
    return bool(number.is_number and number.is_finite is not False and not number.has(sympy.nan, sympy.zoo))


def _is_real(value: Any) -> bool:
    return _is_zero(sympy.im(value.evalf(_DIGITS, maxn=_MAX_DIGITS)))


def _is_zero(value: Any) -> bool:
    """Exact for rational numbers; for others zero to _MAX_DIGITS digits: evalf raises its precision until a digit of
    the value is known, so that a small difference is not taken for none."""
    if value.is_Rational:
        return bool(value == 0)
    try:
        number = value.evalf(2, maxn=_MAX_DIGITS)
    except (ValueError, TypeError, ArithmeticError, NotImplementedError):
        return bool(sympy.simplify(value) == 0)
    if not number.is_number or number.has(sympy.nan, sympy.zoo):
        return False
    return all(part == 0 or getattr(part, "_prec", 2) == 1 for part in number.as_real_imag())


def _proportional(a: Any, g: Any) -> bool:
    """Whether two equations, each as left minus right side, are the same up to a constant factor other than 0."""
    names = sorted({s.name for s in a.free_symbols})
    if names != sorted({s.name for s in g.free_symbols}):
        return False
    ratios = []
    for shift in range(len(_POINTS)):
        x, y = _at_point(a, g, names, shift)
        if _is_number(x) and _is_number(y) and not _is_zero(x) and not _is_zero(y):
            ratios.append(x / y)
    return len(ratios) >= _MIN_REAL_POINTS and all(_is_zero(ratio - ratios[0]) for ratio in ratios)


def _same_set(a: Any, g: Any) -> bool:
    """Relations and sets as sets of numbers. Two relations must be about the same symbols."""
    a_symbols, g_symbols = ({s.name for s in getattr(e, "free_symbols", ())} for e in (a, g))
    if a_symbols and g_symbols and a_symbols != g_symbols:
        return False
    if len(a_symbols | g_symbols) > 1:
        return _verified(a, g)
    a_set, g_set = _as_set(a), _as_set(g)
    if a_set is None or g_set is None:
        return _verified(a, g)
    return _equal_sets(a_set, g_set)


def _as_set(expr: Any) -> Any:
    if isinstance(expr, sympy.Set):
        if expr.args and isinstance(expr, sympy.FiniteSet) and all(_is_relation(e) for e in expr.args):
            return sympy.Union(*(_as_set(e) for e in expr.args))  # "x<1 or x>2"
        return expr
    if not _is_relation(expr):
        return None
    try:
        return sympy.And(*getattr(expr, "_unsorted_args", (expr,)), evaluate=True).as_set()
    except (ValueError, TypeError, NotImplementedError, AttributeError):
        return None


def _is_relation(expr: Any) -> bool:
    return isinstance(expr, sympy.core.relational.Relational | sympy.And)


def _equal_sets(a: Any, g: Any) -> bool:
    if isinstance(a, sympy.Interval) and isinstance(g, sympy.Interval):
        return (a.left_open, a.right_open) == (g.left_open, g.right_open) and all(
            x == y or (x.is_finite and y.is_finite and _is_zero(x - y)) for x, y in ((a.start, g.start), (a.end, g.end))
        )
    try:
        return bool(a == g) or a.symmetric_difference(g).is_empty is True
    except (ValueError, TypeError, NotImplementedError, AttributeError):
        return False


def _verified(a: Any, g: Any) -> bool:
    """math-verify's own verdict, for what has no value at a point: matrices, undefined functions, several symbols."""
    return bool(verify(g, a, strict=True, allow_set_relation_comp=True, timeout_seconds=None))
