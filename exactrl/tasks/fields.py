"""A row's values by key: which columns hold them, and what they may be. Every fault is named by file, row and key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exactrl.errors import DataError
from exactrl.tasks.files import Row

_ABSENT = object()


class Fields:
    """Reads rows. A key may be a dotted path into nested objects (`reward_model.ground_truth`)."""

    def __init__(self, prompt_key: str, label_key: str, id_key: str) -> None:
        self.prompt_key = prompt_key
        self.label_key = label_key
        self.id_key = id_key

    def prompt(self, row: Row) -> str:
        return text_of(row, self.prompt_key, "prompt")

    def label(self, row: Row) -> str:
        """The label as text; "" without a label key."""
        return _text_or_number(row, self.label_key) if self.label_key else ""

    def id(self, row: Row) -> str | None:
        """The id as text; None without an id key: the row's number then is its id."""
        if not self.id_key:
            return None
        text = _text_or_number(row, self.id_key)
        if not text:
            raise DataError(f"{row.where}, key {self.id_key!r}: an id must not be empty")
        return text

    def metadata(self, row: Row) -> dict[str, Any]:
        used = {self.prompt_key, self.label_key, self.id_key}
        return {key: value for key, value in row.value.items() if key not in used}


def text_of(row: Row, key: str, what: str) -> str:
    """A text that is not empty; `what` names it in messages ("prompt")."""
    value = _lookup(row, key)
    if isinstance(value, list):
        raise DataError(
            f"{row.where}, key {key!r}: the {what} is a list of chat messages; chat templates need "
            f"data.apply_chat_template, which is not available yet: use {what}s that are plain strings"
        )
    if not isinstance(value, str):
        raise DataError(f"{row.where}, key {key!r}: a {what} must be a string, not {_kind(value)}")
    if not value:
        raise DataError(f"{row.where}, key {key!r}: the {what} is empty")
    _check_unicode(row, key, value)
    return value


def _text_or_number(row: Row, key: str) -> str:
    value = _lookup(row, key)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{row.where}, key {key!r}: must be a string or a number, not {_kind(value)}")
    text = str(value)
    _check_unicode(row, key, text)
    return text


def _lookup(row: Row, key: str) -> Any:
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


def _check_unicode(row: Row, key: str, text: str) -> None:
    """JSON can spell half a surrogate pair, which no tokenizer, hash or file can take."""
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise DataError(f"{row.where}, key {key!r}: holds half a surrogate pair (\\ud800 to \\udfff alone)")


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
