"""The fused ops' definitions as plain torch expressions, every rounding written out: what torch.compile is given.

Sums over rows are torch's: the order is whatever its compiler makes of it.
"""

from __future__ import annotations

import torch

LOG2E = 1.44269502162933349609375


def inverse_rms(v: torch.Tensor, eps: float) -> torch.Tensor:
    return 1.0 / torch.sqrt((v * v).mean(-1, keepdim=True) + eps)


def rms_norm(h, w, eps: float):
    v = h.float()
    return ((v * inverse_rms(v, eps)) * w.float()).to(w.dtype)


def add_rms_norm(h, x, w, eps: float):
    h = (h.float() + x.float()).to(h.dtype)
    return h, rms_norm(h, w, eps)


def norm_gradients(v, w, g, eps: float):
    """fp32 (gradient of v, terms of the weight's gradient)."""
    r = inverse_rms(v, eps)
    unit = v * r
    weighted = g * w.float()
    return r * (weighted - unit * (weighted * unit).mean(-1, keepdim=True)), g * unit


def rms_norm_backward(h, w, dy, extra, eps: float):
    d, terms = norm_gradients(h.float(), w, dy.float(), eps)
    return (d + extra.float()).to(h.dtype), terms.sum(0)


def rotated(n, c, s):
    a, b = n.float().chunk(2, -1)
    return torch.cat([a * c - b * s, b * c + a * s], -1).to(n.dtype)


def split(x, shape):
    heads = x.unflatten(-1, (-1, shape.dim))
    return heads.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)


def qkv(x, wq, wk, cos, sin, positions, shape, eps: float):
    q, k, v = split(x, shape)
    c, s = cos[positions][:, None], sin[positions][:, None]
    return rotated(rms_norm(q, wq, eps), c, s), rotated(rms_norm(k, wk, eps), c, s), v.contiguous()


def qkv_into_cache(x, wq, wk, cos, sin, positions, shape, eps: float, keys, values, slots):
    """keys, values as rows [slots, HK, D], written in place."""
    q, k, v = qkv(x, wq, wk, cos, sin, positions, shape, eps)
    keys[slots], values[slots] = k, v
    return q


def qkv_backward(x, wq, wk, cos, sin, positions, shape, eps: float, dq, dk, dv):
    q, k, _ = split(x, shape)
    c, s = cos[positions][:, None], sin[positions][:, None]
    found = [norm_gradients(t.float(), w, rotated(d.float(), c, -s), eps) for t, w, d in ((q, wq, dq), (k, wk, dk))]
    dx = torch.cat([found[0][0].to(x.dtype), found[1][0].to(x.dtype), dv], 1).flatten(1)
    return dx, found[0][1].sum((0, 1)), found[1][1].sum((0, 1))


def swiglu(x):
    g, u = x.float().chunk(2, -1)
    return ((g / (1.0 + torch.exp2(-g * LOG2E))) * u).to(x.dtype)


def swiglu_backward(x, dy):
    g, u = x.float().chunk(2, -1)
    d = dy.float()
    s = 1.0 / (1.0 + torch.exp2(-g * LOG2E))
    t = g * s
    return torch.cat([((d * u) * (s * (1.0 + (g - t)))).to(x.dtype), (d * t).to(x.dtype)], 1)


def uniforms(keys, positions, count: int):
    """u [R, count], count a multiple of 4: Philox4x32-10 in 64-bit integers, words of 32 bits."""
    low = 0xFFFFFFFF
    # & 0: torch.compile multiplies what it knows to be an index in 32 bits, and then refuses Philox's constants
    words = torch.arange(count // 4, device=keys.device)[None, :] + (keys & 0)[:, None]
    a, b = words, positions[:, None].expand_as(words)
    c = d = torch.zeros_like(words)
    k0, k1 = (keys & low)[:, None], ((keys >> 32) & low)[:, None]
    for i in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (
            ((second >> 32) & low) ^ b ^ ((k0 + i * 0x9E3779B9) & low), second & low,
            ((first >> 32) & low) ^ d ^ ((k1 + i * 0xBB67AE85) & low), first & low,
        )  # fmt: skip
    r = torch.stack([a, b, c, d], -1).flatten(1)
    return ((r >> 9).float() + 0.5) * 2.0**-23


def sample(logits, temperatures, keys, positions):
    x = logits / temperatures[:, None]
    noise = -torch.log(-torch.log(uniforms(keys, positions, logits.shape[1])))
    token = (x + noise).argmax(1)
    return token, torch.log_softmax(x, 1).gather(1, token[:, None])[:, 0]


def logprobs(logits, temperatures, targets):
    lp = torch.log_softmax(logits / temperatures[:, None], 1)
    return lp.gather(1, targets[:, None])[:, 0], -(lp.exp() * lp).sum(1)


def logits_gradient(logits, temperatures, targets, lse, entropy, d_logprobs, d_entropy):
    t = temperatures[:, None]
    lp = (logits / t - lse[:, :1]) - lse[:, 1:]
    p = torch.exp2(lp * LOG2E)
    g, ge = d_logprobs[:, None] / t, d_entropy[:, None] / t
    d = -(p * g) - (p * ge) * (lp + entropy[:, None])
    return torch.where(torch.arange(logits.shape[1], device=d.device) == targets[:, None], d + g, d).bfloat16()
