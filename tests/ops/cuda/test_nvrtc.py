"""What is handed to NVRTC and to the driver, with stand-ins for them."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

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


class Numbers(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int32),)


class Descriptor:
    """A tensor map's, at an address of its own."""

    def __init__(self, value: int) -> None:
        self.memory = ctypes.c_int32(value)

    def getPtr(self) -> int:
        return ctypes.addressof(self.memory)


def test_a_launch_made_ready_passes_what_its_arguments_hold_when_it_is_made(monkeypatch) -> None:
    seen, status, stream = [], [0], [1]

    def launch(config, function, pointers, extra):
        places = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
        seen.append((config.hStream, *(ctypes.c_int32.from_address(places[i]).value for i in range(3))))
        return (status[0],)

    driver = ModuleType("cuda.bindings.driver")
    driver.cuLaunchKernelEx, driver.CUstream = launch, lambda handle: handle
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver
    for name, entry in (("cuda", ModuleType("cuda")), ("cuda.bindings", bindings), ("cuda.bindings.driver", driver)):
        monkeypatch.setitem(sys.modules, name, entry)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: stream[0], raising=False)
    numbers = Numbers(10)
    ready = nvrtc.Launch("function", SimpleNamespace(), [numbers, nvrtc.TensorMap(Descriptor(20)), 30])
    ready()
    numbers.x, stream[0] = 11, 2
    ready.replace(1, nvrtc.TensorMap(Descriptor(21)))
    ready()
    assert seen == [(1, 10, 20, 30), (2, 11, 21, 30)]
    status[0] = 700
    with pytest.raises(EnvironmentProblem, match="700"):
        ready()
