"""Every case of group C as a test of its own, and the same verdicts from threads, an event loop and other processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from exactrl.tasks.grading.grade import grade, grade_async, grade_many
from exactrl.tasks.grading.outcome import EQUAL
from tests.tasks.grading_cases import CASES, POLICY

PAIRS = [(case["response"], case["gold"]) for case in CASES]
VERDICTS = [case["correct"] for case in CASES]


def _test_of(case):
    def test():
        begin = time.monotonic()
        found = grade(case["response"], case["gold"])
        seconds = time.monotonic() - begin
        assert found.correct is case["correct"], (case["expected"], found)
        assert (found.reason == EQUAL) is found.correct
        assert seconds < case["expected"].get("max_seconds", 60)

    return test


for _case in CASES:
    _words = re.sub(r"\W+", "_", _case["gist"]).strip("_").lower()
    globals()[f"test_{_case['id'].replace('-', '_')}_{_words}"] = _test_of(_case)


def test_the_cases_are_all_there():
    assert len(CASES) == 71
    assert {case["id"] for case in CASES if case["expected"]["correct"] is None} == set(POLICY)
    assert {True, False} <= set(VERDICTS)


def test_C_28_C_21_an_extracted_answer_grades_like_its_box():
    assert grade("\\boxed{\\boxed{14}}", "\\boxed{14}").correct
    assert grade("\\boxed{3} so \\boxed{4}", "3").correct is False


def test_C_35_dapo_reads_the_answer_line():
    assert grade("Answer: $23$", "23", rules="dapo").correct
    assert grade("Answer: $23$", "23", rules="math").reason == "no_answer"


def test_C_62_either_reading_of_a_percent_sign_and_no_third():
    for answer, gold in [("35", "35\\%"), ("35\\%", "35"), ("0.35", "35\\%"), ("35\\%", "0.35"), ("35%", "35\\%")]:
        assert grade(f"\\boxed{{{answer}}}", gold).correct, (answer, gold)
    for answer, gold in [("3500", "35\\%"), ("0.35\\%", "35\\%"), ("0.0035", "35\\%"), ("0.35", "35")]:
        assert not grade(f"\\boxed{{{answer}}}", gold).correct, (answer, gold)


def test_C_120_worded_lists_keep_their_order_and_pairs_do_too():
    assert not grade(r"\boxed{21 \text{ rabbits and } 9 \text{ chickens}}", "9, 21").correct
    assert not grade(r"\boxed{21, 9}", "(9, 21)").correct
    assert grade(r"\boxed{21, 9}", "9, 21").correct  # a bare list of both has no order


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_the_cases_does_not_matter(seed):
    order = random.Random(seed).sample(range(len(CASES)), len(CASES))
    found = grade_many([PAIRS[i] for i in order])
    assert [grade.correct for grade in found] == [VERDICTS[i] for i in order]


def test_C_113_in_many_threads_at_once():
    assert threading.current_thread() is threading.main_thread()
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda pair: grade(*pair).correct, PAIRS * 2))
    assert found == VERDICTS * 2


def test_in_an_event_loop():
    async def everything():
        return await asyncio.gather(*(grade_async(*pair) for pair in PAIRS))

    assert [found.correct for found in asyncio.run(everything())] == VERDICTS


def _verdicts(pairs):
    return [found.correct for found in grade_many(pairs)]


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_in_other_processes(method):
    grade_many(PAIRS[-30:])  # so that the parent has a pool which a forked child must not use
    with multiprocessing.get_context(method).Pool(1) as processes:
        assert processes.map(_verdicts, [PAIRS]) == [VERDICTS]
    assert _verdicts(PAIRS) == VERDICTS  # the parent's pool is as it was


def test_from_a_script_without_a_main_guard():
    code = "from exactrl.tasks.grading.grade import grade; print(grade(r'\\boxed{x+1}', '1+x').correct, flush=True)"
    done = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)
