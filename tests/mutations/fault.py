"""What a fault is, and the tools to put one into the code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.mutations.scenarios import Catcher, Setup, World


class Hits:
    """Counts how often a fault really changed something: one that never did shows nothing."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


# Puts a fault into the code (patches) or into the objects that a world builds, for as long as it is entered.
Apply = Callable[[World, Hits], AbstractContextManager[None]]


@dataclass(frozen=True)
class Fault:
    """`id` is kind/variant; `caught_by` names the check that must catch it, and is all that is run."""

    id: str
    description: str
    apply: Apply
    caught_by: Catcher
    setup: Setup = field(default_factory=Setup)

    @property
    def kind(self) -> str:
        """Whole kinds: what goes wrong; one-ulp faults: the op."""
        return self.id.rpartition("/")[0] if self.id.startswith("ulp/") else self.id.partition("/")[0]


def replacing(owner: Any, name: str, make: Callable[[Callable, Hits], Callable]) -> Apply:
    """Replaces owner.name by make(the original, hits); class methods and static methods lose their first argument."""

    @contextmanager
    def apply(world: World, hits: Hits) -> Iterator[None]:
        before = inspect.getattr_static(owner, name)
        new = make(getattr(owner, name), hits)
        setattr(owner, name, staticmethod(new) if isinstance(before, classmethod | staticmethod) else new)
        try:
            yield
        finally:
            setattr(owner, name, before)

    return apply


def together(*parts: Apply) -> Apply:
    """Several patches that are one fault."""

    @contextmanager
    def apply(world: World, hits: Hits) -> Iterator[None]:
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(part(world, hits))
            yield

    return apply
