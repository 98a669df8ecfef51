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
        self._num_lent = 0
        self._changed = threading.Condition()
        self._closed = False

    def compare_many(self, pairs: Sequence[Pair], timeout_s: float) -> list[str]:
        """A word of outcome.py for each pair, in order. Raises EnvironmentProblem where no worker can be started."""
        reasons: list[str | None] = [None] * len(pairs)
        waiting = deque(range(len(pairs)))
        if pairs:
            with self._borrowed(-(-len(pairs) // _CHUNK)) as workers:
                _serve(workers, pairs, timeout_s, waiting, reasons)
        return [reason or CRASHED for reason in reasons]

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

    @contextmanager
    def _borrowed(self, wanted: int) -> Iterator[list[_Worker]]:
        """At least one worker, and of the free ones as many as wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_lent < self.num_workers)
            count = min(wanted, self.num_workers - self._num_lent)
            self._num_lent += count
            workers = [self._idle.pop() if self._idle else _Worker(self.max_memory_bytes) for _ in range(count)]
        try:
            yield workers
        finally:
            for worker in workers:
                if worker.sent or self._closed:  # an exception came in between: its verdicts are nobody's
                    worker.stop()
            with self._changed:
                self._num_lent -= len(workers)
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


def _serve(
    workers: Sequence[_Worker], pairs: Sequence[Pair], timeout_s: float, waiting: deque[int], reasons: list[str | None]
) -> None:
    """Keeps every worker busy until all pairs have a reason."""
    with selectors.DefaultSelector() as selector:

        def feed(worker: _Worker) -> None:
            if waiting:
                share = max(1, min(_CHUNK, len(waiting) // len(workers)))
                worker.send([waiting.popleft() for _ in range(share)], pairs, timeout_s)
                assert worker.process is not None
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]

        def end(worker: _Worker, status: int | None) -> None:
            """The process has died or must: the pair that it was at has its reason, the others go back."""
            assert worker.process is not None
            selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
            unanswered, ready = list(worker.sent), worker.ready
            died = worker.stop()
            if ready and unanswered:
                reasons[unanswered.pop(0)] = TIMEOUT if status is None or died == -signal.SIGALRM else CRASHED
            elif not ready and worker.starts >= _MAX_STARTS:
                raise EnvironmentProblem(f"the grading process does not start (exit status {died}): {worker.problem()}")
            waiting.extendleft(reversed(unanswered))
            feed(worker)

        for worker in workers:
            feed(worker)
        while selector.get_map():
            left = min(key.data.deadline for key in selector.get_map().values()) - time.monotonic()
            for key, _ in selector.select(max(left, 0)):
                worker = key.data
                words = worker.words()
                if words is None:
                    end(worker, 0)
                    continue
                _take(worker, words, timeout_s, reasons)
                if not worker.sent and worker.ready:
                    selector.unregister(key.fileobj)
                    feed(worker)
            now = time.monotonic()
            for key in [key for key in selector.get_map().values() if key.data.deadline < now]:
                end(key.data, None)


def _take(worker: _Worker, words: Sequence[str], timeout_s: float, reasons: list[str | None]) -> None:
    for word in words:
        if word == READY:
            worker.ready, worker.starts = True, 0
        else:
            assert word in COUNT_OF, word
            reasons[worker.sent.popleft()] = word
        worker.deadline = time.monotonic() + timeout_s + _GRACE_S


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
    """The parent's pools are not the child's: drops its copies of the pipes without touching the processes, so that
    the workers still see the end of their stdin when the parent goes."""
    global _lock
    _lock = threading.Lock()
    for pool in _shared.values():
        atexit.unregister(pool.close)
        for worker in pool._idle:
            if worker.process:
                worker.process.returncode = 0  # not this process's child: nothing to wait for
                for stream in (worker.process.stdin, worker.process.stdout):
                    if stream:
                        os.close(stream.fileno())
    _inherited.extend(_shared.values())
    _shared.clear()


_inherited: list[Pool] = []  # kept, so that no destructor closes a file number that is in use again
os.register_at_fork(after_in_child=_after_fork)
