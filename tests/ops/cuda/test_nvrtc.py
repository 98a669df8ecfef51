"""What is handed to NVRTC, with a stand-in for it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from exactrl.errors import EnvironmentProblem
from exactrl.ops.cuda import nvrtc

CODE = b"cubin"


def stand_in(monkeypatch, status: int = 0, log: bytes = b"\0") -> list[bytes]:
    """Returns the objects that were given to be written into."""
    written: list[bytes] = []
    module = ModuleType("cuda.bindings.nvrtc")
    module.nvrtcResult = SimpleNamespace(NVRTC_SUCCESS=0)
    module.nvrtcCreateProgram = lambda *arguments: (0, "program")
    module.nvrtcCompileProgram = lambda *arguments: (status,)
    module.nvrtcGetProgramLogSize = lambda program: (0, len(log))
    module.nvrtcGetProgramLog = lambda program, into: (written.append(into), (0,))[1]
    module.nvrtcGetCUBINSize = lambda program: (0, len(CODE))
    module.nvrtcGetCUBIN = lambda program, into: (written.append(into), (0,))[1]
    module.nvrtcDestroyProgram = lambda program: (0,)
    bindings = ModuleType("cuda.bindings")
    bindings.nvrtc = module
    for name, entry in (("cuda", ModuleType("cuda")), ("cuda.bindings", bindings), ("cuda.bindings.nvrtc", module)):
        monkeypatch.setitem(sys.modules, name, entry)
    monkeypatch.setattr(nvrtc, "checked", lambda result: result[1] if len(result) > 1 else None)
    return written


def test_nothing_of_one_byte_is_written_into(monkeypatch) -> None:
    """Python has one object for all equal bytes of length 1: a NUL written there would be every b" " of the process."""
    written = stand_in(monkeypatch)
    code, text = nvrtc.compile_cubin("", "empty")
    assert (len(code), text) == (len(CODE), "")
    assert len(written) == 2
    assert min(len(into) for into in written) > 1


def test_a_source_that_does_not_compile_is_named(monkeypatch) -> None:
    stand_in(monkeypatch, status=6)
    with pytest.raises(EnvironmentProblem, match="name does not compile for sm_90a"):
        nvrtc.compile_cubin("", "name")
