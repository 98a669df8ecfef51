"""Batches on their way to a device: every tensor goes, nothing else changes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from exactrl.ops.transfer import on_device


@dataclass(frozen=True, slots=True)
class Record:
    a: torch.Tensor
    b: torch.Tensor
    rows: object
    lengths: tuple[int, ...]


def test_tensors_go_and_the_rest_stays() -> None:
    record = Record(torch.arange(3), torch.ones(2, dtype=torch.float32), object(), (1, 2))
    assert on_device(record, torch.device("cpu")) is record
    moved = on_device(record, torch.device("meta"))
    assert (moved.a.device.type, moved.b.device.type) == ("meta", "meta")
    assert (moved.a.dtype, moved.b.dtype) == (torch.int64, torch.float32)
    assert (moved.rows, moved.lengths) == (record.rows, record.lengths)
