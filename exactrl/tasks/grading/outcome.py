"""What a grader says about one response."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

EQUAL = "equal"
DIFFERENT = "different"
NO_ANSWER = "no_answer"
UNPARSED = "unparsed"
UNPARSEABLE_GOLD = "unparseable_gold"
TOO_LARGE = "too_large"
TIMEOUT = "timeout"
OUT_OF_MEMORY = "out_of_memory"
CRASHED = "crashed"

# The words of `Grade.reason`, each with the count that it goes into. Only "different" is a wrong answer for certain;
# the words below it say why there is no verdict.
COUNT_OF = {
    EQUAL: "correct",
    DIFFERENT: "wrong",
    NO_ANSWER: "no_answer",
    UNPARSED: "unparsed",
    UNPARSEABLE_GOLD: "unparsed",
    TOO_LARGE: "timeout",
    TIMEOUT: "timeout",
    OUT_OF_MEMORY: "timeout",
    CRASHED: "timeout",
}


@dataclass(frozen=True, slots=True)
class Grade:
    """`extracted` is the answer as it was found in the response, None where none was found; `reason` is a key of
    COUNT_OF, and "equal" exactly when `correct`."""

    correct: bool
    extracted: str | None
    reason: str


def graded(extracted: str | None, reason: str) -> Grade:
    return Grade(reason == EQUAL, extracted, reason)


def count(reasons: Iterable[str]) -> dict[str, int]:
    """How many of each kind, all kinds present: correct, wrong, no_answer, unparsed, timeout (any limit reached)."""
    found = Counter(COUNT_OF[reason] for reason in reasons)
    return {kind: found[kind] for kind in dict.fromkeys(COUNT_OF.values())}
