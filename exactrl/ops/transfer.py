"""Records of tensors from the host to the device that a run is on."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Record = TypeVar("Record", bound=DataclassInstance)


def on_device(record: Record, device: torch.device) -> Record:
    """The dataclass with those of its fields that are tensors on `device`; the record itself on the CPU."""
    if device.type == "cpu":
        return record
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return replace(record, **{name: x.to(device) for name, x in values.items() if isinstance(x, torch.Tensor)})
