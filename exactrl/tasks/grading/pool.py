"""A pool of worker processes for formulas: time and memory of every pair are bounded, a hang costs one process.

The processes are plain children that run worker.py, not multiprocessing's: they import neither the user's main module
nor torch, start in about half a second, and end when their stdin does, however the parent ended.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from exactrl.errors import EnvironmentProblem
from exactrl.tasks.grading.outcome import COUNT_OF, CRASHED, TIMEOUT
from exactrl.tasks.grading.worker import READY

Pair = tuple[str, str]

MAX_MEMORY_BYTES = 1 << 30
_CHUNK = 32
# A pair takes a few milliseconds: fewer than this many are not worth another process.
_PAIRS_PER_WORKER = 8
# The kernel's timer in the worker is the limit; this is how much later the parent stops waiting for it.
_GRACE_S = 2.0
_START_S = 60.0
_MAX_STARTS = 3


class Pool:
    """Compares (answer, gold) pairs in processes. Safe to use from any number of threads at once; a process made by
    fork must make its own (`shared_pool` does)."""

    def __init__(self, num_workers: int = 0, max_memory_bytes: int = MAX_MEMORY_BYTES) -> None:
        """num_workers 0: one per core that this process may use, at most 8. Processes start when they are needed."""
        self.num_workers = num_workers or min(len(os.sched_getaffinity(0)), 8)
        self.max_memory_bytes = max_memory_bytes
        self._idle: list[_Worker] = []
        self._lent: list[_Worker] = []
        self._changed = threading.Condition()
        self._closed = False

    def compare_many(self, pairs: Sequence[Pair], timeout_s: float) -> list[str]:
        """A word of outcome.py for each pair, in order. Raises EnvironmentProblem where no worker can be started."""
        if not pairs:
            return []
        with self._borrowed(-(-len(pairs) // _PAIRS_PER_WORKER)) as workers:
            return _Round(workers, pairs, timeout_s).run()

    def pids(self) -> list[int]:
        """Process ids of the idle workers that run."""
        with self._changed:
            return [worker.process.pid for worker in self._idle if worker.process]

    def close(self) -> None:
        """Ends all workers; those that are busy end when their caller returns them."""
        with self._changed:
            self._closed = True
            workers, self._idle = self._idle, []
        for worker in workers:
            worker.stop()

    def forget(self) -> None:
        """In a forked child: lets go of the parent's processes."""
        for worker in (*self._idle, *self._lent):
            if worker.process:
                worker.process.returncode = 0  # no child of this process: nothing to wait for
                for stream in (worker.process.stdin, worker.process.stdout):
                    if stream and not stream.closed:
                        os.close(stream.fileno())

    @contextmanager
    def _borrowed(self, wanted: int) -> Iterator[list[_Worker]]:
        """At least one worker, and of the free ones as many as wanted."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._lent) < self.num_workers)
            count = min(wanted, self.num_workers - len(self._lent))
            workers = [self._idle.pop() if self._idle else _Worker(self.max_memory_bytes) for _ in range(count)]
            self._lent += workers
        try:
            yield workers
        finally:
            for worker in workers:
                if worker.sent or self._closed:  # an exception came in between: its verdicts are nobody's
                    worker.stop()
            with self._changed:
                self._lent = [worker for worker in self._lent if worker not in workers]
                self._idle += [] if self._closed else workers
                self._changed.notify_all()


class _Worker:
    """One process and the pairs that it was sent and has not answered."""

    def __init__(self, max_memory_bytes: int) -> None:
        self.max_memory_bytes = max_memory_bytes
        self.process: subprocess.Popen[bytes] | None = None
        self.sent: deque[int] = deque()
        self.ready = False
        self.buffer = b""
        self.deadline = 0.0
        self.starts = 0

    def start(self) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (open while the process runs)
        # -c with the path given: the package need not be installed, and -P keeps the working directory's files out.
        package_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
        code = (
            f"import sys; sys.path.insert(0, {package_root!r}); "
            f"from exactrl.tasks.grading.worker import main; sys.exit(main({self.max_memory_bytes}))"
        )
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, close_fds=True,
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},  # a second arena would count as memory of the process
            )  # fmt: skip
        except OSError as error:
            raise EnvironmentProblem(f"a grading process cannot be started: {error}") from error
        self.ready, self.buffer = False, b""
        self.starts += 1
        self.deadline = time.monotonic() + _START_S

    def send(self, indices: Sequence[int], pairs: Sequence[Pair], timeout_s: float) -> None:
        if self.process is None or self.process.poll() is not None:
            self.stop()
            self.start()
        assert self.process is not None
        assert self.process.stdin is not None
        self.sent = deque(indices)
        if self.ready:
            self.deadline = time.monotonic() + timeout_s + _GRACE_S
        lines = b"".join(json.dumps([*pairs[i], timeout_s]).encode() + b"\n" for i in indices)
        try:
            self.process.stdin.write(lines)
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died: seen as the end of its output

    def words(self) -> list[str] | None:
        """Whole lines that have arrived; None when the process has ended."""
        assert self.process is not None
        assert self.process.stdout is not None
        if not (data := os.read(self.process.stdout.fileno(), 1 << 16)):
            return None
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        return [line.decode() for line in lines]

    def stop(self) -> int:
        """Kills and forgets the process; returns its exit status as subprocess gives it, 0 where there was none."""
        process, self.process = self.process, None
        self.sent = deque()
        if process is None:
            return 0
        died = process.poll()
        process.kill()
        for stream in (process.stdin, process.stdout):
            try:
                if stream:
                    stream.close()
            except BrokenPipeError:
                pass
        status = process.wait()
        return status if died is None else died

    def problem(self) -> str:
        self.errors.seek(0)
        return self.errors.read()[-2_000:].decode(errors="replace").strip()


class _Round:
    """One call of compare_many: keeps its workers busy until every pair has a reason."""

    def __init__(self, workers: Sequence[_Worker], pairs: Sequence[Pair], timeout_s: float) -> None:
        self.workers, self.pairs, self.timeout_s = workers, pairs, timeout_s
        self.reasons: list[str | None] = [None] * len(pairs)
        self.waiting = deque(range(len(pairs)))
        self.crashed_once: set[int] = set()

    def run(self) -> list[str]:
        with selectors.DefaultSelector() as self.selector:
            for worker in self.workers:
                self._feed(worker)
            while self.selector.get_map():
                deadlines = [key.data.deadline for key in self.selector.get_map().values()]
                for key, _ in self.selector.select(max(min(deadlines) - time.monotonic(), 0)):
                    self._hear(key.data)
                now = time.monotonic()
                for key in [key for key in self.selector.get_map().values() if key.data.deadline < now]:
                    self._replace(key.data, TIMEOUT)
        assert None not in self.reasons, self.reasons
        return [reason for reason in self.reasons if reason]

    def _feed(self, worker: _Worker) -> None:
        if self.waiting:
            share = max(1, min(_CHUNK, len(self.waiting) // len(self.workers)))
            worker.send([self.waiting.popleft() for _ in range(share)], self.pairs, self.timeout_s)
            assert worker.process is not None
            self.selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]

    def _hear(self, worker: _Worker) -> None:
        words = worker.words()
        if words is None:
            self._replace(worker, CRASHED)
            return
        for word in words:
            if word == READY:
                worker.ready, worker.starts = True, 0
            else:
                assert word in COUNT_OF, word
                self.reasons[worker.sent.popleft()] = word
            worker.deadline = time.monotonic() + self.timeout_s + _GRACE_S
        if worker.ready and not worker.sent:
            self.selector.unregister(worker.process.stdout)  # type: ignore[arg-type, union-attr]
            self._feed(worker)

    def _replace(self, worker: _Worker, reason: str) -> None:
        """Ends the process. The pair that it was at has its reason, the others go back to wait. A pair is tried once
        more before it is blamed for a crash: the process may have been killed from outside, or have ended after the
        pair before, which ran out of memory."""
        assert worker.process is not None
        self.selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
        unanswered, ready = list(worker.sent), worker.ready
        status = worker.stop()
        if status == -signal.SIGALRM:
            reason = TIMEOUT
        if not ready:
            if worker.starts >= _MAX_STARTS:
                problem = worker.problem()
                raise EnvironmentProblem(f"the grading process does not start (exit status {status}): {problem}")
        elif unanswered and reason == CRASHED and unanswered[0] not in self.crashed_once:
            self.crashed_once.add(unanswered[0])
        elif unanswered:
            self.reasons[unanswered.pop(0)] = reason
        self.waiting.extend(unanswered)
        self._feed(worker)


_shared: dict[int, Pool] = {}
_lock = threading.Lock()


def shared_pool() -> Pool:
    """The pool of this process, made at first use and closed at exit. A forked child makes its own."""
    pid = os.getpid()
    if (pool := _shared.get(pid)) is None:
        with _lock:
            if (pool := _shared.get(pid)) is None:
                pool = _shared[pid] = Pool()
                atexit.register(pool.close)
    return pool


def _after_fork() -> None:
    """The parent's pools are not the child's: closes the child's copies of the pipes without touching the processes,
    so that the workers still see the end of their stdin when the parent goes."""
    global _lock
    _lock = threading.Lock()
    for pool in _shared.values():
        atexit.unregister(pool.close)
        pool.forget()
    _inherited.extend(_shared.values())
    _shared.clear()


_inherited: list[Pool] = []  # kept, so that no destructor closes a file number that is in use again
os.register_at_fork(after_in_child=_after_fork)
