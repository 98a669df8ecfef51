"""Values of a row by key: looked up, checked, every fault named by file, row and key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exactrl.errors import DataError
from exactrl.tasks.files import Row

_ABSENT = object()


class UniqueIds:
    """The ids of a data set: the column `key`, or the row's number in the file (from 0, before slicing) where that is
    empty."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._seen: dict[str, str] = {}

    def of(self, row: Row) -> str:
        """Raises DataError for an id that is empty or was used before."""
        name = text_or_number(row, self.key) if self.key else str(row.index)
        if not name:
            raise DataError(f"{row.where}, key {self.key!r}: an id must not be empty")
        if name in self._seen:
            raise DataError(f"{row.where}, key {self.key!r}: id {name!r} was already used at {self._seen[name]}")
        self._seen[name] = row.where
        return name


def text_of(row: Row, key: str, what: str) -> str:
    """A text that is not empty; `what` names it in messages ("prompt")."""
    value = lookup(row, key)
    if isinstance(value, list):
        raise DataError(
            f"{row.where}, key {key!r}: the {what} is a list of chat messages; chat templates need "
            f"data.apply_chat_template, which is not available yet: use {what}s that are plain strings"
        )
    if not isinstance(value, str):
        raise DataError(f"{row.where}, key {key!r}: a {what} must be a string, not {kind(value)}")
    if not value:
        raise DataError(f"{row.where}, key {key!r}: the {what} is empty")
    check_unicode(row, key, value)
    return value


def text_or_number(row: Row, key: str) -> str:
    value = lookup(row, key)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{row.where}, key {key!r}: must be a string or a number, not {kind(value)}")
    text = str(value)
    check_unicode(row, key, text)
    return text


def lookup(row: Row, key: str) -> Any:
    """The value of a key, or of a dotted path where no column has that very name."""
    value: Any = row.value.get(key, _ABSENT)
    if value is _ABSENT:
        value = row.value
        for name in key.split("."):
            value = value.get(name, _ABSENT) if isinstance(value, Mapping) else _ABSENT
    if value is _ABSENT:
        columns = ", ".join(map(repr, row.value)) or "nothing"
        raise DataError(f"{row.where}, key {key!r}: missing; the row has: {columns}")
    return value


def check_unicode(row: Row, key: str, text: str) -> None:
    """JSON can spell half a surrogate pair, which no tokenizer, hash or file can take."""
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise DataError(f"{row.where}, key {key!r}: holds half a surrogate pair (\\ud800 to \\udfff alone)")


def kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
