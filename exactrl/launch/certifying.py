"""Certification of this machine's kernels for a model's shapes: `exactrl certify`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from exactrl.contract import AttentionShape, LinearShape, certificate_path, read_certificate
from exactrl.errors import CertificationError, ConfigError, UsageError
from exactrl.launch.device import require_gpu
from exactrl.model.config import find_model, read_config
from exactrl.ops.cuda.machine import machine
from exactrl.parity.attention_timing import attention_times
from exactrl.parity.certificate import (
    attention_certified_before,
    attention_shapes,
    linear_shapes,
    shapes_certified_before,
    write_certificate,
)
from exactrl.parity.certify import LinearResult, Rows, certify_linear
from exactrl.parity.certify_attention import AttentionResult, certify_attention
from exactrl.parity.gpu_timing import linear_times
from exactrl.parity.warm_up import compile_all, compile_attention

LEAVES = (1, 2, 4, 8)
INSTEAD = (
    "the CPU kernels need no certificate: they are written out operation by operation, and `exactrl check MODEL` "
    "compares their bits"
)


@dataclass(frozen=True, slots=True)
class Certification:
    path: Path
    results: list[LinearResult]
    attention: list[AttentionResult]


def certify(
    model: str | None,
    *,
    k_leaves: int = 1,
    rows: Rows | None = None,
    again: bool = False,
    on_linear: Callable[[LinearResult], None] = lambda result: None,
    on_attention: Callable[[AttentionResult], None] = lambda result: None,
) -> Certification:
    """Certifies every linear and the attention of `model`, or of the newest certificate of this device when None, and
    writes the file. What this machine's certificate holds already, for as many rows, is left alone unless `again`.

    Raises EnvironmentProblem without a GPU or Triton, CertificationError when the reference itself is not invariant.
    """
    require_gpu("certify", INSTEAD)
    shapes, attends = shapes_of(model, k_leaves), attention_shapes_of(model)
    from exactrl.ops.cuda.matmul import implementations

    rows, available, results, path = rows or Rows(), implementations(), [], certificate_path(machine())
    if path.exists() and not again:
        held = read_certificate(machine())
        shapes = [s for s in shapes if s not in held.linears or held.max_rows(s) < rows.most]
        attends = [s for s in attends if s not in held.attention]
    compile_all(shapes, rows.checked())
    for shape in shapes:
        results.append(certify_linear(shape, available, rows, linear_times))
        on_linear(results[-1])
        path = write_certificate(machine(), results[-1:])  # at once: an interrupted certification keeps what it has
    attention = []
    compile_attention(attends)
    for attended in attends:
        attention.append(certify_one_attention(attended))
        on_attention(attention[-1])
        path = write_certificate(machine(), attention=attention[-1:])
    return Certification(path, results, attention)


def certify_one_attention(shape: AttentionShape) -> AttentionResult:
    """Canonical attention has a bit reference. That of Flash Attention 3 is its own: where its bits change with the
    batch nothing of it is certified. A result without choices says why."""
    from exactrl.ops.cuda.attention import attention_implementations
    from exactrl.ops.cuda.fa3_attention import fa3_implementation

    if shape.order == "canonical":
        available = attention_implementations()
        if not available["reference"].serves(shape):
            return AttentionResult.nothing(shape, "reference", "the GPU kernels are not made for this shape")
        return certify_attention(shape, available, attention_times)
    try:
        return certify_attention(shape, {"fa3": fa3_implementation()}, attention_times, reference="fa3")
    except CertificationError as error:
        return AttentionResult.nothing(shape, "fa3", str(error))


def attention_shapes_of(model: str | None) -> list[AttentionShape]:
    """The canonical order, and that of Flash Attention 3 where it is installed and serves the shape."""
    if model is None:
        shapes = [s for s in attention_certified_before(machine()["device"]) if s.order == "canonical"]
    else:
        shapes = attention_shapes(read_config(find_model(model)))
    if find_spec("flash_attn_interface") is None:
        return shapes
    from exactrl.ops.cuda.fa3_attention import fa3_implementation

    offered = fa3_implementation()
    return [*shapes, *(s for s in (replace(s, order="fa3") for s in shapes) if offered.serves(s))]


def shapes_of(model: str | None, k_leaves: int) -> Sequence[LinearShape]:
    """Raises ConfigError for leaves that no kernel has or that do not divide, UsageError with nothing to certify."""
    if k_leaves not in LEAVES:
        raise ConfigError(f"--k-leaves {k_leaves}: the GPU kernels have {', '.join(map(str, LEAVES))}")
    if model is None:
        if shapes := shapes_certified_before(machine()["device"]):
            return shapes
        raise UsageError("nothing was certified on this machine before; name a model: exactrl certify MODEL")
    shapes = list(dict.fromkeys(linear_shapes(read_config(find_model(model)), k_leaves).values()))
    for shape in shapes:
        if shape.k % shape.leaves:
            raise ConfigError(f"--k-leaves {k_leaves} does not divide the {shape.k} inputs of {shape}")
    return shapes
