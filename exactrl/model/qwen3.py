"""Dense Qwen3 (GQA, QK-norm, RoPE, SwiGLU), one definition for engine and trainer.

The forward works on a flat batch of T tokens; which sequence a token belongs to is the attention state's business.
Legend: T tokens, H query heads, HK kv heads, D head dim, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from exactrl.errors import ConfigError
from exactrl.model.attention_state import AttentionState
from exactrl.model.config import ModelConfig
from exactrl.ops.interface import ModelOps
from exactrl.ops.qkv import HeadShape, RopeTable
from exactrl.ops.weight import Weight

# Sees every op's output by name and may replace it: the seam of the op-by-op rungs, of bisect and of fault injection.
# Engine and trainer show more around a forward: "rows" before it (which sequence and position each row is, for
# alignment only), then "predicting" (the rows that predict a token), "logprob" and "sample".
Probe = Callable[[str, torch.Tensor], torch.Tensor]


def unchanged(name: str, x: torch.Tensor) -> torch.Tensor:
    """The probe where there is none."""
    return x


def require_leaves_divide(config: ModelConfig, leaves: int) -> None:
    """Raises ConfigError unless `leaves` divides the inputs of the row-parallel linears, o_proj and down_proj."""
    for name, k in (("o_proj", config.num_heads * config.head_dim), ("down_proj", config.intermediate_size)):
        if k % leaves:
            raise ConfigError(f"contract.k_leaves {leaves} does not divide the {k} inputs of {name}")


class Layer(nn.Module):
    def __init__(self, c: ModelConfig, matrix: Callable[..., Weight], vector: Callable[..., Weight]) -> None:
        super().__init__()
        self.input_norm = vector(c.hidden_size)
        self.qkv = matrix((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden_size)
        self.q_norm, self.k_norm = vector(c.head_dim), vector(c.head_dim)
        self.o = matrix(c.hidden_size, c.num_heads * c.head_dim)
        self.post_norm = vector(c.hidden_size)
        self.gate_up = matrix(2 * c.intermediate_size, c.hidden_size)
        self.down = matrix(c.hidden_size, c.intermediate_size)


class Qwen3(nn.Module):
    """`trainable`: weights have fp32 masters that receive gradients; otherwise compute weights only.

    `layers` is a plain typed list; `registered_layers` makes them known to torch.
    """

    def __init__(self, config: ModelConfig, ops: ModelOps, dtype: torch.dtype, *, trainable: bool) -> None:
        """Raises ConfigError when k_leaves does not divide the inputs of o_proj and down_proj."""
        super().__init__()
        self.config, self.ops, self.dtype = config, ops, dtype
        self.shape = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        self.leaves = ops.contract.k_leaves
        require_leaves_divide(config, self.leaves)
        wide = dtype == torch.float32 or ops.contract.residual_dtype == "float32"
        self.residual_dtype = torch.float32 if wide else torch.bfloat16

        def matrix(*shape: int, gathered: bool = False) -> Weight:
            return Weight(shape, dtype, trainable=trainable, packed=ops.packs, gathered=gathered, device=ops.device)

        def vector(size: int) -> Weight:
            return Weight((size,), dtype, trainable=trainable, packed=False, device=ops.device)

        tied = config.tie_word_embeddings
        self.embed = Weight(
            (config.vocab_size, config.hidden_size),
            dtype,
            trainable=trainable,
            packed=ops.packs and tied,
            gathered=True,
            device=ops.device,
        )
        self.layers = [Layer(config, matrix, vector) for _ in range(config.num_layers)]
        self.registered_layers = nn.ModuleList(self.layers)
        self.norm = vector(config.hidden_size)
        self.head = self.embed if tied else matrix(config.vocab_size, config.hidden_size)
        self.rope = RopeTable.build(config.rope_theta, config.head_dim, 0).to(ops.device)

    def reserve_positions(self, count: int) -> None:
        """Extends the rotary table to `count` positions. A longer table has the same bits where both exist."""
        if count > self.rope.cos.shape[0]:
            self.rope = RopeTable.build(self.config.rope_theta, self.config.head_dim, count).to(self.ops.device)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, state: AttentionState, see: Probe = unchanged
    ) -> torch.Tensor:
        """ids, positions int64 [T] -> hidden states after the final norm [T, hidden], in the compute dtype."""
        for name, given in (
            ("ids", ids),
            ("positions", positions),
        ):  # a float would index tables through another kernel
            assert given.dtype == torch.int64, f"{name} must be int64, not {given.dtype}"
        ops, eps = self.ops, self.config.rms_norm_eps
        ids, positions = see("ids", ids), see("positions", positions)
        h = see("embed", ops.embedding(ids, self.embed, self.residual_dtype))
        y = ops.rms_norm(h, self._norm(0), eps)
        for i, layer in enumerate(self.layers):
            y = see(f"layers.{i}.input_norm", y)
            qkv = see(f"layers.{i}.qkv_proj", ops.linear(y, layer.qkv))
            heads = (layer.q_norm, layer.k_norm, self.rope, positions, self.shape, eps)
            q, k, v = state.qkv(i, qkv, heads, see is not unchanged)
            q = see(f"layers.{i}.q", q)
            if k is not None and v is not None:
                k, v = see(f"layers.{i}.k", k), see(f"layers.{i}.v", v)
            a = see(f"layers.{i}.attention", state.attend(i, q, k, v)).flatten(1)
            o = see(f"layers.{i}.o_proj", ops.linear(a, layer.o, self.leaves))
            h, y = ops.add_rms_norm(h, o, layer.post_norm, eps)
            h, y = see(f"layers.{i}.attention_residual", h), see(f"layers.{i}.post_norm", y)
            gate_up = see(f"layers.{i}.gate_up_proj", ops.linear(y, layer.gate_up))
            m = see(f"layers.{i}.swiglu", ops.swiglu(gate_up))
            m = see(f"layers.{i}.down_proj", ops.linear(m, layer.down, self.leaves))
            h, y = ops.add_rms_norm(h, m, self._norm(i + 1), eps)
            h = see(f"layers.{i}.residual", h)
        return see("norm", y)

    def _norm(self, i: int) -> Weight:
        """The norm that reads the residual stream before layer i (the final norm after the last layer)."""
        return self.layers[i].input_norm if i < len(self.layers) else self.norm
