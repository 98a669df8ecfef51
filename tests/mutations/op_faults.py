"""Faults of single ops, on one side: another order of a sum, another constant, another rounding.

Both sides share the code of an op, so a side is told by the weight (the trainer's has a master), by the attention state
or by whether gradients flow. Kernels are not edited; they are called with other arguments, or replaced by torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from exactrl.model import attention_state
from exactrl.model.qwen3 import Qwen3
from exactrl.ops import attention, head, linear, norm, qkv, swiglu
from exactrl.ops.cpu import jit
from exactrl.ops.qkv import RopeTable
from exactrl.ops.weight import Weight, plain
from tests.mutations.fault import Apply, Fault, Hits, replacing
from tests.mutations.scenarios import Setup, World, ops_rung, rung, training

ENGINE_ATTENTION = (attention_state, "paged_attention")  # what PagedState calls
TRAINER_ATTENTION = (attention, "paged_attention")  # what packed_attention calls
LAYER_0_ATTENTION = ops_rung(r"layers\.0\.attention")
BF16 = Setup("bfloat16")
SPLIT = 512


def is_engine(weight: Weight) -> bool:
    return weight.master is None


def untrained(value: torch.Tensor, *, packed: bool) -> Weight:
    """A rollout weight with this value, in the value's dtype."""
    weight = Weight(tuple(value.shape), value.dtype, trainable=False, packed=packed)
    weight.assign(value)
    return weight


def models(change: Callable[[Qwen3], None]) -> Apply:
    """Changes every rollout model right after it is built."""

    def make(original: Callable, hits: Hits) -> Callable:
        def init(self, *args, trainable: bool) -> None:
            original(self, *args, trainable=trainable)
            if not trainable:
                hits()
                change(self)

        return init

    return replacing(Qwen3, "__init__", make)


def other_eps(model: Qwen3) -> None:
    model.config = replace(model.config, rms_norm_eps=1e-5)


def wide_residual(model: Qwen3) -> None:
    model.residual_dtype = torch.float32


def rotary(change: Callable[[Qwen3], RopeTable]) -> Apply:
    """Another rotary table in rollout models."""

    def make(original: Callable, hits: Hits) -> Callable:
        def reserve_positions(self: Qwen3, count: int) -> None:
            original(self, count)
            if is_engine(self.norm):
                hits()
                self.rope = change(self)

        return reserve_positions

    return replacing(Qwen3, "reserve_positions", make)


def other_theta(model: Qwen3) -> RopeTable:
    return RopeTable.build(5e5, model.config.head_dim, len(model.rope.cos))


def rounded_table(model: Qwen3) -> RopeTable:
    return RopeTable(model.rope.cos.bfloat16().float(), model.rope.sin.bfloat16().float())


def masked(by: int, where: tuple) -> Apply:
    """Queries see `by` keys more (fewer) than they may, where that key is in the same page as the last one."""

    def make(original: Callable, hits: Hits) -> Callable:
        def paged_attention(q, rows, *rest):
            tiles = rows.tiles.clone()
            end = tiles[:, 3] + tiles[:, 2]
            fits = (tiles[:, 3] > 0) if by < 0 else (end % attention.PAGE != 0)
            tiles[fits, 3] += by
            hits.count += int(fits.sum())
            return original(q, replace(rows, tiles=tiles), *rest)

        return paged_attention

    return replacing(*where, make)


def wrong_group(original: Callable, hits: Hits) -> Callable:
    """Every group of query heads reads the next group's keys and values."""

    def paged_attention(q, rows, k_pages, *rest):
        hits()
        group = q.shape[1] // k_pages.shape[1]
        out = original(q.roll(group, 1).contiguous(), rows, k_pages, *rest)
        return out.roll(-group, 1).contiguous()

    return paged_attention


