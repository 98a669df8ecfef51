"""Rungs of single ops and of whole layers: a row's bits do not depend on the rows computed with it.

Every op runs on ROWS rows, then on slices of them (one row, few, many, at any offset), on one thread and on all, and
beside neighbours that were replaced by huge values.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from exactrl.model.attention_state import AttentionState, CacheState, packed_state, paged_state
from exactrl.model.qwen3 import Qwen3
from exactrl.ops.cpu import jit
from exactrl.parity.compare import Tally
from exactrl.parity.subject import Subject

ROWS = 130
SLICES = ((0, 1), (129, 130), (64, 65), (3, 5), (7, 10), (60, 68), (1, 64), (63, 130), (5, 130))


def _rows(tally: Tally, what: str, op: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    """Compares op on slices of the inputs with slices of op on all rows."""
    with torch.no_grad():
        whole = op(*inputs)
        for threads in (1,) if inputs[0].is_cuda else (1, 2):
            with jit.forced_threads(threads):
                tally.tensors(op(*inputs), whole, f"{what}, threads: {threads}")
                for a, b in SLICES:
                    part = op(*(x[a:b].contiguous() for x in inputs))
                    tally.tensors(part, whole[a:b], f"{what}, rows {a} to {b - 1} alone")
        if inputs[0].is_floating_point():
            loud = inputs[0].clone()
            loud[::2] = 1e4 * loud[::2] + 1e3
            tally.tensors(op(loud, *inputs[1:])[1::2], whole[1::2], f"{what}, other neighbours")


def _values(subject: Subject, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Random values with a few large outliers, in the compute dtype: the order of sums matters."""
    generator = subject.generator()
    x = torch.randn(shape, generator=generator)
    spikes = torch.rand(shape, generator=generator) < 0.02
    model = subject.rollout_model
    return (scale * torch.where(spikes, 30 * x, x)).to(model.ops.device, model.dtype)


def linear(subject: Subject, tally: Tally) -> None:
    model = subject.rollout_model
    layer = model.layers[-1]
    for name, weight in (("qkv", layer.qkv), ("o", layer.o), ("gate_up", layer.gate_up), ("down", layer.down)):
        leaves = model.leaves if name in ("o", "down") else 1
        x = _values(subject, ROWS, weight.shape[1])
        _rows(tally, name, lambda x, w=weight, n=leaves: model.ops.linear(x, w, n), x)


def rms_norm(subject: Subject, tally: Tally) -> None:
    model = subject.rollout_model
    eps, weight = model.config.rms_norm_eps, model.layers[0].post_norm
    h = _values(subject, ROWS, model.config.hidden_size).to(model.residual_dtype)
    x = _values(subject, ROWS, model.config.hidden_size, scale=0.3)
    _rows(tally, "rms_norm", lambda h: model.ops.rms_norm(h, weight, eps), h)
    _rows(tally, "add_rms_norm, sum", lambda h, x: model.ops.add_rms_norm(h, x, weight, eps)[0], h, x)
    _rows(tally, "add_rms_norm, norm", lambda h, x: model.ops.add_rms_norm(h, x, weight, eps)[1], h, x)


def qkv(subject: Subject, tally: Tally) -> None:
    model = subject.rollout_model
    layer, shape = model.layers[0], model.shape
    model.reserve_positions(400)
    x = _values(subject, ROWS, (shape.heads + 2 * shape.kv_heads) * shape.dim)
    positions = torch.randint(0, 400, (ROWS,), generator=subject.generator()).to(model.ops.device)
    for i, name in enumerate(("q", "k", "v")):

        def op(x: torch.Tensor, p: torch.Tensor, i: int = i) -> torch.Tensor:
            eps = model.config.rms_norm_eps
            return model.ops.qkv(x, layer.q_norm, layer.k_norm, model.rope, p, shape, eps)[i]

        _rows(tally, name, op, x, positions)


def swiglu(subject: Subject, tally: Tally) -> None:
    model = subject.rollout_model
    _rows(tally, "swiglu", model.ops.swiglu, _values(subject, ROWS, 2 * model.config.intermediate_size))


def _head_inputs(subject: Subject) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    model, generator = subject.rollout_model, subject.generator()
    targets = torch.randint(0, model.config.vocab_size, (ROWS,), generator=generator)
    temperatures = 0.5 + torch.rand(ROWS, generator=generator)
    device = model.ops.device
    return _values(subject, ROWS, model.config.hidden_size), targets.to(device), temperatures.to(device)


def logprob(subject: Subject, tally: Tally) -> None:
    model = subject.rollout_model
    x, targets, t = _head_inputs(subject)
    _rows(tally, "logprob", lambda x, targets, t: model.ops.logprobs(x, model.head, targets, t)[0], x, targets, t)


