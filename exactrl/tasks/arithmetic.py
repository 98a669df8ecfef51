"""The bundled arithmetic task: add three two-digit numbers column by column, then answer.

A prompt (two lines, each with its newline) and behind it the worked solution:

    Add the numbers column by column.
    38+57+94
    8+7+4=19
    1+3+5+9=18
    Answer: 189

First the ones, then the carry and the tens; the answer is the second sum followed by the last digit of the first.
Problems are split into training and held-out by a hash of their sorted operands, so no held-out problem, nor one of
its permutations, can be drawn for training, whatever the seed.
"""

from __future__ import annotations

import hashlib
import random
import re

from exactrl.errors import DataError
from exactrl.types import Prompt, Sample

# All prompts begin with this line; at one token per character it fills two 16-token blocks of a prefix cache.
INSTRUCTION = "Add the numbers column by column.\n"
NUM_OPERANDS = 3
SMALLEST, LARGEST = 10, 99
HELDOUT_FRACTION = 1 / 8

Operands = tuple[int, ...]

_ANSWER = re.compile(r"Answer: (0|[1-9][0-9]*)")
_LABEL = re.compile(r"0|[1-9][0-9]*")


def is_heldout(operands: Operands) -> bool:
    """Whether a problem belongs to the held-out part. The order of its operands does not matter."""
    key = "+".join(str(n) for n in sorted(operands)).encode()
    return hashlib.blake2b(key, digest_size=1).digest()[0] < 256 * HELDOUT_FRACTION


def problems(count: int, *, seed: int, heldout: bool) -> list[Operands]:
    """`count` distinct problems of one part, a pure function of the arguments. Distinct means up to permutation.

    Raises ValueError when count is more than half of what the part holds (it would be drawn too slowly).
    """
    limit = 7_000 if heldout else 50_000
    if count > limit:
        raise ValueError(f"at most {limit} problems can be drawn from this part, not {count}")
    rng = random.Random(seed)
    drawn: dict[Operands, Operands] = {}
    while len(drawn) < count:
        operands = tuple(rng.randint(SMALLEST, LARGEST) for _ in range(NUM_OPERANDS))
        if is_heldout(operands) == heldout:
            drawn.setdefault(tuple(sorted(operands)), operands)
    return list(drawn.values())


def prompt_text(operands: Operands) -> str:
    return f"{INSTRUCTION}{'+'.join(map(str, operands))}\n"


def label(operands: Operands) -> str:
    return str(sum(operands))


def solution_text(operands: Operands, *, carry: int | None = None) -> str:
    """The worked solution, without a stop token. Another `carry` than the right one gives a consistent mistake."""
    ones = sum(n % 10 for n in operands)
    carry = ones // 10 if carry is None else carry
    tens = carry + sum(n // 10 for n in operands)
    first = "+".join(str(n % 10) for n in operands)
    second = "+".join(str(n // 10) for n in operands)
    return f"{first}={ones}\n{carry}+{second}={tens}\nAnswer: {tens}{ones % 10}"


def reward(prompt: Prompt, sample: Sample) -> float:
    """1.0 if the response ended by itself and its last line is exactly `Answer: N` with N the label, else 0.0.

    Nothing is parsed as a number: N must be ASCII digits without sign, spaces or leading zeros and equal to the label
    as a string, so digit strings of any length, other scripts' digits, `NaN` and garbage are merely wrong. A response
    cut off by the token limit gets 0 even where the cut falls behind a right number: its last line is not known to be
    complete. The worked steps are not graded.
    Raises DataError when the label itself is no such number, since then no response could ever be right.
    """
    if not _LABEL.fullmatch(prompt.label):
        raise DataError(
            f"prompt {prompt.id!r}: label {prompt.label!r} is not a plain non-negative integer; the 'arithmetic' "
            "reward needs one (name another reward in [reward] for other labels)"
        )
    if sample.finish_reason != "stop" or sample.text is None:
        return 0.0
    match = _ANSWER.fullmatch(sample.text.rpartition("\n")[2])
    return 1.0 if match is not None and match[1] == prompt.label else 0.0
