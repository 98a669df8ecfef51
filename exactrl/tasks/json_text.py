"""JSON without its loose ends: no NaN, no infinity, no repeated keys."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from exactrl.errors import DataError


class _JSONFault(ValueError):
    """Raised by the hooks of `parse_json`, to tell a fault that JSON's own grammar allows."""


def parse_json(text: str, where: str) -> object:
    """The value of a JSON text. Raises DataError that begins with `where`."""
    try:
        return json.loads(text, parse_constant=_no_constant, parse_float=_number, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise DataError(f"{where}: JSON is nested too deeply") from None
    except ValueError as error:
        raise DataError(f"{where}: invalid JSON: {error}") from None


def _no_constant(name: str) -> NoReturn:
    raise _JSONFault(f"{name} is not a JSON number")


def _number(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _JSONFault(f"{digits} is too large for a number")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _JSONFault(f"key {next(k for k in keys if keys.count(k) > 1)!r} appears twice in one object")
    return value
