"""A command line whose `exactrl.launch` is a fake, run inside the test process."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest

from exactrl.cli import main


@dataclass
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def run(capfd):
    """Runs `exactrl ARGS` and returns exit code, stdout and stderr."""

    def call(*args: str) -> Outcome:
        code = main(list(args))
        sys.stdout.flush()
        captured = capfd.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def launch(monkeypatch):
    """The fake module; tests set the functions that they need."""
    fake = ModuleType("exactrl.launch")
    monkeypatch.setitem(sys.modules, "exactrl.launch", fake)
    return fake
