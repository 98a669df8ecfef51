"""Settings in words: what a key allows, which key was meant, how a value looks in TOML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from exactrl.config.refused import refusal
from exactrl.config.settings import Config, Recipe


class Row(NamedTuple):
    """One setting for a reader: `default` is TOML text, or "required"."""

    key: str
    allowed: str
    default: str
    help: str


def describe(kind: type[Recipe] = Config) -> list[Row]:
    """Every setting of a kind of recipe, in order."""
    return [
        Row(key, allowed(field), _default(field), field.description or "") for key, field in kind.settings().items()
    ]


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else show(field.get_default(call_default_factory=True))


def show(value: Any) -> str:
    """A value as TOML would write it (numbers, texts, lists and flat tables)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(show, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {show(item)}' for key, item in value.items())} }}" if value else "{}"
    return str(value)


def allowed(field: FieldInfo) -> str:
    """What a field takes, as a phrase: "an integer, at least 1"."""
    return _phrase(field.annotation, field.metadata)


def _phrase(annotation: Any, limits: Sequence[Any] = ()) -> str:
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _phrase(inner, [*limits, *more])
    if get_origin(annotation) is Literal:
        return " or ".join(map(show, get_args(annotation)))
    if get_origin(annotation) is tuple:
        items = get_args(annotation)
        count = "" if items[-1] is Ellipsis else f"{len(items)} values, "
        return f"a list: {count}each {_phrase(items[0])}"
    if get_origin(annotation) is dict:
        return "a table of name = text; names are letters, digits, - and _"
    kind = {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}[annotation]
    return ", ".join([kind, *_bounds(limits)])


def _bounds(limits: Sequence[Any]) -> list[str]:
    words = []
    for limit in limits:
        if isinstance(limit, FieldInfo):
            words += _bounds(limit.metadata)
        elif isinstance(limit, Ge):
            words.append(f"at least {limit.ge}")
        elif isinstance(limit, Gt):
            words.append(f"above {limit.gt}")
        elif isinstance(limit, Le):
            words.append(f"at most {limit.le}")
        elif isinstance(limit, Lt):
            words.append(f"below {limit.lt}")
        elif hasattr(limit, "min_length"):
            words.append("not empty")
    return words


def unknown(name: str, kind: type[Recipe] = Config) -> str:
    """Says that "section" or "section.key" is no setting of this kind of recipe, and why not, or which one was probably
    meant."""
    sections, settings = kind.sections(), kind.settings()
    section, dot, key = name.partition(".")
    if reason := refusal(name):
        return f"{name} is not a setting: {reason}" if dot else f"[{name}] is not a section: {reason}"
    if not dot:
        elsewhere = [known for known in settings if known.endswith(f".{name}")]
        guess = elsewhere or [f"[{near}]" for near in get_close_matches(name, sections, 1)]
        return f"unknown section [{name}]" + (f"; did you mean {guess[0]}?" if guess else f"; known: {_list(sections)}")
    if meant := _guess(section, key, kind):
        return f"unknown setting {name}; did you mean {meant}?"
    if section in sections:
        return f"unknown setting {name}; [{section}] has: {_list(sections[section].model_fields)}"
    return f"unknown setting {name}; sections are: {_list(sections)}"


def _guess(section: str, key: str, kind: type[Recipe]) -> str | None:
    """The nearest setting: in the same section, else the same key elsewhere, else anything that looks alike."""
    settings = kind.settings()
    in_section = [known for known in settings if known.startswith(f"{section}.")]
    same_key = [known for known in settings if known.endswith(f".{key}")]
    nearest_section = get_close_matches(section, kind.sections(), 1)
    if nearest_section and f"{nearest_section[0]}.{key}" in settings:
        return f"{nearest_section[0]}.{key}"
    near = get_close_matches(key, [known.partition(".")[2] for known in in_section], 1)
    if near and not same_key:
        return f"{section}.{near[0]}"
    anywhere = same_key or get_close_matches(f"{section}.{key}", settings, 1, cutoff=0.8)
    return anywhere[0] if anywhere else None


def _list(names: Any) -> str:
    return ", ".join(names)
