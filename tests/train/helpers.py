"""Builders shared by the tests of engine, trainer, oracle and loop: small random models, rollouts, injected faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numba
import numpy as np
import pytest
import torch

from exactrl.algo.algorithm import get_algorithm
from exactrl.contract import noise_key
from exactrl.engine.engine import Engine
from exactrl.model.config import ModelConfig
from exactrl.model.qwen3 import Probe
from exactrl.train.trainer import Trainer
from exactrl.types import Completion, Request, Sample, SamplingParams
from tests.model.test_qwen3 import build, config

VOCAB = 97
TEMPERATURES = (1.0, 0.7, 0.0, 1.3)


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread():
    """For modules that import it: spinning threads beside a busy neighbour make small torch ops many times slower."""
    numba.get_num_threads()  # starts numba's pool, which sets torch's thread count once
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def request(name: str, ids: Sequence[int], max_new: int, temperature: float = 1.0, stop: Sequence[int] = ()) -> Request:
    params = SamplingParams(max_new, temperature, tuple(stop))
    return Request(name, tuple(ids), params, noise_key(0, "test", 0, 0, name, 0))


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def workload() -> list[Request]:
    """16 requests on 4 prompts that share their first 37 tokens; ragged lengths, four temperatures, several stops."""
    prefix = tokens(37, 0)
    result = []
    for p in range(4):
        prompt = prefix + tokens((1, 11, 27, 40)[p], 1 + p)
        for s in range(4):
            stop = range(6) if s % 2 else ()
            result.append(request(f"{p}#{s}", prompt, (3, 30, 17, 24)[s], TEMPERATURES[(p + s) % 4], stop))
    return result


def bit_list(values: Iterable[float]) -> tuple[int, ...]:
    return tuple(np.asarray(values, np.float32).view(np.uint32).tolist())


def trajectories(completions: Sequence[Completion]) -> dict[str, tuple]:
    """Everything that must not depend on scheduling: ids, logprob bits, finish reason."""
    return {c.id: (tuple(c.token_ids), bit_list(c.logprobs), c.finish_reason) for c in completions}


def make_engine(dtype: torch.dtype = torch.float32, *, c: ModelConfig | None = None, seed: int = 0, **limits) -> Engine:
    limits = {"kv_tokens": 4096, **limits}
    return Engine(build(c or config(), dtype=dtype, trainable=False, seed=seed), **limits)


def make_trainer(dtype: torch.dtype = torch.float32, *, c: ModelConfig | None = None, seed=0, **settings) -> Trainer:
    settings = {"lr": 1e-2, **settings}
    return Trainer(build(c or config(), dtype=dtype, trainable=True, seed=seed), get_algorithm("grpo"), **settings)


def roll_out(engine: Engine, requests: Sequence[Request]) -> list[Sample]:
    """Samples with made-up advantages: every third is 0, the others have both signs."""
    samples = []
    for i, (r, c) in enumerate(zip(requests, engine.generate(requests), strict=True)):
        samples.append(
            Sample(
                r.id, 0, r.token_ids, c.token_ids, c.logprobs, c.finish_reason, c.weight_version,
                r.params.temperature or 1.0, advantage=(0.0, 1.5, -0.5)[i % 3],
            )
        )  # fmt: skip
    return samples


class Recorder:
    """An observer that keeps what it is shown, as logprob bits per sample name."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, tuple[int, ...]]] = {"train": {}, "rescore": {}}
        self.versions: set[int] = set()

    def __call__(self, kind, version, samples, logprobs) -> None:
        self.versions.add(version)
        for sample, values in zip(samples, logprobs, strict=True):
            assert sample.name not in self.seen[kind], f"{sample.name} is observed twice"
            self.seen[kind][sample.name] = bit_list(values)


def unobserved(kind, version, samples, logprobs) -> None:
    """An observer that looks at nothing."""


def recorded(samples: Sequence[Sample]) -> dict[str, tuple[int, ...]]:
    return {s.name: bit_list(s.logprobs) for s in samples}


def one_ulp(op: str) -> Probe:
    """A fault: in one op's output, the largest element of each row is one unit in the last place too large."""

    def see(name: str, x: torch.Tensor) -> torch.Tensor:
        if name != op:
            return x
        x = x.clone()
        values = x.detach()
        at = values.abs().argmax(1, keepdim=True)
        as_integers = values.view({2: torch.int16, 4: torch.int32}[x.element_size()])
        as_integers.scatter_(1, at, as_integers.gather(1, at) + 1)
        return x

    return see


def captured_gradients(trainer: Trainer) -> list[dict[str, torch.Tensor]]:
    """Fills a list with the gradients that each optimizer update is given."""
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    found: list[dict[str, torch.Tensor]] = []
    update: Callable = trainer.optimizer.step

    def step() -> None:
        found.append({names[id(p)]: p.grad.clone() for p in trainer.parameters})
        update()

    trainer.optimizer.step = step
    return found
