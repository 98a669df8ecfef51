"""From the host to the device that a run is on: records of tensors, and noise keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Record = TypeVar("Record", bound=DataclassInstance)


def on_device(record: Record, device: torch.device) -> Record:
    """The dataclass with those of its fields that are tensors on `device`; the record itself on the CPU. Nothing waits:
    what lies in ordinary memory has been read when a copy's call returns."""
    if device.type == "cpu":
        return record
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return replace(
        record, **{name: x.to(device, non_blocking=True) for name, x in values.items() if isinstance(x, torch.Tensor)}
    )


def key_bits(keys: Sequence[int]) -> torch.Tensor:
    """64-bit unsigned numbers as the int64 tensor [R] of the same bits, on the host."""
    return torch.from_numpy(np.array(keys, np.uint64).view(np.int64))
