"""DAPO's rule for dapo-math-17k: the last `Answer:` line, compared as normalised text.

The prompts of that data set ask for a last line `Answer: $Answer`. The normal form is the one of Minerva (Lewkowycz et
al. 2022, appendix on answer normalisation) as the reference implementation of DAPO applies it: +1 or -1, and only the
last 300 characters of a response count. Its integers are all that the data set has as golds.
"""

from __future__ import annotations

import re

from exactrl.tasks.grading.outcome import DIFFERENT, EQUAL, NO_ANSWER, UNPARSEABLE_GOLD, Grade, graded

WINDOW = 300
MAX_GOLD = 2_000

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

# Steps in the order of the paper's listing; later ones see what earlier ones left.
_ARTICLES_AND_SPACES = (("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""))
_TEXT = (("mbox", "text"), (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"))
_UNITS = (  # noqa: SIM905
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm "
    "pounds meters meals edges students childrentickets multiples"
).split()
_DRESS = (
    "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}",
    "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_UNWRAP = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r".*?\$(.*?)\$.*", r"$\1$"),
        (r"\\text\{(.*?)\}", r"\1"),
        (r"\\textbf\{(.*?)\}", r"\1"),
        (r"\\overline\{(.*?)\}", r"\1"),
        (r"\\boxed\{(.*)\}", r"\1"),
        (r"frac([^{])(.)", r"frac{\1}{\2}"),
        (r"sqrt([^{])", r"sqrt{\1}"),
        (r"\$", ""),
    )
)


def dapo_grade(response: str, gold: str) -> Grade:
    """`extracted` is the normalised answer."""
    expected = normal_form(gold) if len(gold) <= MAX_GOLD else gold
    found = _ANSWER.findall(response[-WINDOW:])
    answer = normal_form(found[-1]) if found else None
    if not expected:
        return graded(answer, UNPARSEABLE_GOLD)
    if not answer:
        return graded(answer, NO_ANSWER)
    return graded(answer, EQUAL if answer == expected else DIFFERENT)


def normal_form(answer: str) -> str:
    """Minerva's normal form of an answer: what is right of the last `=`, without articles, units and LaTeX dress."""
    text = answer.rpartition("=")[2]
    for old, new in (*_ARTICLES_AND_SPACES, *_TEXT, *((removed, "") for removed in (*_UNITS, *_DRESS))):
        text = text.replace(old, new)
    for pattern, replacement in _UNWRAP:
        text = pattern.sub(replacement, text)
    digits = text.replace(",", "")
    return digits if digits.isdigit() else text.strip()
