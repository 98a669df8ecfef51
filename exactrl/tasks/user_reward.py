"""A reward function of the user's own, `module:function`: sync or async, with a time limit, its value checked."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import numbers
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from exactrl.errors import ConfigError, UsageError
from exactrl.types import Prompt, Sample

# How many calls of an async function wait at the same time.
MAX_CONCURRENT = 64
_GRACE_S = 0.5

Outcome = float | Exception


class UserReward:
    """Calls function(sample). A reward function may be a function, a coroutine function, a functools.partial or an
    object with `__call__`; `name` is what the recipe calls it, and what messages and threads are named after."""

    def __init__(self, name: str, function: Callable[[Sample], Any], timeout_s: float, key: str = "") -> None:
        self.name, self.function, self.timeout_s, self.key = name, function, timeout_s, key
        self.__name__ = name

    def __call__(self, prompt: Prompt, sample: Sample) -> float:
        """Raises UsageError for a value that is no finite number and after timeout_s seconds; what the function
        raises passes through."""
        outcome = self.outcomes([(prompt, sample)])[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def outcomes(self, pairs: Sequence[tuple[Prompt, Sample]]) -> list[Outcome]:
        """A number or the exception for each sample, in order. Async functions wait together, sync ones run in turn."""
        samples = [sample for _, sample in pairs]
        if _is_async(self.function):
            return self._all_at_once(samples)
        return [self._one(sample) for sample in samples]

    def _one(self, sample: Sample) -> Outcome:
        found: list[Outcome] = []

        def call() -> None:
            found.append(self._caught(lambda: self._now(sample), sample))

        self._on_thread(call, self.timeout_s)
        return found[0] if found else self._late(sample)

    def _now(self, sample: Sample) -> float:
        value = self.function(sample)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return self._number(value, sample)

    def _all_at_once(self, samples: Sequence[Sample]) -> list[Outcome]:
        found: dict[int, Outcome] = {}

        async def one(index: int, sample: Sample, gate: asyncio.Semaphore) -> None:
            async with gate:
                limit = asyncio.timeout(self.timeout_s)
                try:
                    async with limit:
                        found[index] = self._number(await self.function(sample), sample)
                except Exception as error:  # noqa: BLE001 (a user's function may raise anything)
                    found[index] = self._late(sample) if limit.expired() else error
                except BaseException as error:  # noqa: BLE001 (SystemExit would end the other samples' calls, too)
                    found[index] = self._ended(error, sample)

        async def everyone() -> None:
            gate = asyncio.Semaphore(MAX_CONCURRENT)
            await asyncio.gather(*(one(index, sample, gate) for index, sample in enumerate(samples)))

        # The thread's limit is for functions that block the event loop, which no timeout inside it can interrupt.
        waves = -(-len(samples) // MAX_CONCURRENT)
        self._on_thread(lambda: asyncio.run(everyone()), waves * self.timeout_s + _GRACE_S)
        return [found.get(index, self._late(sample)) for index, sample in enumerate(samples)]

    def _on_thread(self, work: Callable[[], None], limit_s: float) -> None:
        """Python cannot end a thread, so one that hangs is left behind (it does not keep the process alive)."""
        thread = threading.Thread(target=work, daemon=True, name=f"reward {self.name}")
        thread.start()
        thread.join(limit_s)

    def _caught(self, work: Callable[[], float], sample: Sample) -> Outcome:
        try:
            return work()
        except Exception as error:  # noqa: BLE001 (handed to the caller's thread, whatever it is)
            return error
        except BaseException as error:  # noqa: BLE001 (SystemExit on a thread would vanish)
            return self._ended(error, sample)

    def _ended(self, error: BaseException, sample: Sample) -> UsageError:
        return UsageError(f"reward {self.name!r} ended with {type(error).__name__}: {error} for {sample.name}")

    def _late(self, sample: Sample) -> UsageError:
        return RewardTimeout(
            f"reward {self.name!r} took longer than {self.timeout_s:g} s for sample {sample.name} (reward.timeout_s)"
        )

    def _number(self, value: Any, sample: Sample) -> float:
        """bool, int, float, numpy scalars and 0-d arrays and tensors; of a dict the entry reward.key."""
        if isinstance(value, Mapping):
            if not self.key or self.key not in value:
                says = f"it has no {self.key!r} (reward.key)" if self.key else "name the entry to use in reward.key"
                raise UsageError(
                    f"reward {self.name!r} returned a dict with {', '.join(map(repr, value)) or 'nothing'} for sample "
                    f"{sample.name}; {says}"
                )
            value = value[self.key]
        plain = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
        if not isinstance(plain, numbers.Real) or not math.isfinite(plain):
            raise UsageError(
                f"reward {self.name!r} returned {value!r:.200} for sample {sample.name}; it must be a finite number"
            )
        return float(plain)


class RewardTimeout(UsageError):
    """A reward function took longer than reward.timeout_s."""


async def _awaited(value: Any) -> Any:
    return await value


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, partial):
        function = function.func
    call = type(function).__call__ if not inspect.isroutine(function) else function
    return inspect.iscoroutinefunction(call)


@contextmanager
def _current_folder_last() -> Iterator[None]:
    """A user's module may lie where the command is called, which Python searches for scripts of its own only. Last, so
    that it shadows nothing."""
    sys.path.append(os.getcwd())
    try:
        yield
    finally:
        sys.path.pop()


def import_function(name: str) -> Callable[[Sample], Any]:
    """What `module:function` names. Raises ConfigError where it cannot be imported, found or called."""
    module_name, _, function_name = name.partition(":")
    try:
        with _current_folder_last():
            module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ConfigError(
            f"reward.name {name!r}: module {module_name!r} cannot be imported ({type(error).__name__}: {error}); "
            "it must be installed, or lie in the current folder or one on PYTHONPATH; write my_rewards:f, without .py"
        ) from error
    function = getattr(module, function_name, None)
    if function is None:
        raise ConfigError(f"reward.name {name!r}: module {module_name!r} has no {function_name!r}")
    if not callable(function):
        raise ConfigError(f"reward.name {name!r}: {function_name!r} is a {type(function).__name__}, not a function")
    return function
