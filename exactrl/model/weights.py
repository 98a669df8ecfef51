"""Hugging Face names for the model's weights, loading with every tensor checked, and digests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator

import torch

from exactrl.contract import get_contract
from exactrl.errors import ModelError
from exactrl.model.config import ModelConfig
from exactrl.model.qwen3 import Qwen3
from exactrl.ops import Ops
from exactrl.ops.checksum import checksums
from exactrl.ops.cpu.jit import flat
from exactrl.ops.weight import Weight

# (Hugging Face name, weight, first row, number of rows): a fused weight holds several tensors, one above the other.
Place = tuple[str, Weight, int, int]


def places(model: Qwen3) -> Iterator[Place]:
    """Where each Hugging Face tensor lives, in model order; the tied head is not listed twice."""
    c = model.config
    yield "model.embed_tokens.weight", model.embed, 0, c.vocab_size
    for i, layer in enumerate(model.layers):
        p = f"model.layers.{i}."
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        yield p + "input_layernorm.weight", layer.input_norm, 0, c.hidden_size
        yield p + "self_attn.q_proj.weight", layer.qkv, 0, q
        yield p + "self_attn.k_proj.weight", layer.qkv, q, kv
        yield p + "self_attn.v_proj.weight", layer.qkv, q + kv, kv
        yield p + "self_attn.q_norm.weight", layer.q_norm, 0, c.head_dim
        yield p + "self_attn.k_norm.weight", layer.k_norm, 0, c.head_dim
        yield p + "self_attn.o_proj.weight", layer.o, 0, c.hidden_size
        yield p + "post_attention_layernorm.weight", layer.post_norm, 0, c.hidden_size
        yield p + "mlp.gate_proj.weight", layer.gate_up, 0, c.intermediate_size
        yield p + "mlp.up_proj.weight", layer.gate_up, c.intermediate_size, c.intermediate_size
        yield p + "mlp.down_proj.weight", layer.down, 0, c.hidden_size
    yield "model.norm.weight", model.norm, 0, c.hidden_size
    if model.head is not model.embed:
        yield "lm_head.weight", model.head, 0, c.vocab_size


def load_weights(model: Qwen3, tensors: Iterable[tuple[str, torch.Tensor]], source: str) -> None:
    """Assigns every weight. Raises ModelError naming missing, extra, doubled or misshapen tensors; the model's weights
    are then undefined. A tied head that is present must equal the embedding."""
    table = {name: (weight, first, rows) for name, weight, first, rows in places(model)}
    pieces: dict[int, dict[int, torch.Tensor]] = {}
    seen: set[str] = set()
    tied_head: torch.Tensor | None = None
    for name, tensor in tensors:
        if name == "lm_head.weight" and name not in table and tied_head is None:
            tied_head = tensor
            continue
        if name not in table or name in seen:
            raise ModelError(f"{source}: tensor {name!r} is {'given twice' if name in seen else 'not of this model'}")
        weight, first, rows = table[name]
        expected = (rows, *weight.shape[1:])
        if tuple(tensor.shape) != expected or not tensor.is_floating_point():
            raise ModelError(f"{source}: {name} is {tensor.dtype} {tuple(tensor.shape)}, expected floats {expected}")
        seen.add(name)
        parts = pieces.setdefault(id(weight), {})
        parts[first] = tensor
        if sum(t.shape[0] for t in parts.values()) == weight.shape[0]:
            ordered = [parts[k] for k in sorted(parts)]
            weight.assign(ordered[0] if len(ordered) == 1 else torch.cat(ordered))
            del pieces[id(weight)]
    missing = [name for name in table if name not in seen]
    if missing:
        why = ", which tie_word_embeddings = false asks for" if missing[0] == "lm_head.weight" else ""
        raise ModelError(f"{source}: {len(missing)} tensors are missing, the first is {missing[0]}{why}")
    # Against the master where there is one: in bfloat16 two different heads may round to the same.
    embedding = model.embed.value() if model.embed.master is None else model.embed.master
    if tied_head is not None and not torch.equal(tied_head.to(embedding), embedding):
        raise ModelError(f"{source}: lm_head.weight differs from the embedding although tie_word_embeddings is true")


def refresh(model: Qwen3) -> None:
    """Compute weights and panels from the masters; call after every optimizer update."""
    for weight in unique_weights(model):
        weight.refresh()


def unique_weights(model: Qwen3) -> list[Weight]:
    return list(dict.fromkeys(weight for _, weight, _, _ in places(model)))


def named_weights(model: Qwen3) -> Iterator[tuple[str, torch.Tensor]]:
    """Compute weights by Hugging Face name (views where rows are kept)."""
    return _named(model, Weight.value)


def named_masters(model: Qwen3) -> Iterator[tuple[str, torch.Tensor]]:
    """fp32 masters by Hugging Face name."""

    def master(weight: Weight) -> torch.Tensor:
        assert weight.master is not None, "a rollout model has no master weights"
        return weight.master.detach()

    return _named(model, master)


def _named(model: Qwen3, value: Callable[[Weight], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    last: tuple[Weight, torch.Tensor] | None = None
    for name, weight, first, rows in places(model):
        if last is None or last[0] is not weight:
            last = (weight, value(weight))
        yield name, last[1][first : first + rows]


def master_digest(model: Qwen3) -> str:
    """Digest of the fp32 masters by Hugging Face name: the same for any sharding or fusing."""
    return digest_of((name, [tensor]) for name, tensor in named_masters(model))


def compute_digest(model: Qwen3) -> str:
    """Digest of the storage that the forward kernels read, packed panels included."""
    return digest_of((str(i), weight.read_by_kernels()) for i, weight in enumerate(unique_weights(model)))


def digest_of(items: Iterable[tuple[str, list[torch.Tensor]]]) -> str:
    """Digest of named tensors: names, dtypes, shapes and bytes, in order. Of bytes on a GPU a checksum made there."""
    named = [(name, tensor) for name, tensors in items for tensor in tensors]
    sums = iter(checksums([tensor for _, tensor in named if tensor.is_cuda]))  # all read from the GPU together
    h = hashlib.blake2b(digest_size=16)
    for name, tensor in named:
        h.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        h.update(next(sums) if tensor.is_cuda else flat(tensor.contiguous()).data)
    return h.hexdigest()


def initial_weights(config: ModelConfig, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Fresh fp32 weights to train from, as transformers starts Qwen3: matrices N(0, initializer_range²), norms 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in _shapes(config):
        if len(shape) == 1:
            yield name, torch.ones(shape)
        else:
            yield name, torch.randn(shape, generator=generator) * config.initializer_range


def _shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    skeleton = Qwen3(config, Ops(get_contract("exact-v1"), exact=False), torch.float32, trainable=False)
    yield from ((name, (rows, *weight.shape[1:])) for name, weight, _, rows in places(skeleton))


def random_weights(
    config: ModelConfig,
    seed: int,
    scale: float = 1.0,
    peak: float = 1.0,
    embed: float = 1.0,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Random fp32 weights for tests of the numerics: matrices N(0, scale² / K), norms around 1.

    `peak` multiplies the QK-norm weights: attention gets the sharper the larger it is. `embed` is the standard
    deviation of the embedding, which may be the head, too. Each device has numbers of its own.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for name, shape in _shapes(config):
        x = torch.randn(shape, generator=generator, device=device)
        if len(shape) == 1:
            yield name, (1 + 0.2 * x) * (peak if "q_norm" in name or "k_norm" in name else 1.0)
        else:
            yield name, x * (embed if "embed" in name else scale / shape[1] ** 0.5)
