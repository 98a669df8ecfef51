"""What bench.ops measures: for each fused op its inputs, our call, torch's expression, and the bytes it must move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench import ops_torch as expressions
from exactrl.ops.cuda import norm, qkv, swiglu, triton_norm, triton_qkv, triton_swiglu
from exactrl.ops.cuda.head import CHUNK_BYTES, chunk_rows
from exactrl.ops.cuda.sampling import sample_exact
from exactrl.ops.cuda.triton_logprob import blocks, logits_gradient, merge
from exactrl.ops.cuda.triton_rows import column_sums
from exactrl.ops.qkv import HeadShape, RopeTable
from exactrl.parity.gpu_timing import COLD_BYTES

BF16, F32 = torch.bfloat16, torch.float32
EPS, PAGE, VOCABULARY = 1e-6, 64, 151936
MODELS = {"0.6B": (1024, HeadShape(16, 8, 128), 3072), "4B": (2560, HeadShape(32, 8, 128), 9728)}
"""name: hidden, heads, intermediate."""
TOKENS = (1, 32, 256, 8192)
LOGIT_ROWS = (1, 32, 256, chunk_rows(VOCABULARY, CHUNK_BYTES))
WARM_BYTES = 25_000_000
"""Inputs below half of the L2 are still there when the op that follows their producer reads them."""
Inputs = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One op at one size. `ours` and `theirs` take one set of `inputs` and give tensors of equal shapes and dtypes;
    `written` gives what they wrote besides."""

    inputs: list[Inputs]
    ours: Callable[..., Sequence[torch.Tensor]]
    theirs: Callable[..., Sequence[torch.Tensor]]
    moved_bytes: int
    written: Callable[..., Sequence[torch.Tensor]] = lambda *_: ()

    @property
    def warm(self) -> bool:
        return len(self.inputs) == 1


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=F32).mul_(scale).to(dtype)


