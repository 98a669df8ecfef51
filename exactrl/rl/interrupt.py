"""Ctrl-C, SIGTERM and a closed terminal end a run after the step it is in; a second signal ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def handling(numbers: Iterable[int], handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """A context in which `handler` gets these signals. Outside the main thread, where Python sets no handlers, it does
    nothing."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers} if main else {}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class StopRequest:
    """A context in which the first signal sets `requested` and calls `on_request`, and the next raises
    KeyboardInterrupt wherever the run is. Signals that are ignored stay so (nohup, a script's background job). Outside
    the main thread, where Python sets no handlers, it does nothing."""

    def __init__(self, on_request: Callable[[str], None]) -> None:
        self.requested = False
        self._on_request = on_request

    def __enter__(self) -> StopRequest:
        heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._handling = handling(heard, self._handle)
        self._handling.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._handling.__exit__(*raised)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._on_request("stopping after this step; once more to stop at once")
