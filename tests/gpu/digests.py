"""Digests of linear outputs on seeded inputs: the same on every machine of one device class.

`python -m tests.gpu.digests FILE` writes those of this machine; tests/gpu/digests-sm90.json is committed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

from exactrl.contract import LinearShape
from exactrl.parity.adversarial import KINDS, linear_inputs

COMMITTED = Path(__file__).parent / "digests-sm90.json"
SHAPES = [
    LinearShape(1024, 3072),
    LinearShape(2560, 4096),
    LinearShape(4096, 1024),
    LinearShape(5000, 1024, "float32"),
    *(LinearShape(1024, 3072, leaves=n) for n in (2, 4, 8)),
    LinearShape(512, 4096, "float32", leaves=8),
]
ROWS = (1, 7, 64, 300)


def digests(device: str = "cuda") -> dict[str, str]:
    """Of the reference kernel. Inputs are drawn on the CPU, so that they are the same everywhere."""
    from exactrl.ops.cuda.matmul import reference

    found = {}
    for shape in SHAPES:
        for kind in KINDS:
            x, w = (t.to(device) for t in linear_inputs(shape, ROWS[-1], kind, "cpu"))
            for m in ROWS:
                y = reference(x[:m], w, getattr(torch, shape.out_dtype), shape.leaves)
                found[f"{shape}, {m} rows, {kind}"] = hashlib.sha256(
                    y.contiguous().view(torch.uint8).cpu().numpy().tobytes()
                ).hexdigest()[:32]
            found[f"{shape}, inputs, {kind}"] = hashlib.sha256(
                x.cpu().view(torch.uint8).numpy().tobytes() + w.cpu().view(torch.uint8).numpy().tobytes()
            ).hexdigest()[:32]
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(digests(), indent=1) + "\n")
