from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactrl.errors import DataError
from exactrl.tasks import arithmetic
from exactrl.tasks.data import load_prompts
from exactrl.types import Prompt, Sample

operands = st.tuples(*[st.integers(arithmetic.SMALLEST, arithmetic.LARGEST)] * arithmetic.NUM_OPERANDS)


def reward(text: str | None, label: str = "189", finish_reason: str = "stop") -> float:
    sample = Sample("p", 0, (), [], np.zeros(0, np.float32), finish_reason, 0, 1.0, text=text)
    return arithmetic.reward(Prompt("p", "", (1,), label), sample)


def test_worked_example():
    assert arithmetic.prompt_text((38, 57, 94)) == "Add the numbers column by column.\n38+57+94\n"
    assert arithmetic.solution_text((38, 57, 94)) == "8+7+4=19\n1+3+5+9=18\nAnswer: 189"
    assert arithmetic.label((38, 57, 94)) == "189"


@given(operands)
def test_solution_is_right_and_a_wrong_carry_is_wrong(numbers):
    label = arithmetic.label(numbers)
    assert reward(arithmetic.solution_text(numbers), label) == 1.0
    for carry in range(3):
        right = carry == sum(n % 10 for n in numbers) // 10
        assert reward(arithmetic.solution_text(numbers, carry=carry), label) == float(right)


@pytest.mark.parametrize("text", ["Answer: 189", "\nAnswer: 189", "Answer: 7\nAnswer: 189", "1+\x00\nAnswer: 189"])
def test_last_line_counts(text):
    assert reward(text) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "189",
        "Answer: 188",
        "answer: 189",
        "Answer:189",
        "Answer:  189",
        "Answer: 189 ",
        "Answer: 189\n",
        "Answer: 189\r",
        " Answer: 189",
        "Answer: +189",
        "Answer: 0189",
        "Answer: 189.0",
        "Answer: 1,89",
        "Answer: 189<|im_end|>",
        "Answer: 18<|unk|>9",
        "Answer: 189\nAnswer: 7",
        "Answer: NaN",
        "Answer: inf",
        "Answer: 1e2",
        "Answer: \u0661\u0668\u0669",
        "Answer: \uff11\uff18\uff19",
        "Answer: 189\u2028",
        "\u2028Answer: 189",
        "Answer: " + "9" * 100_000,
        "Answer: 189" * 1000,
        "\ud800",
    ],
)
def test_everything_else_is_wrong(text):
    assert reward(text) == 0.0


def test_truncated_response_is_wrong_even_with_a_right_number():
    assert reward("8+7+4=19\n1+3+", finish_reason="length") == 0.0
    assert reward("Answer: 189", finish_reason="length") == 0.0


@given(st.text())
def test_any_text_gets_zero_or_one(text):
    assert reward(text) in (0.0, 1.0)


@pytest.mark.parametrize("label", ["", "abc", "007", "-1", "1.5", "\u0661"])
def test_impossible_label_is_an_error(label):
    with pytest.raises(DataError, match=r"'p'.*not a plain non-negative integer"):
        reward("Answer: 1", label=label)


def test_problems_depend_on_the_arguments_only():
    assert arithmetic.problems(50, seed=3, heldout=False) == arithmetic.problems(50, seed=3, heldout=False)
    assert arithmetic.problems(50, seed=3, heldout=False) != arithmetic.problems(50, seed=4, heldout=False)
    with pytest.raises(ValueError, match="at most"):
        arithmetic.problems(1_000_000, seed=0, heldout=True)


@given(operands)
def test_permutations_are_in_the_same_part(numbers):
    assert len({arithmetic.is_heldout(p) for p in itertools.permutations(numbers)}) == 1


@given(st.integers(0, 2**31), st.integers(0, 2**31))
def test_parts_are_disjoint_whatever_the_seeds(seed, other):
    train = {tuple(sorted(p)) for p in arithmetic.problems(40, seed=seed, heldout=False)}
    heldout = {tuple(sorted(p)) for p in arithmetic.problems(40, seed=other, heldout=True)}
    assert len(train) == len(heldout) == 40
    assert not train & heldout


def test_limits_of_problems_hold():
    """The documented limits leave at least half of each part undrawn."""
    numbers = range(arithmetic.SMALLEST, arithmetic.LARGEST + 1)
    parts = [arithmetic.is_heldout(p) for p in itertools.combinations_with_replacement(numbers, 3)]
    assert sum(parts) >= 2 * 7_000
    assert len(parts) - sum(parts) >= 2 * 50_000


def test_bundled_files(tokenizer):
    parts = {}
    for part in ("train", "heldout"):
        prompts = load_prompts(f"bundled:arithmetic/{part}.jsonl", tokenizer, id_key="id").prompts
        problems = [tuple(map(int, p.text.splitlines()[1].split("+"))) for p in prompts]
        assert all(arithmetic.prompt_text(n) == p.text for n, p in zip(problems, prompts, strict=True))
        assert all(arithmetic.label(n) == p.label for n, p in zip(problems, prompts, strict=True))
        assert all(arithmetic.is_heldout(n) == (part == "heldout") for n in problems)
        parts[part] = {tuple(sorted(n)) for n in problems}
        assert len(parts[part]) == len(prompts)
    assert len(parts["train"]) >= 1024
    assert len(parts["heldout"]) >= 200
    assert not parts["train"] & parts["heldout"]


def test_prompts_share_two_cache_blocks(tokenizer):
    ids = [tokenizer.encode(arithmetic.prompt_text(n)) for n in ((10, 10, 10), (99, 98, 97))]
    assert ids[0][:32] == ids[1][:32]
