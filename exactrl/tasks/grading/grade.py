"""Grades of responses: by the rules of "math" or of "dapo"."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from exactrl.tasks.grading.compare import Undecided, compare
from exactrl.tasks.grading.dapo import dapo_grade
from exactrl.tasks.grading.extract import extract_answer
from exactrl.tasks.grading.gold import gold_answer
from exactrl.tasks.grading.outcome import NO_ANSWER, UNPARSEABLE_GOLD, Grade, graded
from exactrl.tasks.grading.pool import Pool, shared_pool

Pair = tuple[str, str]

# The reward of (a correct response, any other one).
SCORES: dict[str, tuple[float, float]] = {"math": (1.0, 0.0), "dapo": (1.0, -1.0)}


def grade_many(
    pairs: Sequence[Pair], timeout_s: float = 5.0, *, rules: str = "math", pool: Pool | None = None
) -> list[Grade]:
    """A grade for each (response, gold), in order. Pure: a grade depends on its own pair and the limits alone.

    From any thread. timeout_s is the limit of one pair, in seconds, and is spent only where formulas have to be
    compared: everything else is decided here in well under a millisecond.
    """
    if rules == "dapo":
        return [dapo_grade(response, gold) for response, gold in pairs]
    if rules != "math":
        raise ValueError(f"no rules {rules!r}; there are {', '.join(SCORES)}")
    grades: list[Grade | None] = []
    undecided: list[tuple[int, str, str]] = []
    for index, (response, gold) in enumerate(pairs):
        answer, gold = extract_answer(response), gold_answer(gold)
        grades.append(_without_formulas(answer, gold))
        if grades[-1] is None:
            assert answer is not None
            undecided.append((index, answer, gold))
    distinct = list(dict.fromkeys((answer, gold) for _, answer, gold in undecided))
    reasons = (
        dict(zip(distinct, (pool or shared_pool()).compare_many(distinct, timeout_s), strict=True)) if distinct else {}
    )
    for index, answer, gold in undecided:
        grades[index] = graded(answer, reasons[answer, gold])
    return [grade for grade in grades if grade is not None]


def grade(response: str, gold: str, timeout_s: float = 5.0, *, rules: str = "math") -> Grade:
    return grade_many([(response, gold)], timeout_s, rules=rules)[0]


async def grade_async(response: str, gold: str, timeout_s: float = 5.0, *, rules: str = "math") -> Grade:
    """`grade` without blocking the event loop."""
    return await asyncio.to_thread(grade, response, gold, timeout_s, rules=rules)


def _without_formulas(answer: str | None, gold: str) -> Grade | None:
    if not gold:
        return graded(answer, UNPARSEABLE_GOLD)
    if answer is None or not answer.strip():
        return graded(answer, NO_ANSWER)
    try:
        return graded(answer, compare(answer, gold))
    except Undecided:
        return None