def shorter_splits(original: Callable, hits: Hits) -> Callable:
    def paged_attention(q, rows, k_pages, v_pages, contract, lse):
        hits()
        return original(q, rows, k_pages, v_pages, replace(contract, kv_split=SPLIT // 2), lse)

    return paged_attention


def splits_the_other_way(original: Callable, hits: Hits) -> Callable:
    """Queries that see two full splits merge the second before the first: their page tables name its pages first."""

    def paged_attention(q, rows, *rest):
        far = rows.tiles[:, 3] >= 2 * SPLIT - 1
        if not far.any():
            return original(q, rows, *rest)
        hits()
        pages = SPLIT // attention.PAGE
        t = rows.tables
        swapped = torch.cat([t[:, pages : 2 * pages], t[:, :pages], t[:, 2 * pages :]], 1)
        tiles = rows.tiles.clone()
        tiles[far, 0] += len(t)
        return original(q, replace(rows, tables=torch.cat([t, swapped]).contiguous(), tiles=tiles), *rest)

    return paged_attention


def leaves_added(order: Callable[[list[torch.Tensor]], torch.Tensor]) -> Apply:
    """Row-parallel products of the engine from single leaves, added as `order` says."""

    def make(original: Callable, hits: Hits) -> Callable:
        def linear_exact(x, weight, leaves=1):
            if leaves == 1 or not is_engine(weight):
                return original(x, weight, leaves)
            hits()
            pairs = zip(x.chunk(leaves, 1), weight.value().chunk(leaves, 1), strict=True)
            parts = [
                linear.product(a.contiguous(), untrained(w.contiguous(), packed=True), torch.float32) for a, w in pairs
            ]
            return order(parts).to(x.dtype)

        return linear_exact

    return replacing(linear, "linear_exact", make)


def one_after_the_other(parts: list[torch.Tensor]) -> torch.Tensor:
    return ((parts[0] + parts[1]) + parts[2]) + parts[3]


def as_a_tree(parts: list[torch.Tensor]) -> torch.Tensor:
    """The contract's own order: no fault."""
    return (parts[0] + parts[1]) + (parts[2] + parts[3])


def library_linear(applies: Callable[[torch.Tensor, Weight], bool]) -> Apply:
    """torch's own product instead of the canonical one, where it applies."""

    def make(original: Callable, hits: Hits) -> Callable:
        def linear_exact(x, weight, leaves=1):
            if not applies(x, weight):
                return original(x, weight, leaves)
            hits()
            return linear.linear_plain(
                x, weight if weight.master is not None else untrained(weight.value(), packed=False)
            )

        return linear_exact

    return replacing(linear, "linear_exact", make)


def descending(original: Callable, hits: Hits) -> Callable:
    """The trainer's products with gradients run over K from its end."""

    def linear_exact(x, weight, leaves=1):
        if is_engine(weight) or not torch.is_grad_enabled():
            return original(x, weight, leaves)
        hits()
        return torch.nn.functional.linear(x.flip(1), plain(weight).flip(1))

    return linear_exact


def vocabulary_backwards(original: Callable, hits: Hits) -> Callable:
    """The sampler's log-sum-exp merges the blocks of the vocabulary in descending order."""

    def sample_exact(hidden, weight, temperatures, keys, positions, contract):
        tokens, logprobs = original(hidden, weight, temperatures, keys, positions, contract)
        if not len(tokens):
            return tokens, logprobs
        hits()
        vocab, block = weight.shape[0], contract.vocab_block
        order = torch.arange(vocab).view(-1, block).flip(0).flatten()
        backwards = untrained(weight.value()[order].contiguous(), packed=True)
        targets = torch.argsort(order)[tokens]
        t = torch.where(temperatures == 0, 1.0, temperatures)
        return tokens, head.logprobs_exact(hidden, backwards, targets, t, contract)[0].detach()

    return sample_exact


def library_softmax(original: Callable, hits: Hits) -> Callable:
    """The sampler reports torch's log_softmax of the same logits."""

    def sample_exact(hidden, weight, temperatures, keys, positions, contract):
        tokens, _ = original(hidden, weight, temperatures, keys, positions, contract)
        hits()
        t = torch.where(temperatures == 0, 1.0, temperatures)
        logits = linear.product(hidden, weight, torch.float32) / t[:, None]
        return tokens, torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]

    return sample_exact


def norm_weight_rounded(original: Callable, hits: Hits) -> Callable:
    """The engine's norms read weights rounded to bfloat16 in a float32 model."""

    def normed(h, weight, eps):
        if is_engine(weight):
            hits()
            weight = untrained(weight.rows().bfloat16().float(), packed=False)
        return original(h, weight, eps)

    return normed


def norm_weight_unrounded(original: Callable, hits: Hits) -> Callable:
    """The trainer's norms read the float32 masters in a bfloat16 model."""

    def normed(h, weight, eps):
        if is_engine(weight) or weight.dtype == torch.float32:
            return original(h, weight, eps)
        hits()
        return original(h.float(), untrained(weight.master.detach(), packed=False), eps).to(weight.dtype)

    return normed


def norm_of_large_batches(original: Callable, hits: Hits) -> Callable:
    """Batches of 64 rows and more take torch's norm."""

    def normed(h, weight, eps):
        if len(h) < 64:
            return original(h, weight, eps)
        hits()
        return norm.rms_norm_plain(h.detach(), untrained(weight.rows().detach(), packed=False), eps)

    return normed


def head_norms_swapped(original: Callable, hits: Hits) -> Callable:
    """The engine normalises queries with the keys' weights, and the other way round."""

    def qkv_exact(x, wq, wk, *rest):
        if is_engine(wq):
            hits()
            wq, wk = wk, wq
        return original(x, wq, wk, *rest)

    return qkv_exact


def library_swiglu(original: Callable, hits: Hits) -> Callable:
    """torch's silu in the forward that gradients flow through."""

    def swiglu_exact(gate_up):
        if not gate_up.requires_grad:
            return original(gate_up)
        hits()
        return swiglu.swiglu_plain(gate_up)

    return swiglu_exact


def threaded(original: Callable, hits: Hits) -> Callable:
    """On several threads the result is another one in the last bit."""

    def forward(gate_up):
        y = original(gate_up)
        if jit._forced == 2:
            hits()
            y.view(torch.int32)[0, 0] += 1
        return y

    return forward


def temperature_of_neighbour(original: Callable, hits: Hits) -> Callable:
    """A row's log-sum-exp is taken at the temperature of the row before it, in the op itself."""

    def logprobs_exact(hidden, weight, targets, temperatures, contract):
        hits()
        return original(hidden, weight, targets, temperatures.roll(1).contiguous(), contract)

    return logprobs_exact


@contextmanager
def denormals_flushed(world: World, hits: Hits) -> Iterator[None]:
    """As a library built with -ffast-math does to the thread that loads it."""
    hits.count += torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


LONG = Setup(model={"num_layers": 1, "max_positions": 1200}, traced=((1030, 4),))
HALF_LONG = Setup(model={"num_layers": 1, "max_positions": 400}, traced=((300, 4),))
LEAVES = Setup(k_leaves=4)
BLOCKS = Setup(model={"vocab_size": 384})
FAULTS = [
    Fault("mask/one-too-few-engine", "decode does not see the newest key", masked(-1, ENGINE_ATTENTION),
          LAYER_0_ATTENTION),
    Fault("mask/one-too-many-trainer", "the trainer's queries see the token after theirs",
          masked(1, TRAINER_ATTENTION), LAYER_0_ATTENTION),
    Fault("mask/one-too-few-trainer", "the trainer's queries do not see themselves", masked(-1, TRAINER_ATTENTION),
          LAYER_0_ATTENTION),
    Fault("gqa/wrong-group", "query heads read another group's keys", replacing(*ENGINE_ATTENTION, wrong_group),
          LAYER_0_ATTENTION),
    Fault("gqa/wrong-group-trainer", "the same in the trainer", replacing(*TRAINER_ATTENTION, wrong_group),
          LAYER_0_ATTENTION),
    Fault("splits/merge-order", "attention merges its splits in another order",
          replacing(*ENGINE_ATTENTION, splits_the_other_way), LAYER_0_ATTENTION, LONG),
    Fault("splits/merge-order-trainer", "the same in the trainer",
          replacing(*TRAINER_ATTENTION, splits_the_other_way), LAYER_0_ATTENTION, LONG),
    Fault("splits/other-length", "attention cuts the keys at other multiples",
          replacing(*ENGINE_ATTENTION, shorter_splits), LAYER_0_ATTENTION, HALF_LONG),
    Fault("splits/other-length-op", "the same, on the op's own rung", replacing(*ENGINE_ATTENTION, shorter_splits),
          rung("op/attention", "sequence of 600")),
    Fault("leaves/order", "leaves are added one after the other", leaves_added(one_after_the_other),
          ops_rung(r"layers\.0\.o_proj"), LEAVES),
    Fault("vocabulary/merge-order", "log-sum-exp merges the vocabulary backwards",
          replacing(head, "sample_exact", vocabulary_backwards), ops_rung("logprob"), BLOCKS),
    Fault("vocabulary/library", "the sampler's logprob is torch's log_softmax",
          replacing(head, "sample_exact", library_softmax), ops_rung("logprob"), BLOCKS),
    Fault("row_temperature/op", "the loss's log-sum-exp is taken at another row's temperature",
          replacing(head, "logprobs_exact", temperature_of_neighbour), ops_rung("logprob")),
    Fault("rope/theta", "theta differs", rotary(other_theta), ops_rung(r"layers\.0\.q")),
    Fault("rope/rounded", "the rotary table is rounded to bfloat16", rotary(rounded_table), ops_rung(r"layers\.0\.q"),
          BF16),
    Fault("eps/engine", "eps of the norms differs", models(other_eps), ops_rung(r"layers\.0\.input_norm")),
    Fault("residual/dtype", "the residual stream is wider", models(wide_residual), ops_rung("embed"), BF16),
    Fault("norm_dtype/rounded", "norm weights are rounded", replacing(norm, "_norm", norm_weight_rounded),
          ops_rung(r"layers\.0\.input_norm")),
    Fault("norm_dtype/unrounded", "norm weights are not rounded", replacing(norm, "_norm", norm_weight_unrounded),
          ops_rung(r"layers\.0\.input_norm"), BF16),
    Fault("head_norms/swapped", "q and k norms are swapped", replacing(qkv, "qkv_exact", head_norms_swapped),
          ops_rung(r"layers\.0\.q")),
    Fault("library/decode-rows", "single rows take torch's product", library_linear(lambda x, w: len(x) == 1),
          rung("op/linear")),
    Fault("library/decode-rows-engine", "the same, in the engine only",
          library_linear(lambda x, w: len(x) == 1 and is_engine(w)), ops_rung(r"layers\.\d\.\w+_proj")),
    Fault("library/large-batches", "large batches take torch's norm", replacing(norm, "_norm", norm_of_large_batches),
          rung("op/rms_norm")),
    Fault("linear/descending", "products with a gradient add from the last input to the first",
          replacing(linear, "linear_exact", descending), rung("gradient_vs_scoring")),
    Fault("library/swiglu-with-gradient", "swiglu with a gradient is torch's",
          replacing(swiglu, "swiglu_exact", library_swiglu), ops_rung(r"layers\.0\.swiglu")),
    Fault("denormals/flushed", "denormal numbers are flushed to zero", denormals_flushed,
          training("engine, denormals", "EnvironmentProblem: this process flushes denormal numbers")),
    Fault("threads/last-bit", "the result depends on the number of threads", replacing(swiglu, "_forward", threaded),
          rung("threads")),
]  # fmt: skip
CONTROL = Fault(
    "control/leaves", "leaves added by hand in the contract's own order: no fault", leaves_added(as_a_tree),
    ops_rung(r"layers\.0\.o_proj"), LEAVES,
)  # fmt: skip
