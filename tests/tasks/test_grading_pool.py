"""The pool: hangs, memory, crashes, kills from outside, forks, ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from exactrl.errors import EnvironmentProblem
from exactrl.tasks.grading import pool as pool_module
from exactrl.tasks.grading.grade import grade_many
from exactrl.tasks.grading.pool import Pool, shared_pool

# Both are past every check of the text: only the limits of the process end them.
HANG = (r"\binom{20000000}{10000000}", r"\pi")
MEMORY = (r"\sum_{k=1}^{9999} k!", r"\pi")
GOOD = [("x+1", "1+x"), ("x+1", "x+2"), (r"\sqrt{8}", r"2\sqrt{2}")]
REASONS = ["equal", "different", "equal"]
# Minutes in sympy, as many short operations.
LONG = (r"\frac{(x+1)^{300}}{(y+2)^{300}}+(a+b+c)^{90}", r"\frac{(x+1)^{301}}{(y+2)^{300}}")


@pytest.fixture
def pool():
    made = Pool(1)
    yield made
    made.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], seconds: float = 15) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_a_hang_costs_its_own_verdict_and_nothing_else(pool):
    assert pool.compare_many(GOOD, 20) == REASONS
    before = pool.pids()
    begin = time.monotonic()
    assert pool.compare_many([*GOOD, HANG, *GOOD, HANG, *GOOD], 1.0) == [
        *REASONS, "timeout", *REASONS, "timeout", *REASONS,
    ]  # fmt: skip
    assert time.monotonic() - begin < 20
    assert wait_until_gone(before)
    assert len(pool.pids()) == 1
    assert pool.compare_many(GOOD, 20) == REASONS


def test_a_worker_ends_itself_even_when_nobody_waits_for_it():
    """A parent that is killed while a worker is in an endless operation leaves no process behind."""
    code = (
        "import os, sys, threading, time\n"
        "from exactrl.tasks.grading.pool import Pool\n"
        "pool = Pool(1)\n"
        f"pool.compare_many({GOOD!r}, 20)\n"
        "print(*pool.pids(), flush=True)\n"
        f"threading.Thread(target=pool.compare_many, args=([{HANG!r}], 2.0)).start()\n"
        "time.sleep(0.5)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(pids := [int(pid) for pid in done.stdout.split()]) == 1
    assert wait_until_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_worker_ends_with_its_parent_long_before_its_time(number):
    code = (
        "import os, threading, time\n"
        "from exactrl.tasks.grading.pool import Pool\n"
        "pool = Pool(1)\n"
        f"pool.compare_many({GOOD!r}, 20)\n"
        "print(*pool.pids(), flush=True)\n"
        f"threading.Thread(target=pool.compare_many, args=([{LONG!r}], 300.0)).start()\n"
        "time.sleep(1)\n"
        f"os.kill(os.getpid(), {int(number)})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -number, done.stderr
    assert len(pids := [int(pid) for pid in done.stdout.split()]) == 1
    assert wait_until_gone(pids)


def test_memory_is_bounded_and_the_next_pair_is_graded():
    small = Pool(1, max_memory_bytes=90 << 20)
    try:
        assert small.compare_many([MEMORY, *GOOD], 30) == ["out_of_memory", *REASONS]
        status = Path(f"/proc/{small.pids()[0]}/limits").read_text()
        assert str(90 << 20) in next(line for line in status.splitlines() if line.startswith("Max address space"))
    finally:
        small.close()


def test_the_default_memory_limit_is_set(pool):
    pool.compare_many(GOOD[:1], 20)
    limits = Path(f"/proc/{pool.pids()[0]}/limits").read_text()
    assert str(1 << 30) in next(line for line in limits.splitlines() if line.startswith("Max address space"))


def test_a_worker_killed_from_outside_changes_no_verdict(pool):
    pool.compare_many(GOOD, 20)
    os.kill(pool.pids()[0], signal.SIGKILL)
    assert pool.compare_many(GOOD, 20) == REASONS
    killer = threading.Timer(0.3, lambda: [os.kill(pid, signal.SIGKILL) for pid in _busy(pool)])
    killer.start()
    assert pool.compare_many([HANG, *GOOD], 2.0) == ["timeout", *REASONS]
    killer.join()


def _busy(pool: Pool) -> list[int]:
    return [worker.process.pid for worker in pool._lent if worker.process]


def test_a_pair_that_crashes_its_process_twice_is_named(pool):
    """A pair that cannot be read ends the worker with an error, as a crash inside sympy would."""
    bad = ("x", "y", "z")  # the worker expects two texts and a limit
    assert pool.compare_many([GOOD[0], bad, GOOD[1]], 20) == ["equal", "crashed", "different"]


def test_a_process_that_cannot_start_is_an_environment_problem():
    starved = Pool(1, max_memory_bytes=20 << 20)
    try:
        with pytest.raises(EnvironmentProblem, match="does not start"):
            starved.compare_many(GOOD, 5)
    finally:
        starved.close()


def test_many_threads_share_few_workers():
    shared = Pool(2)
    found = {}
    try:
        threads = [
            threading.Thread(target=lambda i=i: found.update({i: shared.compare_many(GOOD * 4, 20)})) for i in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {i: REASONS * 4 for i in range(6)}
        assert len(shared.pids()) <= 2
    finally:
        shared.close()


def test_closing_ends_all_processes():
    made = Pool(2)
    made.compare_many(GOOD * 10, 20)
    pids = made.pids()
    assert pids
    made.close()
    assert made.pids() == []
    assert wait_until_gone(pids, 5)


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(3)", "import os; os.kill(os.getpid(), 15)"])
def test_no_process_outlives_its_parent(end):
    code = (
        "from exactrl.tasks.grading.pool import shared_pool\n"
        f"shared_pool().compare_many({GOOD!r} * 10, 20)\n"
        f"print(*shared_pool().pids(), flush=True)\n{end}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert (pids := [int(pid) for pid in done.stdout.split()])
    assert wait_until_gone(pids)


def test_a_forked_child_makes_its_own_pool_and_leaves_the_parent_s_alone():
    shared_pool().compare_many(GOOD, 20)
    before = shared_pool().pids()
    child = os.fork()
    if child == 0:
        own = shared_pool().compare_many(GOOD, 20) == REASONS and not set(shared_pool().pids()) & set(before)
        os._exit(0 if own else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert shared_pool().compare_many(GOOD, 20) == REASONS
    assert shared_pool().pids() == before
    assert all(map(alive, before))


def test_a_forked_child_does_not_keep_the_workers_of_a_dead_parent():
    code = (
        "import os, time\n"
        "from exactrl.tasks.grading.pool import shared_pool\n"
        f"shared_pool().compare_many({GOOD!r}, 20)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.close(1)\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
        "print(child, *shared_pool().pids(), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child, *workers = [int(pid) for pid in parent.stdout.readline().split()]
    try:
        parent.wait(20)
        assert workers
        assert wait_until_gone(workers, 10)
        assert alive(child)
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


def test_workers_import_no_torch():
    code = "import sys, exactrl.tasks.grading.worker, exactrl.tasks.grading.symbolic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_parent_imports_no_sympy_and_ordinary_answers_start_no_process(monkeypatch):
    def no_pool():
        raise AssertionError("the pool was asked")

    monkeypatch.setattr("exactrl.tasks.grading.grade.shared_pool", no_pool)
    pairs = [(rf"so \boxed{{{a}}}", g) for a, g in [("12", "12"), ("3/4", "0.75"), ("(1,2)", "(1, 2)"), ("7", "8")]]
    assert [found.correct for found in grade_many(pairs)] == [True, True, True, False]
    code = "import sys, exactrl.tasks.grading.grade; sys.exit('sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_equal_pairs_are_compared_once(monkeypatch):
    asked = []

    class Counting(Pool):
        def compare_many(self, pairs, timeout_s):
            asked.append(list(pairs))
            return ["equal"] * len(pairs)

    answers = [(r"\boxed{x+1}", "1+x")] * 5 + [(r"\boxed{x+2}", "2+x")] * 2
    assert all(found.correct for found in grade_many(answers, pool=Counting(1)))
    assert asked == [[("x+1", "1+x"), ("x+2", "2+x")]]


def test_the_grace_of_the_parent_ends_what_the_kernel_s_timer_does_not(monkeypatch, pool):
    """A worker whose timer never comes (here: it is told a far longer limit) is killed by the parent."""
    monkeypatch.setattr(pool_module, "_GRACE_S", 0.5)
    pool.compare_many(GOOD, 20)
    real = pool_module._Worker.send

    def lying(worker, indices, pairs, timeout_s):
        real(worker, indices, pairs, 1000.0)
        worker.deadline = time.monotonic() + timeout_s + 0.5

    monkeypatch.setattr(pool_module._Worker, "send", lying)
    assert pool.compare_many([HANG], 0.5) == ["timeout"]
