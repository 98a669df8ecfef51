"""Ctrl-C and SIGTERM end a run after the step it is in; a second one ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """A context in which the first signal sets `requested` and calls `on_request`, and the next raises
    KeyboardInterrupt wherever the run is. Outside the main thread, where Python sets no handlers, it does nothing."""

    def __init__(self, on_request: Callable[[str], None]) -> None:
        self.requested = False
        self._on_request = on_request
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._on_request("stopping after this step; once more to stop at once")
