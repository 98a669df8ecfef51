"""Reward functions by name: a bundled one, or `module:function` for the user's own."""

from __future__ import annotations

import importlib
import math
import numbers
import threading
from collections.abc import Callable
from typing import Any

from exactrl.errors import ConfigError, UsageError
from exactrl.tasks import arithmetic
from exactrl.types import Prompt, Sample

Reward = Callable[[Prompt, Sample], float]

BUNDLED: dict[str, Reward] = {"arithmetic": arithmetic.reward}


def resolve_reward(name: str, timeout_s: float = 5.0) -> Reward:
    """The reward function named in a recipe: a key of BUNDLED, or `module:function` with function(sample) -> float.

    The returned function raises UsageError when a user's function returns anything but a finite number; whatever the
    user's function raises passes through; one that takes longer than timeout_s raises UsageError. What happens then
    (reward.on_error: stop, zero or drop) is the caller's part.
    Raises ConfigError when there is no such reward.
    """
    if name in BUNDLED:
        return BUNDLED[name]
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        known = ", ".join(repr(key) for key in BUNDLED)
        raise ConfigError(f"reward.name {name!r} is unknown; use {known} or 'module:function'")
    return _checked(name, _import(name, module_name, function_name), timeout_s)


def _import(name: str, module_name: str, function_name: str) -> Callable[[Sample], float]:
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ConfigError(
            f"reward.name {name!r}: module {module_name!r} cannot be imported ({type(error).__name__}: {error}); "
            "it must be installed or lie in a folder on PYTHONPATH"
        ) from error
    function = getattr(module, function_name, None)
    if function is None:
        raise ConfigError(f"reward.name {name!r}: module {module_name!r} has no {function_name!r}")
    if not callable(function):
        raise ConfigError(f"reward.name {name!r}: {function_name!r} is a {type(function).__name__}, not a function")
    return function


def _checked(name: str, function: Callable[[Sample], float], timeout_s: float) -> Reward:
    def reward(prompt: Prompt, sample: Sample) -> float:
        value = _within(timeout_s, name, function, sample)
        # numbers.Real admits numpy scalars and bool, which are fine; strings, None and tensors are not.
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise UsageError(f"reward {name!r} returned {value!r} for sample {sample.name}; it must be a finite number")
        return float(value)

    return reward


def _within(timeout_s: float, name: str, function: Callable[[Sample], float], sample: Sample) -> float:
    """The function's value, computed on a thread of its own. Raises UsageError after timeout_s seconds; Python cannot
    end a thread, so one that hangs is left behind (it does not keep the process alive)."""
    box: list[tuple[bool, Any]] = []

    def call() -> None:
        try:
            box.append((True, function(sample)))
        except BaseException as error:  # noqa: BLE001 (handed to the caller's thread, whatever it is)
            box.append((False, error))

    thread = threading.Thread(target=call, daemon=True, name=f"reward {name}")
    thread.start()
    thread.join(timeout_s)
    if not box:
        raise UsageError(
            f"reward {name!r} took longer than {timeout_s:g} s for sample {sample.name} (reward.timeout_s)"
        )
    done, value = box[0]
    if done:
        return value
    if isinstance(value, Exception):
        raise value
    raise UsageError(f"reward {name!r} ended with {type(value).__name__}: {value} for sample {sample.name}") from value
