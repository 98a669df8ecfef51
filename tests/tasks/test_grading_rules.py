"""Rules of extraction and comparison beyond the cases: docs/rewards.md, line by line."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exactrl.tasks.grading.compare import Undecided, compare
from exactrl.tasks.grading.dapo import dapo_grade, normal_form
from exactrl.tasks.grading.extract import extract_answer
from exactrl.tasks.grading.gold import gold_answer, gold_text
from exactrl.tasks.grading.grade import grade, grade_many
from exactrl.tasks.grading.outcome import COUNT_OF, count
from exactrl.tasks.grading.size import too_large

EQUAL = [
    ("1/2", "0.5"), (r"\frac12", "0.5"), (".5", r"\frac{1}{2}"), ("1,234", "1234"), (r"12\,345", "12345"),
    ("12{,}345", "12,345"), (r"-\frac{1}{2}", r"\frac{-1}{2}"), ("10.", "10"), ("+7", "7"), (r"1\frac12", "1.5"),
    (r"0.\overline{3}", r"\frac{1}{3}"), (r"0.1\overline{6}", "1/6"), ("10^{50}", "1" + "0" * 50),
    (r"50\%", r"\frac12"),
    (r"\$1,250.00", "1250"), ("€5", "5"), (r"36\text{ cm}^2", "36"), ("36 cm^2", "36"),
    ("5 miles", r"5 \text{ miles}"),
    (r"30^\circ", "30"), ("30 degrees", r"30^{\circ}"), (r"5 \text{ m/s}", "5"), (r"\sin(30^\circ)", r"\frac12"),
    ("3.14159", r"\pi"), ("3.141592", r"\pi"), ("1.414214", r"\sqrt{2}"), (r"\sqrt[3]{8}", "2"),
    (r"3\sqrt2", r"\sqrt{18}"),
    (r"x=1 \text{ or } x=2", "1, 2"), ("x=2, x=1", "x=1, x=2"), ("y=2,x=1", "x=1,y=2"), ("1,2", "x=1,y=2"),
    ("1,2", "(1,2)"), (r"\{1,2\}", "2,1"), ("[0, 1/2]", "[0,0.5]"), ("(1,2),(3,4)", "(3,4),(1,2)"), (r"\{3\}", "3"),
    (r"2, 3, \text{and } 5", "5,3,2"), (r"1 \pm \sqrt{2}", r"1+\sqrt{2}, 1-\sqrt{2}"), (r"x = \pm 3", "3,-3"),
    ("(B)", "B"), (r"\textbf{(B)}\ 12", "B"), (r"\text{(B) } 12", "12"), (r"\text{even}", "Even"),
    (r"\text{Yes}", "yes"),
    (r"\begin{pmatrix}1/2&2\\3&4\end{pmatrix}", r"\begin{bmatrix}\frac12 & 2 \\ 3 & 4\end{bmatrix}"),
    ("x^2+2x+1", "(x+1)^2"), (r"\sqrt{x^2}", "|x|"), (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
    ("2^{n+1}", r"2\cdot 2^n"),
    (r"\ln(x^2)", r"2\ln x"), (r"\log_2 8", "3"), (r"e^{i\pi}", "-1"), ("1+2i", "2i+1"), ("R-r", "-r+R"),
    (r"\lim_{x\to 0}\frac{\sin x}{x}", "1"), (r"\int_0^1 x^2 dx", r"\frac13"), (r"\sum_{k=1}^{100}k", "5050"),
    (r"x \in (0,1)", "0<x<1"), (r"x \geq 3", r"[3,\infty)"), (r"x<1 \text{ or } x>2", r"(-\infty,1)\cup(2,\infty)"),
    ("x>y", "y<x"), ("-1 < x < 1", "|x|<1"), (r"\mathbb{R}", r"(-\infty,\infty)"), (r"\emptyset", r"\varnothing"),
    ("a+b=17", "17"), ("x+y=5", "y=5-x"), ("y=2x+1", "2x+1"), ("x^2+y^2=4", "2x^2+2y^2=8"), ("x = 2+2 = 4", "4"),
    ("2143_5", "2143_{5}"), ("11_2", "3_{10}"), (r"\text{Area}=5", "5"), (r"\angle ABC = 60^\circ", "60"),
    ("x_1=3", "3"),
    (r"2k\pi, k \in \mathbb{Z}", r"2k\pi"), ("７", "7"), ("−3", "-3"), ("3×10^2", "300"),
]  # fmt: skip
DIFFERENT = [
    ("3 1/4", "31/4"), ("12 3", "123"), ("(2,1)", "(1,2)"), ("2,1", "(1,2)"), ("[1,2)", "(1,2)"), (r"\{1,2\}", "(1,2)"),
    ("x=1,y=2", "x=2,y=1"), ("2,1", "x=1,y=2"), ("x=1", "y=1"), (r"\pm 3", "3"), ("(1,2),(3,4)", "(1,2),(4,3)"),
    (r"100 \text{ cm}", r"100 \text{ m}"), (r"5 \text{ cm}^2", r"5 \text{ cm}^3"), (r"\textbf{(C)}", "B"),
    ("odd", "even"),
    ("no", "yes"), (r"\text{undefined}", "0"), ("3.14", r"\pi"), ("3.141599", r"\pi"), ("0.333", r"\frac13"),
    ("x^2+2x", "(x+1)^2"), ("|x|", "x"), (r"\sqrt{x^2}", "x"), ("1+2i", "1-2i"), ("R-r", "0"),
    (r"\pi R^2", r"\pi r^2"),
    (r"x \le 3", "x<3"), ("x > 2", "y > 2"), ("2x-3y+5=0", "0"), ("5", "2x+3y=5"), ("2143", "2143_5"), ("3d", "3"),
    ("10^{50}", "1" + "0" * 49), (r"-\infty", r"\infty"), ("3:4", "3:5"), ("2", "2, 2"), ("e^{-200}", "0"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"), (r"\frac{1}{0}", "0"), ("3/0", "3"),
    ("1,234", "1, 234"), (r"\{1,234\}", "1234"), ("b", "B"), (r"45^\circ", r"\frac{\pi}{4}"), ("5!", "119"),
    ("0.0000001", "0.0000002"), ("1e-9", r"\frac{1}{2000000000}"), ("x+10^{-9}", "x"),
    (r"\frac{x}{10^9}", r"\frac{2x}{10^9}"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "gold"), EQUAL)
def test_equal(answer, gold):
    assert grade(rf"\boxed{{{answer}}}", gold).reason == "equal"


@pytest.mark.parametrize(("answer", "gold"), DIFFERENT)
def test_not_equal(answer, gold):
    assert grade(rf"\boxed{{{answer}}}", gold).correct is False


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{1}, \boxed{2} and $\boxed{3}$", "1, 2, 3"),
        (r"\boxed{1}, because of that, \boxed{2}", "2"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\frac{1}{\sqrt{3}}}", r"\frac{1}{\sqrt{3}}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed 42.", "42"),
        (r"\boxed{ 5 }", "5"),
        (r"\fbox{5}", "5"),
        (r"<think>\boxed{1}</think> \boxed{2}", "2"),
        (r"<think>\boxed{1}</think> none", None),
        (r"\boxed{1}</think> \boxed{2}", "2"),
        (r"\boxed{2} <think> \boxed{3}", "2"),
        (r"<think> \boxed{3}", None),
        ("boxed{3}", None),
        (r"\boxed{", None),
        (r"\boxed", None),
        ("", None),
    ],
)
def test_extraction(response, answer):
    assert extract_answer(response) == answer


def test_reasons():
    expected = {
        "no box": "no_answer", r"\boxed{}": "no_answer", r"\boxed{ }": "no_answer", r"\boxed{7}": "equal",
        r"\boxed{8}": "different", r"\boxed{\frac{}{}}": "unparsed", r"\boxed{9^{9^{9^9}}}": "too_large",
        r"\boxed{" + "1+" * 2000 + "1}": "too_large", r"\boxed{5 9/4}": "unparsed",
    }  # fmt: skip
    assert {response: grade(response, "7").reason for response in expected} == expected
    assert grade(r"\boxed{7}", "").reason == "unparseable_gold"
    assert grade(r"\boxed{x+1}", r"\frac{}{}").reason == "unparseable_gold"
    assert grade(r"\boxed{7}", " ").extracted == "7"


def test_D_48_wrong_unparsed_and_timed_out_are_counted_apart():
    responses = [r"\boxed{8}"] * 10 + [r"\boxed{\frac{}{}}"] * 3 + [r"\boxed{\binom{20000000}{10000000}}"]
    responses += [r"\boxed{9^{9^{9^9}}}"]
    grades = grade_many([(response, r"\pi") for response in responses], timeout_s=1.0)
    counts = count(found.reason for found in grades)
    assert counts == {"correct": 0, "wrong": 10, "no_answer": 0, "unparsed": 3, "timeout": 2}
    assert set(COUNT_OF.values()) == set(counts)


def test_D_32_numbers_texts_and_lists_of_one_are_labels():
    assert {gold_text(label) for label in (33, "33", ["33"], [33], (33,))} == {"33"}
    for label in (33, 33.0, ["33"], "33", "33.0", "reasoning\n#### 33"):
        assert grade(r"\boxed{33}", gold_text(label)).correct
        assert not grade(r"\boxed{34}", gold_text(label)).correct
    for label in (None, True, [], ["3", "4"], {"a": 1}, float("nan"), float("inf"), [None], [[33]]):
        with pytest.raises(ValueError, match="must be a"):
            gold_text(label)
    assert gold_answer("a #### b #### 1,000 ") == "1,000"


@pytest.mark.parametrize(
    ("response", "gold", "reason"),
    [
        ("Answer: $23$", "23", "equal"),
        ("so\nAnswer: 23", "23", "equal"),
        ("ANSWER : 23", "23", "equal"),
        ("Answer: 22\nAnswer: 23", "23", "equal"),
        ("Answer: 23\nAnswer: 22", "23", "different"),
        (r"Answer: \boxed{23}", "23", "equal"),
        (r"Answer: $x = 23$ cm", "23", "equal"),
        ("Answer: 1,234", "1234", "equal"),
        (r"Answer: 100 \text{ dollars}", "100", "equal"),
        ("Answer: 023", "23", "different"),
        ("Answer: 46/2", "23", "different"),
        (r"\boxed{23}", "23", "no_answer"),
        ("Answer: 23" + " " * 289 + ".", "23", "different"),
        ("Answer: 23\n" + "x" * 289, "23", "equal"),
        ("Answer: 23\n" + "x" * 290, "23", "no_answer"),
        ("Answer:", "23", "no_answer"),
        ("Answer: 23", "", "unparseable_gold"),
        ("Answer: units", "units", "unparseable_gold"),
    ],
)
def test_dapo(response, gold, reason):
    assert dapo_grade(response, gold).reason == reason


def test_dapo_normal_forms():
    assert normal_form(r"\frac12") == r"\frac{1}{2}"
    assert normal_form(r"the answer is $\sqrt3$ or so") == r"\sqrt{3}"
    assert normal_form(r"an \text{apple}") == "apple"


PIECES = (
    r"1 2 17 0.5 -3 x y n \pi e i \frac{ \sqrt{ } { ( ) [ ] \{ \} , ; = < \le + - * / ^ ^{ _ _{ ! % \% \text{ and "
    r"\boxed{ \cup \infty \pm \ldots | \circ & \\ \begin{pmatrix} \end{pmatrix} \sin \log \binom \sum \int $ ° ² 中 à "
    r"\text{and} \left( \right) \overline{ \mathbb{R} \in \to 9^9^9 3! \quad \ ( \) <think> </think> 'a #### ١ \mathrm{"
)
ATOMS = st.sampled_from(PIECES.split(" "))
ANSWERS = st.one_of(st.lists(ATOMS, max_size=14).map("".join), st.text(max_size=40))


@given(ANSWERS, ANSWERS)
@settings(max_examples=400, deadline=None)
def test_fuzz_comparing_raises_nothing_but_undecided_and_takes_no_time(answer, gold):
    begin = time.perf_counter()
    for rules in ("math", "dapo"):
        try:
            reason = compare(answer, gold) if rules == "math" else dapo_grade(f"Answer: {answer}", gold).reason
        except Undecided:
            continue
        assert reason in COUNT_OF
    assert time.perf_counter() - begin < 1


@given(st.lists(st.tuples(ANSWERS, ANSWERS), min_size=20, max_size=30))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_fuzz_every_pair_gets_a_grade_within_the_limit(pairs):
    begin = time.monotonic()
    grades = grade_many([(rf"\boxed{{{answer}}}", gold) for answer, gold in pairs], timeout_s=1.0)
    assert time.monotonic() - begin < len(pairs) * 4
    assert len(grades) == len(pairs)
    assert all(found.reason in COUNT_OF and found.correct == (found.reason == "equal") for found in grades)


@given(ANSWERS)
@settings(max_examples=200, deadline=None)
def test_fuzz_an_answer_equals_itself(answer):
    if answer.strip() and "####" not in answer and extract_answer(rf"\boxed{{{answer}}}") == answer.strip():
        assert grade(rf"\boxed{{{answer}}}", answer).reason in ("equal", "unparseable_gold", "no_answer")


@given(st.integers(-(10**6), 10**6), st.integers(1, 10**4), st.integers(-(10**6), 10**6), st.integers(1, 10**4))
def test_fuzz_fractions_are_equal_exactly_when_their_values_are(a, b, c, d):
    answer, gold = rf"\frac{{{a}}}{{{b}}}", f"{c}/{d}"
    assert (compare(answer, gold) == "equal") is (a * d == c * b)
    assert compare(answer, rf"\frac{{{a * d}}}{{{b * d}}}") == "equal"


@pytest.mark.parametrize(
    "unit", ["(", "{", r"\frac{", "^", "1^", r"\boxed{", r"\boxed{1},", "a and ", "1,", "~", r"\text{"]
)
def test_answers_and_responses_of_any_length_are_quick(unit):
    long = unit * (200_000 // len(unit))
    begin = time.perf_counter()
    assert grade(long, "5").reason in COUNT_OF
    assert grade(rf"{long} \boxed{{5}}", "5").reason in COUNT_OF
    assert grade(rf"\boxed{{{long}}}", "5").reason in COUNT_OF
    assert grade(r"\boxed{5}", long).reason in COUNT_OF
    assert time.perf_counter() - begin < 4


def test_sets_of_sets_do_not_take_forever():
    numbers = [list(range(i, i + 14)) for i in range(14)]
    rows = [r"\{" + ",".join(map(str, row)) + r"\}" for row in numbers]
    other = [r"\{" + ",".join(f"{n}.0" for n in reversed(row)) + r"\}" for row in reversed(numbers)]
    begin = time.perf_counter()
    assert grade(r"\boxed{\{" + ",".join(rows) + r"\}}", r"\{" + ",".join(other) + r"\}").reason == "too_large"
    assert time.perf_counter() - begin < 3


@pytest.mark.parametrize(
    ("text", "large"),
    [
        ("7^{7^{7^{7}}}", True), ("9^9^9^9", True), (r"2^{2^{10}}", False), ("2^{100000}", True), ("20000!", True),
        ("(1000!)!", True), ("1501!", False), ("10^{-7}", False), ("x^{7^{7^7}}", True), ("x^2", False),
        (r"\sum_{k=1}^{1000000} k", False), ("x_{1}^{2}", False), ("(" * 61 + "1" + ")" * 61, True),
    ("(2^{9})^{9}", False),
        (r"10^{\frac{9^{9}}{2}}", True), ("((9^9)^9)^9999", True),
    ],
)  # fmt: skip
def test_size(text, large):
    assert too_large(text) is large