def sets(read_bytes: int, make: Callable[[], Inputs], most: int = 16) -> list[Inputs]:
    """One set where the op reads from the L2 in life, too; otherwise as many as leave nothing of one there."""
    count = 1 if read_bytes < WARM_BYTES else max(2, min(most, -(-COLD_BYTES // read_bytes)))
    return [make() for _ in range(count)]


def rms_norm(model: str, t: int) -> Point:
    n = MODELS[model][0]
    w = normal(n)
    inputs = sets(2 * t * n, lambda: (normal(t, n, scale=3), w))
    return Point(
        inputs, lambda h, w: (norm.rms_norm(h, w, EPS),), lambda h, w: (expressions.rms_norm(h, w, EPS),),
        (2 * t * n + n) * 2,
    )  # fmt: skip


def add_rms_norm(model: str, t: int) -> Point:
    n = MODELS[model][0]
    w = normal(n)
    inputs = sets(4 * t * n, lambda: (normal(t, n, scale=3), normal(t, n), w))
    return Point(
        inputs, lambda h, x, w: norm.add_rms_norm(h, x, w, EPS), lambda h, x, w: expressions.add_rms_norm(h, x, w, EPS),
        (4 * t * n + n) * 2,
    )  # fmt: skip


def rms_norm_backward(model: str, t: int) -> Point:
    """Of add_rms_norm: with the gradient of the residual itself, and that of the weight."""
    n = MODELS[model][0]
    w = normal(n)
    inputs = sets(6 * t * n, lambda: (normal(t, n, scale=3), w, normal(t, n), normal(t, n)))

    def ours(h, w, dy, extra):
        dh, _, parts = triton_norm.backward(h, w, dy, extra, EPS, BF16, True)
        assert parts is not None
        return dh, column_sums(parts)

    return Point(
        inputs, ours, lambda h, w, dy, extra: expressions.rms_norm_backward(h, w, dy, extra, EPS),
        4 * t * n * 2 + n * 6,
    )  # fmt: skip


def _angles(shape: HeadShape) -> RopeTable:
    table = RopeTable.build(1e6, shape.dim, 40960)
    return RopeTable(table.cos.cuda(), table.sin.cuda())


def _qkv_inputs(model: str, t: int) -> tuple[list[Inputs], HeadShape, RopeTable, int]:
    shape = MODELS[model][1]
    width = (shape.heads + 2 * shape.kv_heads) * shape.dim
    wq, wk = normal(shape.dim), normal(shape.dim)
    make = lambda: (normal(t, width, scale=3), wq, wk, torch.randint(0, 40960, (t,), device="cuda"))  # noqa: E731
    return sets(2 * t * width, make), shape, _angles(shape), (2 * t * width) * 2 + t * (shape.dim * 4 + 8)


def qkv_training(model: str, t: int) -> Point:
    inputs, shape, rope, moved = _qkv_inputs(model, t)
    return Point(
        inputs, lambda x, wq, wk, at: qkv.qkv(x, wq, wk, rope, at, shape, EPS),
        lambda x, wq, wk, at: expressions.qkv(x, wq, wk, rope.cos, rope.sin, at, shape, EPS), moved,
    )  # fmt: skip


def qkv_into_cache(model: str, t: int) -> Point:
    inputs, shape, rope, moved = _qkv_inputs(model, t)
    pages = max(512, 2 * t // PAGE)
    keys, values = (torch.zeros(pages, PAGE, shape.kv_heads, shape.dim, device="cuda", dtype=BF16) for _ in "kv")
    inputs = [(*each, torch.randperm(pages * PAGE, device="cuda")[:t].contiguous()) for each in inputs]

    k, v = (pages.view(-1, shape.kv_heads, shape.dim) for pages in (keys, values))

    def ours(x, wq, wk, at, slots):
        return (qkv.qkv_into_cache(x, wq, wk, rope, at, shape, EPS, keys, values, slots),)

    def theirs(x, wq, wk, at, slots):
        return (expressions.qkv_into_cache(x, wq, wk, rope.cos, rope.sin, at, shape, EPS, k, v, slots),)

    return Point(inputs, ours, theirs, moved + 8 * t, lambda *a: (k[a[4]], v[a[4]]))


def qkv_backward(model: str, t: int) -> Point:
    inputs, shape, rope, moved = _qkv_inputs(model, t)
    gradients = [tuple(normal(t, n, shape.dim) for n in (shape.heads, shape.kv_heads, shape.kv_heads)) for _ in inputs]
    inputs = [(*each, *d) for each, d in zip(inputs, gradients, strict=True)]

    def ours(x, wq, wk, at, dq, dk, dv):
        dx, parts_q, parts_k = triton_qkv.backward(x, wq, wk, rope, at, shape, EPS, dq, dk, dv)
        return dx, column_sums(parts_q), column_sums(parts_k)

    def theirs(x, wq, wk, at, dq, dk, dv):
        return expressions.qkv_backward(x, wq, wk, rope.cos, rope.sin, at, shape, EPS, dq, dk, dv)

    return Point(inputs, ours, theirs, moved + inputs[0][0].numel() * 2)


def swiglu_forward(model: str, t: int) -> Point:
    n = MODELS[model][2]
    inputs = sets(4 * t * n, lambda: (normal(t, 2 * n, scale=3),))
    return Point(inputs, lambda x: (swiglu.swiglu(x),), lambda x: (expressions.swiglu(x),), 3 * t * n * 2)


def swiglu_backward(model: str, t: int) -> Point:
    n = MODELS[model][2]
    inputs = sets(6 * t * n, lambda: (normal(t, 2 * n, scale=3), normal(t, n)))
    return Point(
        inputs, lambda x, dy: (triton_swiglu.backward(x, dy),), lambda x, dy: (expressions.swiglu_backward(x, dy),),
        5 * t * n * 2,
    )  # fmt: skip


def _logits(rows: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits as flat as an untrained model's, temperatures, targets)."""
    temperatures = torch.full((rows,), temperature, device="cuda")
    return normal(rows, VOCABULARY, scale=2, dtype=F32), temperatures, torch.randint(0, VOCABULARY, (rows,)).cuda()


def sampling(model: str, rows: int, temperature: float = 1.0) -> Point:
    def make() -> Inputs:
        logits, temperatures, _ = _logits(rows, temperature)
        return logits, temperatures, torch.randint(0, 1 << 62, (rows,)).cuda(), torch.randint(0, 40960, (rows,)).cuda()

    inputs = sets(4 * rows * VOCABULARY, make, most=4)
    return Point(inputs, lambda *a: sample_exact(*a)[:2], expressions.sample, rows * (4 * VOCABULARY + 32))


def logprobs(model: str, rows: int, temperature: float = 1.0) -> Point:
    def ours(logits, temperatures, targets):
        found = merge(blocks(logits, temperatures, entropy=True), logits, temperatures, targets)
        return found[0], found[2]

    inputs = sets(4 * rows * VOCABULARY, partial(_logits, rows, temperature), most=4)
    return Point(inputs, ours, expressions.logprobs, rows * (4 * VOCABULARY + 20))


def logits_backward(model: str, rows: int) -> Point:
    def make() -> Inputs:
        logits, temperatures, targets = _logits(rows, 1.0)
        _, lse, entropy = merge(blocks(logits, temperatures, entropy=True), logits, temperatures, targets)
        return logits, temperatures, targets, lse, entropy, torch.randn(rows).cuda(), torch.randn(rows).cuda()

    def ours(logits, temperatures, targets, lse, entropy, d_logprobs, d_entropy):
        return (logits_gradient(logits, temperatures, targets, lse, entropy, d_logprobs, d_entropy, BF16),)

    inputs = sets(4 * rows * VOCABULARY, make, most=4)
    return Point(
        inputs, ours, lambda *a: (expressions.logits_gradient(*a),),
        rows * (6 * VOCABULARY + 32),
    )  # fmt: skip


FORWARDS: dict[str, Callable[[str, int], Point]] = {
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "qkv_into_cache": qkv_into_cache,
    "qkv": qkv_training,
    "swiglu": swiglu_forward,
}
HEADS: dict[str, Callable[[str, int], Point]] = {
    "sampling": sampling,
    "logprobs": logprobs,
    "sampling at 0.7": partial(sampling, temperature=0.7),
    "logprobs at 0.7": partial(logprobs, temperature=0.7),
}
"""At temperature 1, which training uses, nothing is divided."""
BACKWARDS: dict[str, Callable[[str, int], Point]] = {
    "rms_norm_backward": rms_norm_backward,
    "qkv_backward": qkv_backward,
    "swiglu_backward": swiglu_backward,
}
OPS = {**FORWARDS, **HEADS, **BACKWARDS, "logits_backward": logits_backward}


def sizes(op: str) -> list[tuple[str, int]]:
    """(model, tokens) of each point of an op; what reads logits is the same for both models."""
    if op.endswith("at 0.7"):
        return [("4B", LOGIT_ROWS[-2])]
    if op in HEADS:
        return [("4B", rows) for rows in LOGIT_ROWS]
    if op == "logits_backward":
        return [("4B", LOGIT_ROWS[-1])]
    return [(model, t) for model in ("4B", "0.6B") for t in (TOKENS if op in FORWARDS else TOKENS[-1:])]
