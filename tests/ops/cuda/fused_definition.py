"""The fused ops' definition on `sm90`, written out with element-wise ops on the CPU that round as IEEE says.

Sums are explicit additions of pairs. Divisions and square roots are numpy's: torch.sqrt of float32 on the CPU is not
always rounded correctly. exp2 is the hardware's on a GPU, and numpy's here and in the interpreter.
"""

from __future__ import annotations

import numpy as np
import torch

from exactrl.ops.qkv import HeadShape, RopeTable


def row_tree(v: torch.Tensor) -> torch.Tensor:
    """fp32 [..., n] -> [...]."""
    n = v.shape[-1]
    v = torch.nn.functional.pad(v, (0, (1 << (n - 1).bit_length()) - n))
    while v.shape[-1] > 1024:
        half = v.shape[-1] // 2
        v = v[..., :half] + v[..., half:]
    while v.shape[-1] > 1:
        v = v[..., ::2] + v[..., 1::2]
    return v[..., 0]


def column_sums(parts: torch.Tensor) -> torch.Tensor:
    """fp32 [R, N] -> [N], R > 0."""
    while len(parts) > 1:
        parts = torch.nn.functional.pad(parts, (0, 0, 0, -len(parts) % 64))
        for _ in range(6):
            parts = parts[::2] + parts[1::2]
    return parts[0]


def inverse_rms(v: torch.Tensor, eps: float) -> torch.Tensor:
    """fp32 [..., n] -> [..., 1]."""
    mean = row_tree(v * v).numpy() / np.float32(v.shape[-1])
    return torch.from_numpy(np.float32(1) / np.sqrt(mean + np.float32(eps)))[..., None]


def rms_norm(h: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    v = h.float()
    return ((v * inverse_rms(v, eps)) * w.float()).to(w.dtype)


def add_rms_norm(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    h = (h.float() + x.float()).to(h.dtype)
    return h, rms_norm(h, w, eps)


def rotated(n: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """n [T, heads, D], cos and sin [T, D / 2]."""
    a, b = n.float().chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1).to(n.dtype)


def qkv(
    x: torch.Tensor, wq: torch.Tensor, wk: torch.Tensor, rope: RopeTable, positions, shape: HeadShape, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = x.unflatten(-1, (-1, shape.dim))
    q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
    cos, sin = rope.cos[positions], rope.sin[positions]
    q = rotated(rms_norm(q, wq, eps).to(x.dtype), cos, sin)
    return q, rotated(rms_norm(k, wk, eps).to(x.dtype), cos, sin), v


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    exponent = -gate * torch.tensor(float(np.float32(np.log2(np.e))))
    e = np.exp2(exponent.numpy())
    return (torch.from_numpy(gate.numpy() / (np.float32(1) + e)) * up).to(gate_up.dtype)


def norm_backward(h, w, dy, extra, eps: float, job: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """(dh in h's dtype, fp32 dw)."""
    v, g = h.float(), dy.float()
    r = inverse_rms(v, eps)
    unit = v * r
    weighted = g * w.float()
    mean = torch.from_numpy(row_tree(weighted * unit).numpy() / np.float32(v.shape[-1]))[..., None]
    d = r * (weighted - unit * mean)
    if extra is not None:
        d = d + extra.float()
    parts = []
    for start in range(0, len(h), job):
        total = torch.zeros(h.shape[1])
        for row in range(start, min(start + job, len(h))):
            total = total + g[row] * unit[row]
        parts.append(total)
    return d.to(h.dtype), column_sums(torch.stack(parts))
