"""A small Qwen3 on the GPU with kernels that no certificate names: what tests of engine and trainer run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from exactrl.contract import AttentionShape, get_contract, noise_key
from exactrl.model.config import ModelConfig, find_model, read_config
from exactrl.model.qwen3 import Qwen3
from exactrl.model.weights import load_weights, random_weights
from exactrl.types import Request, SamplingParams

CONFIG = replace(
    read_config(find_model("tiny")), num_layers=2, hidden_size=512, intermediate_size=1024, num_heads=8, num_kv_heads=2,
    head_dim=128, vocab_size=5000, max_positions=16384,
)  # fmt: skip


def ops_of(**parameters):
    """Sequential kernels in Triton: the reference's product, splits in parallel for few rows, in order for more."""
    from exactrl.ops.cuda.attention import AttentionChoice, attention_implementations
    from exactrl.ops.cuda.binding import CudaOps
    from exactrl.ops.cuda.matmul import implementations

    found = attention_implementations()
    split = next(i for name, i in found.items() if name.startswith("triton-split:"))
    in_order = next(i for name, i in found.items() if name.startswith("triton-in-order:"))

    def choice(shape: AttentionShape) -> AttentionChoice:
        return AttentionChoice(split, in_order, split.most_rows if shape.page_size else 0)

    return CudaOps(get_contract("exact-v1", **parameters), implementations()["reference"].product, choice)


def model_of(ops, config: ModelConfig = CONFIG, *, trainable: bool = False, peak: float = 4.0) -> Qwen3:
    model = Qwen3(config, ops, torch.bfloat16, trainable=trainable)
    load_weights(model, random_weights(config, 0, peak=peak, embed=0.1, device=ops.device), "random weights")
    return model


def requests_of(
    lengths: Sequence[int], new_tokens: int, temperature: float = 1.0, common: int = 0, vocab: int = CONFIG.vocab_size
) -> list[Request]:
    """The first `common` tokens are the same in all."""
    generator = np.random.default_rng(3)
    shared = generator.integers(0, vocab, max(lengths)).tolist()
    requests = []
    for i, n in enumerate(lengths):
        ids = [*shared[: min(n, common)], *generator.integers(0, vocab, max(0, n - common)).tolist()]
        params = SamplingParams(new_tokens, temperature, ())
        requests.append(Request(f"r{i}", tuple(ids), params, noise_key(0, "test", 0, 0, f"r{i}", 0)))
    return requests
