"""Certification of the shapes that bench.attention measures, of both orders, as `exactrl certify` does it."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from exactrl.cli.certify import attention_lines
from exactrl.contract import AttentionShape
from exactrl.launch.certifying import certify_one_attention
from exactrl.ops.cuda.attention import AttentionImplementation
from exactrl.ops.cuda.fa3_attention import HEAD_DIMS as FA3_DIMS
from exactrl.ops.cuda.machine import machine
from exactrl.parity.certificate import certificate_json


def certify(
    shapes: Sequence[AttentionShape], available: Mapping[str, AttentionImplementation], path: Path
) -> dict[tuple[AttentionShape, str], AttentionImplementation]:
    """What the canonical order's certificate chose, by shape and kind. The file grows shape by shape."""
    chosen, results = {}, []
    for shape in [*shapes, *(replace(s, order="fa3") for s in shapes if s.dim in FA3_DIMS)]:
        try:
            result = certify_one_attention(shape)
        except Exception:  # noqa: BLE001 - one shape must not stop the others
            traceback.print_exc()
            continue
        print("\n".join(attention_lines(result)), flush=True)
        results.append(result.to_json())
        path.write_text(certificate_json(machine(), [], results))
        if shape.order == "canonical":
            chosen |= {(shape, kind): available[name] for kind, name in result.choices.items()}
    return chosen