def sample(subject: Subject, tally: Tally) -> None:
    """Sampled tokens and logprobs; and the trainer's logprob of the sampled token has the sampler's bits."""
    model = subject.rollout_model
    x, positions, t = _head_inputs(subject)
    t[::7] = 0
    keys = torch.arange(1, ROWS + 1, device=x.device) * 7919

    def draw(x: torch.Tensor, t: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        return list(model.ops.sample(x, model.head, t, keys, positions))

    for i, name in enumerate(("token", "logprob")):
        _rows(tally, name, lambda *inputs, i=i: draw(*inputs)[i], x, t, keys, positions)
    with torch.no_grad():
        tokens, logprobs = draw(x, t, keys, positions)
        scored, _ = model.ops.logprobs(x, model.head, tokens, torch.where(t == 0, 1.0, t))
    tally.tensors(scored, logprobs, "logprob of the sampler and of the loss")


def _sequences(subject: Subject, lengths: list[int], scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape, total = subject.rollout_model.shape, sum(lengths)
    q = _values(subject, total, shape.heads, shape.dim, scale=scale)
    return (
        q,
        _values(subject, total + 1, shape.kv_heads, shape.dim)[1:],
        _values(subject, total + 2, shape.kv_heads, shape.dim)[2:],
    )


def _packed(model: Qwen3, lengths: list[int]) -> AttentionState:
    return packed_state(model.ops, model.ops.packed_rows(np.array(lengths, np.int64), model.shape))


def _paged(model: Qwen3, length: int, seed: int) -> tuple[CacheState, np.ndarray]:
    """A NaN-filled cache and a shuffled page table [1, pages] for one sequence."""
    pages = -(-length // model.ops.page_size) + 3
    state = paged_state(model.ops, model.config.num_layers, pages, model.shape, model.dtype)
    if model.ops.exact:  # the plain path multiplies masked values by 0, which NaN survives
        state.fill(float("nan"))
    return state, np.random.default_rng(seed).permutation(pages).astype(np.int32)[None]


def _steps(length: int, chunk: int) -> list[tuple[int, int]]:
    return [(a, min(length, a + chunk)) for a in range(0, length, chunk)]


def attention(subject: Subject, tally: Tally) -> None:
    """Flat and peaked scores: packed with others, alone, in chunks, and decoded row by row from shuffled NaN pages."""
    model, lengths = subject.rollout_model, [3, 70, 17, 600, 64]
    for scale in (1.0, 12.0):
        q, k, v = _sequences(subject, lengths, scale)
        with torch.no_grad():
            whole = _packed(model, lengths).attend(0, q, k, v).split(lengths)
            for n, parts, expected in zip(
                lengths, zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True), whole, strict=True
            ):
                alone = _packed(model, [n]).attend(0, *(x.contiguous() for x in parts))
                tally.tensors(alone, expected, f"sequence of {n} alone, scores x{scale:g}")
                for chunk in (1, 50) if n < 500 else (7, 513):
                    state, tables = _paged(model, n, subject.seed)
                    out = []
                    for a, b in _steps(n, chunk):
                        state.rows = model.ops.rows(np.array([0, b - a]), np.array([a]), tables, model.shape)
                        out.append(state.attend(0, *(x[a:b].contiguous() for x in parts)))
                    tally.tensors(torch.cat(out), expected, f"sequence of {n} in chunks of {chunk}, scores x{scale:g}")


def layers(subject: Subject, tally: Tally) -> None:
    """Every op of every layer inside the model: a sequence in one packed forward, and token by token through pages."""
    model = subject.rollout_model
    n = min(70, model.config.max_positions)
    ids = torch.randint(0, model.config.vocab_size, (n,), generator=subject.generator()).to(model.ops.device)
    positions = torch.arange(n, device=ids.device)
    model.reserve_positions(n)
    whole: dict[str, torch.Tensor] = {}
    pieces: dict[str, list[torch.Tensor]] = {}

    def see_whole(name: str, x: torch.Tensor) -> torch.Tensor:
        whole[name] = x
        return x

    def see_piece(name: str, x: torch.Tensor) -> torch.Tensor:
        pieces.setdefault(name, []).append(x)
        return x

    with torch.no_grad():
        model(ids, positions, _packed(model, [n]), see_whole)
        state, tables = _paged(model, n, subject.seed)
        for a, b in [*_steps(n - 20, 13), *((i, i + 1) for i in range(n - 20, n))]:
            state.rows = model.ops.rows(np.array([0, b - a]), np.array([a]), tables, model.shape)
            model(ids[a:b], positions[a:b], state, see_piece)
    for name, x in whole.items():
        tally.tensors(torch.cat(pieces[name]), x, name)
    tally.notes.append(f"{len(whole)} ops")
