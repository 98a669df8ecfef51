"""Who watches a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Progress = Callable[[str, int, int], None]


class Events(Protocol):
    """Who watches a run: see cli/progress.py."""

    def on_start(self, info: dict[str, Any]) -> None: ...
    def on_progress(self, phase: str, done: int, total: int) -> None: ...
    def on_step(self, metrics: dict[str, Any]) -> None: ...
    def on_end(self, summary: dict[str, Any]) -> None: ...
    def on_note(self, text: str) -> None: ...


class Silent:
    """Events that nobody watches."""

    def on_start(self, info: dict[str, Any]) -> None:
        pass

    def on_progress(self, phase: str, done: int, total: int) -> None:
        pass

    def on_step(self, metrics: dict[str, Any]) -> None:
        pass

    def on_end(self, summary: dict[str, Any]) -> None:
        pass

    def on_note(self, text: str) -> None:
        pass
