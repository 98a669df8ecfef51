"""A whole run in small: real tokenizer, task, engine, trainer, oracle and loop on a random model of two layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import tokenizers
import torch
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from torch.utils._python_dispatch import TorchDispatchMode

from exactrl.algo.algorithm import get_algorithm
from exactrl.engine.engine import Engine
from exactrl.parity.oracle import Oracle
from exactrl.rl import loop
from exactrl.rl.collect import Collecting
from exactrl.sync.memory import sync
from exactrl.tasks.task import DataTask
from exactrl.tasks.tokenizer import Tokenizer
from exactrl.train.trainer import Trainer
from exactrl.types import Prompt, Sample, SamplingParams
from tests.model.test_qwen3 import config
from tests.train.helpers import make_engine, make_trainer

SPECIAL = ("<|endoftext|>", "<|im_end|>")
MERGES = [
    ("s", "t"), ("st", "r"), ("str", "a"), ("stra", "w"), ("b", "e"), ("be", "r"), ("ber", "r"), ("berr", "y"),
    ("straw", "berry"),
]  # fmt: skip


def berry_tokenizer(eos: Sequence[str] = ()) -> Tokenizer:
    """A greedy BPE in which "strawberry" is one token, "straw" and "berry" are others."""
    pieces = ["s", "t", "r", "a", "w", "b", "e", "y", *(left + right for left, right in MERGES)]
    backend = tokenizers.Tokenizer(BPE({p: i for i, p in enumerate(pieces)}, MERGES))
    backend.decoder = Fuse()
    backend.add_special_tokens(list(SPECIAL))
    return Tokenizer(backend, tuple(backend.token_to_id(t) for t in eos))


@dataclass
class World:
    """Everything a run is made of; `run` returns its steps. Limits of the engine are small, so requests share it."""

    tokenizer: Tokenizer
    sampling: SamplingParams
    prompts: Sequence[str] = ("straw", "berry", "st")
    minibatches: int = 1
    lr: float = 1e-2
    dtype: torch.dtype = torch.float32
    reward: Callable[[Prompt, Sample], float] = lambda prompt, sample: float(sum(sample.token_ids) % 7)
    strict: bool = True
    engine: Engine = field(init=False)
    trainer: Trainer = field(init=False)

    def __post_init__(self) -> None:
        c = config(vocab_size=self.tokenizer.backend.get_vocab_size())
        self.engine = make_engine(self.dtype, c=c, max_concurrent=5, chunk_tokens=7)
        settings = {"lr": self.lr, "minibatches": self.minibatches, "max_tokens_per_microbatch": 90}
        self.trainer = make_trainer(self.dtype, c=c, **settings)

    def run(self, steps: int, samples_per_prompt: int = 4) -> list[loop.StepResult]:
        plan = loop.Plan(
            steps=steps, audit_every=1, eval_every=0,
            collecting=Collecting(len(self.prompts), samples_per_prompt, self.sampling, 0, "stop"),
        )  # fmt: skip
        rows = [Prompt(str(i), text, tuple(self.tokenizer.encode(text)), "") for i, text in enumerate(self.prompts)]
        task = DataTask(rows, {}, self.tokenizer, self.reward, stop_token_ids=self.sampling.stop_token_ids)
        results: list[loop.StepResult] = []
        judge, algorithm = Oracle(strict=self.strict, bisect_command="exactrl check"), get_algorithm("grpo")
        loop.run(plan, self.engine, self.trainer, task, algorithm, judge, sync, results.append, lambda *a: None)
        return results


def samples_of(results: Sequence[loop.StepResult]) -> list[Sample]:
    return [s for r in results for g in r.groups for s in g.samples]


class Called(TorchDispatchMode):
    """Writes down every torch op that runs: (name, dtypes of its floating-point tensor arguments)."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, tuple[torch.dtype, ...]]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        floats = tuple(a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point())
        self.ops.append((function._schema.name, floats))
        return function(*args, **(kwargs or {}))
