"""Memory of a GPU at addresses of its own, which can be given back while the addresses, and graphs captured with them,
stay: the driver's virtual memory management.

What a KV cache needs to make room for a trainer: torch's allocator gives memory back only together with its address.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from exactrl.ops.cuda.nvrtc import checked

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class MappedMemory:
    """`size` bytes on the current device, not initialised, rounded up to what the driver maps. Memory and addresses are
    given up with the object and the last tensor over it."""

    def __init__(self, size: int) -> None:
        """Raises torch.OutOfMemoryError."""
        from cuda.bindings import driver

        torch.cuda.current_stream()  # makes torch's context the current one
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = torch.cuda.current_device()
        flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        granularity = checked(driver.cuMemGetAllocationGranularity(self._properties, flag))
        self.size = -(-size // granularity) * granularity
        self.address = int(checked(driver.cuMemAddressReserve(self.size, 0, 0, 0)))
        self._mapped: list[bool] = []  # shared with _forget, which must not hold the object
        self._finalizer = weakref.finalize(self, _forget, self.address, self.size, self._mapped)
        self._finalizer.atexit = False  # the driver does it
        self.take()

    @property
    def taken(self) -> bool:
        return bool(self._mapped)

    def take(self) -> None:
        """Puts memory behind the addresses, not what was there before. Raises torch.OutOfMemoryError."""
        from cuda.bindings import driver

        if self.taken:  # an interrupted call may come again
            return
        status, handle = driver.cuMemCreate(self.size, self._properties, 0)
        if int(status) == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{self.size:,} bytes of GPU memory are not free")
        checked((status,))
        try:
            checked(driver.cuMemMap(self.address, self.size, 0, handle, 0))
        finally:  # the mapping keeps it
            checked(driver.cuMemRelease(handle))
        access = driver.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            checked(driver.cuMemSetAccess(self.address, self.size, [access], 1))
        except BaseException:
            checked(driver.cuMemUnmap(self.address, self.size))
            raise
        self._mapped.append(True)

    def give_back(self) -> None:
        """Nothing on the device may use the memory meanwhile; waits for what does."""
        if not self.taken:
            return
        torch.cuda.synchronize()
        _unmap(self.address, self.size, self._mapped)

    def tensor(self) -> torch.Tensor:
        """uint8 [size], over this memory."""
        return torch.as_tensor(_Bytes(self), device="cuda")


class _Bytes:
    """What torch makes a tensor of without copying; the tensor keeps it."""

    def __init__(self, memory: MappedMemory) -> None:
        self.memory = memory
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (memory.size,), "typestr": "|u1", "data": (memory.address, False), "version": 3,
        }  # fmt: skip


def _unmap(address: int, size: int, mapped: list[bool]) -> None:
    from cuda.bindings import driver

    checked(driver.cuMemUnmap(address, size))
    mapped.clear()


def _forget(address: int, size: int, mapped: list[bool]) -> None:
    from cuda.bindings import driver

    torch.cuda.synchronize()
    if mapped:
        _unmap(address, size, mapped)
    checked(driver.cuMemAddressFree(address, size))
