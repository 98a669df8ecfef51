"""A row's prompt, label and id: which columns hold them, and what they may be."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from exactrl.errors import DataError
from exactrl.tasks.chat import Message
from exactrl.tasks.files import Row

Render = Callable[[Sequence[Message]], str]

_ABSENT = object()
# Rendered conversations kept, so that repeats are not rendered again.
_MAX_RENDERED = 50_000


class Fields:
    """Reads rows. A key may be a dotted path into nested objects (`reward_model.ground_truth`)."""

    def __init__(
        self, prompt_key: str, label_key: str, id_key: str, label_pattern: str = "", render: Render | None = None
    ) -> None:
        """render: messages to text; None where prompts are plain text."""
        self.prompt_key = prompt_key
        self.label_key = label_key
        self.id_key = id_key
        self._label_pattern = re.compile(label_pattern) if label_pattern else None
        self._render = render
        self._rendered: dict[str, str] = {}

    @property
    def keys(self) -> list[str]:
        return [key for key in (self.prompt_key, self.label_key, self.id_key) if key]

    def prompt(self, row: Row) -> str:
        """The prompt's text, rendered where there is a template (a plain text then is one user message)."""
        if self._render is None:
            return text_of(row, self.prompt_key, "prompt")
        key, value = self.prompt_key, _lookup(row, self.prompt_key)
        if not isinstance(value, str | list):
            raise DataError(f"{row.where}, key {key!r}: a prompt must be a string, not {_kind(value)}")
        if not value:
            raise DataError(f"{row.where}, key {key!r}: the prompt is empty")
        text = self._chat(row, value, self._render)
        if not text:
            raise DataError(f"{row.where}, key {key!r}: the chat template makes nothing of this prompt")
        return _unicode(row, key, text)

    def _chat(self, row: Row, value: str | list[Any], render: Render) -> str:
        name = repr(value)
        text = self._rendered.get(name)
        if text is None:
            try:
                text = render([{"role": "user", "content": value}] if isinstance(value, str) else value)
            except DataError as error:
                raise DataError(f"{row.where}, key {self.prompt_key!r}: {error}") from error
            if len(self._rendered) >= _MAX_RENDERED:
                self._rendered.clear()
            self._rendered[name] = text
        return text

    def label(self, row: Row) -> str:
        """The label as text; "" without a label key. A list of one element means that element; 33.0 means 33."""
        if not self.label_key:
            return ""
        value = _lookup(row, self.label_key)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        text = _text(row, self.label_key, value)
        if self._label_pattern is None:
            return text
        match = self._label_pattern.search(text)
        if match is None or match[1] is None:
            pattern = self._label_pattern.pattern
            raise DataError(
                f"{row.where}, key {self.label_key!r}: data.label_pattern {pattern!r} finds nothing in {text[-80:]!r}"
            )
        return match[1]

    def id(self, row: Row) -> str | None:
        """The id as text; None without an id key: the row's number then is its id."""
        if not self.id_key:
            return None
        text = _text(row, self.id_key, _lookup(row, self.id_key))
        if not text:
            raise DataError(f"{row.where}, key {self.id_key!r}: an id must not be empty")
        return text

    def metadata(self, row: Row) -> dict[str, Any]:
        used = {self.prompt_key, self.label_key, self.id_key}
        return {key: value for key, value in row.value.items() if key not in used}


def text_of(row: Row, key: str, what: str) -> str:
    """A text that is not empty, as it stands; `what` names it in messages ("prompt")."""
    value = _lookup(row, key)
    if isinstance(value, list):
        raise DataError(
            f"{row.where}, key {key!r}: the {what} is a list of chat messages; set data.apply_chat_template = true "
            "to render them with the model's chat template (`exactrl sft` cannot: render them before), or use "
            f"{what}s that are plain text"
        )
    if not isinstance(value, str):
        raise DataError(f"{row.where}, key {key!r}: a {what} must be a string, not {_kind(value)}")
    if not value:
        raise DataError(f"{row.where}, key {key!r}: the {what} is empty")
    return _unicode(row, key, value)


def _text(row: Row, key: str, value: Any) -> str:
    """A string as it is, a number in its shortest form: a whole one as an integer, as many tools turn 33 into 33.0."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{row.where}, key {key!r}: must be a string or a number, not {_kind(value)}")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise DataError(f"{row.where}, key {key!r}: must be a finite number, not {value}")
        value = int(value) if value.is_integer() else value
    try:
        return _unicode(row, key, str(value))
    except ValueError:  # Python's limit on the digits of an integer
        raise DataError(f"{row.where}, key {key!r}: the number has too many digits") from None


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


def _unicode(row: Row, key: str, text: str) -> str:
    """JSON can spell half a surrogate pair, which no tokenizer, hash or file can take."""
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"{row.where}, key {key!r}: holds half a surrogate pair (\\ud800 to \\udfff alone)"
        raise DataError(message) from None
    return text


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
