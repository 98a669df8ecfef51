"""One-ulp faults: one element of one op's output for one row, on one side, is one unit in the last place off."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from zlib import crc32

import torch

from exactrl.model.qwen3 import Probe
from exactrl.parity.op_trace import Trace, trace_engine
from tests.mutations.fault import Fault, Hits
from tests.mutations.scenarios import LAYERS, Catcher, Setup, World, rung

OPS_OF_A_LAYER = (
    "input_norm", "qkv_proj", "q", "k", "v", "attention", "o_proj", "attention_residual", "post_norm", "gate_up_proj",
    "swiglu", "down_proj", "residual",
)  # fmt: skip
OTHER_OPS = ("embed", "norm", "logprob", "sample")
SIDES = {"engine": None, "scoring": False, "gradient": True}  # of the trainer: with gradients or without
PLACES = ("first", "last", "random")


def op_names() -> list[str]:
    """As the model names them; the first, the middle and the last layer."""
    layers = (0, LAYERS // 2, LAYERS - 1)
    return [*OTHER_OPS, *(f"layers.{i}.{op}" for op in OPS_OF_A_LAYER for i in layers)]


class OneUlp(Trace):
    """A probe that changes one element once; `gradient`: only in forwards with (without) gradient, None: in any."""

    def __init__(self, inner: Probe, place: tuple, hits: Hits, gradient: bool | None) -> None:
        super().__init__(inner, numbered_anew=gradient is not None)
        self.place, self.hits, self.gradient, self.done = place, hits, gradient, False

    def __call__(self, name: str, x: torch.Tensor) -> torch.Tensor:
        x = super().__call__(name, x)
        self.ops.clear()  # only the bookkeeping of rows is wanted here
        op, sample, position, element = self.place
        if name != op or self.done or self.gradient not in (None, torch.is_grad_enabled()):
            return x
        row = ((self._rows[:, 0] == sample) & (self._rows[:, 1] == position)).nonzero()[:, 0].tolist()
        if not row:
            return x
        self.done = True
        self.hits()
        x = x.clone()
        x.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])[(row[0], *element)] += 1
        return x


@cache
def clean_trace(dtype: str) -> Trace:
    """What the engine computes without a fault: rows and shapes to choose an element from."""
    world = World(Setup(dtype))
    subject = world.subject()
    return trace_engine(world.engine(max_concurrent=3, chunk_tokens=24, prefix_cache=False), subject.traced)[0]


def choose(op: str, dtype: str, where: str) -> tuple:
    """(op, sample, position, element of the row)."""
    rows, values = clean_trace(dtype).table(op)
    pairs = sorted(map(tuple, rows.tolist()))
    dice = random.Random(crc32(f"{op} {dtype}".encode()))
    pick = {"first": lambda n: 0, "last": lambda n: n - 1, "random": dice.randrange}[where]
    return op, *pairs[pick(len(pairs))], tuple(pick(n) for n in values.shape[1:])


def _fault(op: str, dtype: str, side: str, where: str) -> Fault:
    @contextmanager
    def apply(world: World, hits: Hits) -> Iterator[None]:
        place = choose(op, dtype, where)

        def on_engine(engine) -> None:
            engine.see = OneUlp(engine.see, place, hits, None)

        def on_trainer(trainer) -> None:
            trainer.see = OneUlp(trainer.see, place, hits, SIDES[side])

        if side == "engine":
            world.on_engine = on_engine
        else:
            world.on_trainer = on_trainer
        yield

    layer, _, short = op.rpartition(".")
    variant = "-".join(filter(None, [layer.replace("layers.", "layer"), dtype, side, where]))
    return Fault(
        f"ulp/{short}/{variant}", f"{op}, {where} element, one ulp off in the {side}", apply,
        _named(op, dtype, where, side), Setup(dtype),
    )  # fmt: skip


def _named(op: str, dtype: str, where: str, side: str) -> Catcher:
    """The op-by-op rung, naming exactly this op, layer, sample, position and element."""
    base = rung("engine_vs_trainer_ops")

    def look(world: World) -> str:
        _, sample, position, element = choose(op, dtype, where)
        expected = f"engine_vs_trainer_ops: {op}, sample {world.subject().traced[sample].id}, position {position}, "
        said = base.scenario(world)
        forward = "gradient forward" if side == "gradient" else "scoring"
        exact = said.startswith(f"{expected}element {element}: ") and said.endswith(f"(engine, {forward})")
        return f"exactly {said}" if exact else said

    pattern = f"^exactly engine_vs_trainer_ops: {re.escape(op)}, "
    return Catcher(f"{base.name}: {op}", base.place, look, pattern)


FAULTS = [
    _fault(op, dtype, side, where)
    for op in op_names()
    for dtype in ("float32", "bfloat16")
    for side in SIDES
    for where in PLACES
]
