"""Runs Triton kernels on the CPU, in Triton's interpreter. Import before any module that imports triton."""

from __future__ import annotations

import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels run compiled, in tests/gpu", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
interpreter = pytest.importorskip(
    "triton.runtime.interpreter", reason="triton is not installed (pip install 'triton>=3.6' on Linux x86-64)"
)

_patch_lang_tensor = interpreter._patch_lang_tensor


def _with_scalars(tensor, scope) -> None:
    """Triton 3.6 keeps scalars as arrays of one element, which numpy 2.4 and later refuse to turn into an int."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _with_scalars
