"""Chat messages to text with a model folder's own chat template, byte for byte as transformers renders them.

transformers itself is not needed: a chat template is a Jinja template, and what it may use (filters, globals, white
space rules, the sandbox) is a short list, kept here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from exactrl.errors import DataError, ModelError

Message = Mapping[str, Any]

# Names under which data sets keep the reasoning of a turn; templates read the first (gpt-oss: the second).
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any] | None = None, where: str = "template") -> None:
        """Raises ModelError, beginning with `where`, for a template that is not valid Jinja."""
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"{where}: not a valid chat template: {error}") from error

    def render(self, messages: Sequence[Message], *, enable_thinking: bool = False) -> str:
        """The text of a conversation up to where the model answers (add_generation_prompt).

        Keys that are null are left out, as in transformers: parquet gives every message all keys of its column.
        Raises DataError for messages that are malformed or that the template refuses.
        """
        clean = [_with_reasoning(message) for message in checked_messages(messages)]
        try:
            return self._template.render(
                messages=clean, tools=None, documents=None, add_generation_prompt=True,
                **(self._special_tokens | {"enable_thinking": enable_thinking}),
            )  # fmt: skip
        except Exception as error:  # a template is code of the model's authors and may raise anything
            raise DataError(f"the chat template refuses these messages: {error}") from error


def checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages without their null keys. Raises DataError where they are no conversation that a model can answer."""
    if not messages:
        raise DataError("the list of chat messages is empty")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            raise DataError(f"chat message {number} must be an object with role and content, not {message!r:.60}")
        if not isinstance(message.get("role"), str):
            raise DataError(f"chat message {number} needs a role that is a string, not {message.get('role')!r:.60}")
    if messages[-1]["role"] == "assistant":
        raise DataError(
            "the last chat message is the assistant's, so there is nothing to answer; a prompt ends with another turn"
        )
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def load_chat_template(folder: str | Path) -> ChatTemplate | None:
    """The chat template of a model folder: chat_template.jinja, else `chat_template` of tokenizer_config.json (a text,
    or a list of named ones with a "default"). None where there is none; ModelError where it is malformed."""
    path = Path(folder) / "tokenizer_config.json"
    config = _read_object(path) if path.is_file() else {}
    jinja = Path(folder) / "chat_template.jinja"
    if jinja.is_file():
        return ChatTemplate(_read_text(jinja), _special_tokens(config), str(jinja))
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
        if source is None:
            raise ModelError(f"{path}: chat_template has no template named 'default'")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelError(f"{path}: chat_template must be a text, not {type(source).__name__}")
    return ChatTemplate(source, _special_tokens(config), str(path))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """bos_token, eos_token, … as text; tokenizer_config.json holds each as a text, as {"content": text}, or as null."""
    tokens: dict[str, Any] = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    found = next((message[key] for key in _REASONING if key in message), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for loss masks; when rendering it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [Scope(body, lineno=line)]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
