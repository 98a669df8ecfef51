"""The backward of packed attention: ours, PyTorch's flash kernel from its own forward, and Flash Attention 3's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from bench.attention_points import Point, event_seconds
from exactrl.ops.cuda.attention import AttentionImplementation
from exactrl.ops.cuda.attention_backward import packed_backward

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def torch_flash(point: Point, d_out: torch.Tensor, deterministic: bool) -> Callable[[], Gradients]:
    """PyTorch's flash backward on output and log-sum-exp of PyTorch's flash forward."""
    q, (k, v), rows = point.q, point.caches[0], point.rows
    longest, scale = int(rows.counts.max()), q.shape[-1] ** -0.5
    out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, rows.starts, rows.starts, longest, longest, 0.0, True, False, scale=scale
    )

    def run() -> Gradients:
        torch.use_deterministic_algorithms(deterministic)
        try:
            return torch.ops.aten._flash_attention_backward(
                d_out, q, k, v, out, lse, rows.starts, rows.starts, longest, longest, 0.0, True, state, unused,
                scale=scale,
            )  # fmt: skip
        finally:
            torch.use_deterministic_algorithms(False)

    return run


def fa3_flash(point: Point, d_out: torch.Tensor, deterministic: bool) -> Callable[[], Gradients]:
    """Flash Attention 3's backward on output and log-sum-exp of its forward with one split."""
    import flash_attn_interface as fa3

    q, (k, v), rows = point.q, point.caches[0], point.rows
    longest, scale = int(rows.counts.max()), q.shape[-1] ** -0.5
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, rows.starts, rows.starts, longest, longest, causal=True, num_splits=1, return_attn_probs=True
    )

    def run() -> Gradients:
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        fa3._flash_attn_backward(
            d_out, q, k, v, out, lse, rows.starts, rows.starts, None, None, longest, longest, *grads, scale, True,
            deterministic=deterministic,
        )  # fmt: skip
        return grads

    return run


def backward_row(point: Point, implementation: AttentionImplementation) -> dict[str, Any]:
    """Times, TFLOP/s (five products of the causal half), largest relative distance of our gradients from PyTorch's,
    and whether ours are the same bits twice."""
    q, (k, v), rows = point.q, point.caches[0], point.rows
    point.ours(implementation)(point.caches[0])
    d_out = torch.randn(q.shape, generator=torch.Generator(q.device).manual_seed(3), device=q.device).to(q.dtype)
    functions: dict[str, Callable[[], Gradients]] = {
        "ours": lambda: packed_backward(d_out, q, k, v, point.out, point.lse, rows),
        "torch_deterministic": torch_flash(point, d_out, True),
        "torch": torch_flash(point, d_out, False),
    }
    for name, deterministic in (("fa3_deterministic", True), ("fa3", False)):
        with suppress(Exception):  # a wheel without a backward has no figure
            function = fa3_flash(point, d_out, deterministic)
            function()
            torch.cuda.synchronize()
            functions[name] = function
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        t = event_seconds(functions, 9)
        found, again, theirs = (functions[name]() for name in ("ours", "ours", "torch_deterministic"))
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
    distance = max(
        float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, theirs, strict=True)
    )
    same = all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(found, again, strict=True))
    flops = 2.5 * 2.0 * sum(int(n) ** 2 for n in rows.counts) * q.shape[1] * q.shape[2]
    return {
        "sequences": len(rows.counts), "milliseconds": {n: round(x * 1e3, 3) for n, x in t.items()},
        "tflops": {n: round(flops / x / 1e12, 1) for n, x in t.items()},
        "speed_ratio": round(t["torch_deterministic"] / t["ours"], 4), "distance_from_torch": float(f"{distance:.3g}"),
        "same_bits_twice": same,
    }  # fmt: skip
