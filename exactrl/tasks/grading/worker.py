"""A worker process of the pool: reads pairs as JSON lines on stdin, writes one word for each on stdout.

Ends at the end of stdin, in the middle of a pair, too: nobody wants the verdict then. The kernel ends it when a pair
takes longer than its time (SIGALRM, default action: not even a single endless big-number operation can hold it up), and
refuses memory beyond the limit.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import sys
import threading

from exactrl.tasks.grading.outcome import OUT_OF_MEMORY, UNPARSED

READY = "ready"


def main(max_memory_bytes: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes stdin
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(1 << 18)  # counts as memory of the process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.disable(logging.CRITICAL)
    from exactrl.tasks.grading.compare import compare
    from exactrl.tasks.grading.symbolic import symbolic

    out = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints must not look like a verdict
    _say(out, READY)
    for line in sys.stdin.buffer:
        answer, gold, timeout_s = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            reason = compare(answer, gold, symbolic)
        except MemoryError:
            reason = OUT_OF_MEMORY
        except RecursionError:
            reason = UNPARSED
        except Exception:  # noqa: BLE001 (sympy raises anything on formulas that it cannot handle; no verdict)
            reason = UNPARSED
        signal.setitimer(signal.ITIMER_REAL, 0)
        _say(out, reason)
        if reason == OUT_OF_MEMORY:
            return 0  # a fresh process for the next pair
    return 0


def _end_with_parent() -> None:
    """Waits until the writing end of stdin is closed. A big-number operation may keep this thread from running; the
    timer of its pair then ends the process."""
    closed = select.poll()
    closed.register(sys.stdin.fileno(), 0)  # 0: no data, only the hang-up, which is always reported
    closed.poll()
    os._exit(0)


def _say(out, word: str) -> None:
    out.write(word + "\n")
    out.flush()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
