"""Where faults are looked for: one rung of the ladder, or a real training run with the strict oracle.

A scenario returns what an existing check said, "" when every check passed. Models are small and random.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from exactrl.algo.algorithm import get_algorithm
from exactrl.contract import get_contract, noise_key
from exactrl.engine.engine import Engine
from exactrl.errors import ExactRLError
from exactrl.model.qwen3 import Qwen3
from exactrl.ops import Ops
from exactrl.parity import check as ladder
from exactrl.parity.oracle import Oracle
from exactrl.parity.subject import Subject
from exactrl.rl import loop
from exactrl.rl.collect import Collecting
from exactrl.sync import memory
from exactrl.tasks.rewards import reward_many
from exactrl.train.trainer import Trainer
from exactrl.types import Prompt, Request, Sample, SamplingParams
from tests.model.test_qwen3 import build, config
from tests.train.helpers import tokens

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LAYERS = 3


@dataclass(frozen=True)
class Setup:
    """What a fault needs to show: dtype, changes to the model's geometry, the engine's limits, the run's settings."""

    dtype: str = "float32"
    model: Mapping[str, Any] = field(default_factory=dict)
    k_leaves: int = 1
    limits: Mapping[str, Any] = field(default_factory=dict)
    minibatches: int = 1
    new_tokens: int = 8
    audit: bool = False
    traced: Sequence[tuple[int, int]] = ()  # (prompt length, new tokens) of the requests that are traced op by op


class World:
    """Builds engines and trainers for one fault; `on_engine` and `on_trainer` may put a fault into what is built."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.config = config(**{"num_layers": LAYERS, "max_positions": 200, **setup.model})
        self.ops = Ops(get_contract("exact-v1", k_leaves=setup.k_leaves))
        self.on_engine: Callable[[Engine], None] = lambda engine: None
        self.on_trainer: Callable[[Trainer], None] = lambda trainer: None

    def model(self, *, trainable: bool) -> Qwen3:
        return build(self.config, self.ops, DTYPES[self.setup.dtype], trainable=trainable)

    def engine(self, **limits: Any) -> Engine:
        engine = Engine(self.model(trainable=False), **{"kv_tokens": 2048, **self.setup.limits, **limits})
        self.on_engine(engine)
        return engine

    def trainer(self, max_tokens: int = 8192) -> Trainer:
        trainer = Trainer(
            self.model(trainable=True), get_algorithm("grpo"), lr=1e-2, max_tokens_per_microbatch=max_tokens,
            minibatches=self.setup.minibatches,
        )  # fmt: skip
        self.on_trainer(trainer)
        return trainer

    def subject(self) -> Subject:
        subject = Subject(
            self.model(trainable=False), self.engine, self.trainer, lambda: (self.engine(), self.trainer()),
            self.setup.dtype, seed=0,
        )  # fmt: skip
        if self.setup.traced:
            subject.traced = [
                Request(f"t{n}", tuple(tokens(n, n)), SamplingParams(new), noise_key(0, "traced", 0, 0, "", n))
                for n, new in self.setup.traced
            ]
        return subject


class Prompts:
    """A task of three prompts, the same ones at every step, that share their first 17 tokens."""

    def train_prompts(self, start: int, count: int) -> list[Prompt]:
        return [Prompt(f"p{n}", "", tuple(tokens(17, 0) + tokens(n, n)), "") for n in (3, 18, 30)][:count]

    def eval_prompts(self) -> dict[str, list[Prompt]]:
        return {}

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""

    def rewards(self, pairs):
        return reward_many(self.reward, pairs)

    def reward(self, prompt: Prompt, sample: Sample) -> float:
        return float(sample.sample_index)


@dataclass(frozen=True)
class Catcher:
    """A check by name. It has caught a fault when what `scenario` returns matches `pattern`; `place` is the scenario's
    name: "training" or a rung's."""

    name: str
    place: str
    scenario: Callable[[World], str]
    pattern: str

    def matches(self, said: str) -> bool:
        return bool(re.search(self.pattern, said))


def _alarm(run: Callable[[], str]) -> str:
    try:
        return run()
    except (ExactRLError, AssertionError) as error:  # assertions are the invariants that guard the kernels
        return f"{type(error).__name__}: {error}"


def rung(name: str, pattern: str = "") -> Catcher:
    """A rung of the ladder; `pattern` must match its detail, from the start."""

    def climb(world: World) -> str:
        (result,) = ladder.check([world.subject()], [name], lambda result: None)
        return f"{name}: {result.detail}" if result.status == "fail" else ""

    return Catcher(f"rung {name}", name, lambda world: _alarm(lambda: climb(world)), f"^{name}: {pattern}")


def _train(world: World) -> str:
    """Three real RL steps, everything compared as in a run with true_on_policy."""
    plan = loop.Plan(
        steps=3, audit_every=int(world.setup.audit), eval_every=0,
        collecting=Collecting(3, 2, SamplingParams(world.setup.new_tokens, 0.7), 0, "stop"),
    )  # fmt: skip
    judge = Oracle(strict=True, bisect_command="exactrl check")
    nothing = lambda *seen: None  # noqa: E731
    loop.run(
        plan, world.engine(), world.trainer(), Prompts(), get_algorithm("grpo"), judge, memory.sync, nothing, nothing
    )  # fmt: skip
    return ""


def training(name: str, pattern: str) -> Catcher:
    """An alarm of a real training run; `pattern` must match the error's type and message, from the start."""
    return Catcher(name, "training", lambda world: _alarm(lambda: _train(world)), f"^{pattern}")


def ops_rung(first: str) -> Catcher:
    """The op-by-op rung, whose first difference must be `first` (a pattern for the op's whole name)."""
    catcher = rung("engine_vs_trainer_ops", rf"{first}, sample ")
    return replace(catcher, name=f"{catcher.name}: {first}".replace("\\", ""))


ORACLE_TRAIN = training("oracle, gradient forward", r"ParityError: rollout and train logprob differ")
ORACLE_RESCORE = training("oracle, audit", r"ParityError: rollout and rescore logprob differ")
ORACLE_VERSION = training(
    "oracle, weight version", r"ParityError: sample .* at weight version \d+, but the trainer is at"
)
ORACLE_COUNT = training("oracle, a logprob per token", r"ParityError: sample .* tokens but its logprobs are")
ORACLE_SHAPE = training("oracle, shape", r"ParityError: sample .*: the (train|rescore) forward gave")
ORACLE_OWN = training("oracle, own array", r"ParityError: sample .* logprobs are the rollout's own array")
ORACLE_TWICE = training("oracle, sample twice", r"ParityError: sample .* is in the step twice")
ORACLE_FOREIGN = training("oracle, foreign sample", r"ParityError: sample .*: not of this step")
ORACLE_NOTHING = training("oracle, nothing compared", r"ParityError: none of the step's")
ORACLE_MIXED = training("oracle, one version per step", r"ParityError: sample .* a step's samples share one version")
SYNC = training("digest at hand-over", r"ParityError: weight version \d+: the engine's kernels read")
