"""Digests of attention on seeded inputs: the same on every machine of one device class.

`python -m tests.gpu.attention_digests FILE` writes those of this machine; digests-attention-sm90.json is committed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch

from exactrl.contract import AttentionShape
from exactrl.ops.cuda.attention import AttentionRows
from exactrl.parity.attention_data import KINDS, attention_inputs

COMMITTED = Path(__file__).parent / "digests-attention-sm90.json"
SHAPES = [
    AttentionShape(8, 2, 128),
    AttentionShape(5, 1, 64),
    AttentionShape(4, 4, 256),
]
LENGTHS = (1, 63, 600, 1100)


def digests(device: str = "cuda") -> dict[str, str]:
    """Of the reference kernel on whole packed sequences. Inputs are drawn on the CPU: the same everywhere."""
    from exactrl.ops.cuda.attention import attention_implementations

    reference, found = attention_implementations()["reference"], {}
    rows = AttentionRows.build(np.array(LENGTHS), np.array(LENGTHS), None, device)
    for shape in SHAPES:
        for kind in KINDS:
            inputs = attention_inputs(shape, LENGTHS, kind, "cpu")
            q, k, v = (t.to(device) for t in inputs)
            out, lse = torch.empty_like(q), torch.empty(shape.heads, len(q), device=device)
            reference.attend(q, k, v, rows, out, lse, np.arange(len(LENGTHS)))
            for name, values in {"inputs": inputs, "out": (out,), "lse": (lse,)}.items():
                found[f"{shape}, {kind}, {name}"] = digest(*values)
    return found


def digest(*tensors: torch.Tensor) -> str:
    h = hashlib.sha256()
    for t in tensors:
        h.update(t.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return h.hexdigest()[:32]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(digests(), indent=1) + "\n")
