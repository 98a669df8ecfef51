"""Everything here needs a GPU of the device class sm90 and Triton."""

from __future__ import annotations

import pytest
import torch

from exactrl.ops.cuda import determinism

if torch.cuda.is_available():
    determinism.apply()  # before CUDA is used


def pytest_collection_modifyitems(items) -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
        return
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason="needs an H100 or H200"))
