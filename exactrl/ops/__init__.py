"""Ops: the only place where reductions happen. One file per op: definition, torch reference, plain torch, exact.

`Ops` (binding.py) binds them to a contract. It is loaded when it is used: the GPU room must not load the CPU kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exactrl.ops.binding import Ops

__all__ = ["Ops"]


def __getattr__(name: str) -> Any:
    if name != "Ops":
        raise AttributeError(f"module 'exactrl.ops' has no attribute {name!r}")
    from exactrl.ops.binding import Ops

    return Ops
