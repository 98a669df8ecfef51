"""CUDA C++ kernels for sm_90a: compiled at run time by NVRTC, launched on torch's current stream.

For kernels that need what Triton does not reach: a copy engine that multicasts, register budgets per warpgroup, matrix
tiles that are no power of two. NVRTC and cuda-bindings come with torch for CUDA. Compiled code is kept on disk under
the digest of everything it depends on.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from exactrl.contract import cache_folder, write_cached
from exactrl.errors import EnvironmentProblem

ARCHITECTURE = "sm_90a"
SWIZZLE_BYTES = 128
MAX_SHARED = 227 * 1024  # bytes of dynamic shared memory one block may have on sm_90


def available() -> bool:
    """Whether cuda-bindings and a GPU with sm_90a's instructions are here."""
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def load_compiler() -> None:
    """Maps NVRTC into this process, where cuda-bindings are installed."""
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        return
    checked(nvrtc.nvrtcVersion())


def compile_cubin(source: str, name: str, options: Sequence[str] = ()) -> tuple[bytes, str]:
    """(machine code, compiler's log) of one source text; `name` is the file that messages show. Needs no GPU.

    Raises EnvironmentProblem with the compiler's log when it does not compile.
    """
    from cuda.bindings import nvrtc

    flags = [f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", *options]
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    log = _writable(checked(nvrtc.nvrtcGetProgramLogSize(program)))
    checked(nvrtc.nvrtcGetProgramLog(program, log))
    text = log.decode(errors="replace").strip(" \0\n")
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise EnvironmentProblem(f"{name} does not compile for {ARCHITECTURE}:\n{text}")
    size = checked(nvrtc.nvrtcGetCUBINSize(program))
    code = _writable(size)
    checked(nvrtc.nvrtcGetCUBIN(program, code))
    nvrtc.nvrtcDestroyProgram(program)
    return code[:size], text


def _writable(size: int) -> bytes:
    """A bytes object that NVRTC may write `size` bytes into. Never one byte long: Python has a single object for each
    byte, so that the NUL of an empty log would replace every b" " of the process, and with it spaces in files and
    source code."""
    return b" " * (size + 1)


def cached_cubin(source: str, name: str, options: Sequence[str] = ()) -> bytes:
    """The machine code, from disk when the same source was compiled before."""
    from cuda.bindings import nvrtc

    version = checked(nvrtc.nvrtcVersion())
    key = hashlib.blake2b(repr((source, tuple(options), version, ARCHITECTURE)).encode(), digest_size=16).hexdigest()
    path = cache_folder() / "cubin" / f"{name}-{key}.cubin"
    if path.exists():
        return path.read_bytes()
    code, _ = compile_cubin(source, name, options)
    write_cached(path, code)
    return code


class Kernel:
    """One `extern "C"` function. `shared` is the dynamic shared memory of every launch, in bytes; `label` names the
    source in messages and in the cache."""

    def __init__(
        self, source: str, function: str, options: Sequence[str] = (), shared: int = 0, label: str = ""
    ) -> None:
        assert shared <= MAX_SHARED, (function, shared)
        from cuda.bindings import driver

        torch.cuda.current_stream()  # makes torch's context the current one
        self._shared = shared
        self._module = checked(driver.cuModuleLoadData(cached_cubin(source, label or function, options)))
        self._function = checked(driver.cuModuleGetFunction(self._module, function.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(self._function, attribute, shared))

    def launch(
        self, grid: tuple[int, int, int], threads: int, arguments: Sequence[Any], cluster: int = 1, early: bool = False
    ) -> None:
        """Once, see `ready`."""
        self.ready(grid, threads, arguments, cluster, early)()

    def ready(
        self, grid: tuple[int, int, int], threads: int, arguments: Sequence[Any], cluster: int = 1, early: bool = False
    ) -> Launch:
        """Arguments: tensors (their pointer), TensorMap and ctypes.Structure (by value), int (int32), float
        (float32). `cluster` blocks along x share a cluster. `early`: may start while the kernel before still runs; for
        kernels that wait for it (triton_early.py says what makes that safe)."""
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self._shared
        attributes = []
        if cluster > 1:
            attributes.append(attribute := driver.CUlaunchAttribute())
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster, 1, 1
        if early:
            attributes.append(attribute := driver.CUlaunchAttribute())
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
        if attributes:
            config.attrs, config.numAttrs = attributes, len(attributes)
        return Launch(self._function, config, arguments)


class Launch:
    """A launch made ready once and repeated, in every layer of a step, say: on torch's current stream and with what its
    arguments hold then. A ctypes.Structure may change in between, a TensorMap be replaced."""

    def __init__(self, function: Any, config: Any, arguments: Sequence[Any]) -> None:
        from cuda.bindings import driver

        self._values = [_argument(a) for a in arguments]
        self._pointers = (ctypes.c_void_p * len(self._values))(*(_address(v) for v in self._values))
        self._call = functools.partial(driver.cuLaunchKernelEx, config, function, ctypes.addressof(self._pointers), 0)
        self._config, self._stream_type, self._device = config, driver.CUstream, torch.cuda.current_device()
        self._stream = -1

    def replace(self, place: int, value: TensorMap) -> None:
        """Argument number `place`, a TensorMap before."""
        self._values[place] = value
        self._pointers[place] = _address(value)

    def __call__(self) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self._device)  # as Triton asks; a Stream takes longer to make
        if stream != self._stream:
            self._config.hStream, self._stream = self._stream_type(stream), stream
        checked(self._call())


class TensorMap:
    """How the copy engine walks a bf16 tensor; passed to a kernel as `const __grid_constant__` of 128 bytes."""

    def __init__(self, descriptor: Any) -> None:
        self.descriptor = descriptor


def tensor_map(t: torch.Tensor, shape: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> TensorMap:
    """A map of `t`'s memory. `shape`, `strides` (elements) and `box` name the innermost dimension first, whose stride
    must be 1; the box's innermost extent is at most 64 bf16 (the 128-byte swizzle). Outside `shape` zeros are read."""
    assert t.dtype == torch.bfloat16, t.dtype
    return map_of(t.data_ptr(), tuple(shape), tuple(strides), tuple(box))


@functools.lru_cache(maxsize=4096)
def map_of(address: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> TensorMap:
    """tensor_map of the bf16 memory at an address."""
    from cuda.bindings import driver

    assert strides[0] == 1, strides
    assert box[0] * 2 <= SWIZZLE_BYTES, box
    assert all(s * 2 % 16 == 0 for s in strides[1:]), strides
    assert address % 16 == 0, "the copy engine wants addresses in multiples of 16 bytes"
    rank = len(shape)
    descriptor = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        rank,
        address,
        [driver.cuuint64_t(n) for n in shape],
        [driver.cuuint64_t(2 * s) for s in strides[1:]],
        [driver.cuuint32_t(n) for n in box],
        [driver.cuuint32_t(1)] * rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return TensorMap(checked(descriptor))


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, (TensorMap, ctypes.Structure)):
        return value
    if isinstance(value, float):
        return ctypes.c_float(value)
    assert isinstance(value, int), f"no kernel argument of type {type(value).__name__}"
    return ctypes.c_int32(value)


def _address(value: Any) -> int:
    return int(value.descriptor.getPtr()) if isinstance(value, TensorMap) else ctypes.addressof(value)


def checked(result: tuple[Any, ...]) -> Any:
    """The values of a cuda-bindings call, whose first is the status. Raises EnvironmentProblem."""
    status, *values = result
    if int(status):
        raise EnvironmentProblem(f"a call to the CUDA driver or compiler failed: {status!r}")
    return values[0] if len(values) == 1 else tuple(values)
