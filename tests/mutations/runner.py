"""Runs faults and says which check caught each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numba
import torch

from exactrl.ops.cpu import jit
from tests.mutations.fault import Fault, Hits
from tests.mutations.scenarios import World


@dataclass(frozen=True)
class Outcome:
    """`said` is the alarm in the checks' own words ("": none); `hits` how often the fault changed something."""

    fault: Fault
    said: str
    hits: int
    seconds: float

    @property
    def problem(self) -> str:
        """Why the suite fails; "" when the expected check caught the fault."""
        if not self.hits:
            return "the fault was never applied"
        if not self.said:
            return f"NOT caught; expected {self.fault.caught_by.name}"
        if not self.fault.caught_by.matches(self.said):
            return f"caught, but not by {self.fault.caught_by.name}: {self.said}"
        return ""


@contextmanager
def one_thread() -> Iterator[None]:
    """The work is tiny: regions of several threads would only wait for each other on a busy machine."""
    before = numba.get_num_threads(), torch.get_num_threads()
    jit.set_num_threads(1)
    try:
        yield
    finally:
        numba.set_num_threads(before[0])
        torch.set_num_threads(before[1])


def run(fault: Fault) -> Outcome:
    """Applies a fault, runs the check that must catch it, and takes the fault out again."""
    world, hits, begin = World(fault.setup), Hits(), time.perf_counter()
    with one_thread(), fault.apply(world, hits):
        said = fault.caught_by.scenario(world)
    return Outcome(fault, said, hits.count, time.perf_counter() - begin)


def run_all(faults: Sequence[Fault], show: Callable[[str], None]) -> bool:
    """Prints a row per fault, then the share caught; True when all were caught by the check that was expected."""
    width = max(len(f.id) for f in faults)
    begin = time.perf_counter()
    caught = 0
    for fault in faults:
        outcome = run(fault)
        caught += not outcome.problem
        show(f"{fault.id:<{width}}  {outcome.seconds:6.2f}  {outcome.problem or fault.caught_by.name}")
    show(f"\n{caught} of {len(faults)} faults caught by the named check: {100 * caught / len(faults):.2f} %, "
         f"{time.perf_counter() - begin:.0f} s")  # fmt: skip
    return caught == len(faults)
