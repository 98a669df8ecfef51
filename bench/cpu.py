"""`python -m bench.cpu`: what exactness costs on a CPU.

True on-policy against plain torch ops in the same engine and trainer, and plain against transformers, so that the
baseline is an honest one. Every figure is the median of pairwise ratios of interleaved runs.

  decode    generate: 64 sequences of 43 prompt + 48 new tokens, continuous batching, sampling, logprobs
  fwd+bwd   one micro-batch schedule of 128 such samples, forward and backward
  step      whole RL step: rollout + train; plain has the old-logprob pass that true on-policy does without
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.common import interleaved, ratio, write_result
from exactrl.algo.algorithm import get_algorithm
from exactrl.contract import get_contract, noise_key
from exactrl.engine.engine import Engine
from exactrl.model.config import ModelConfig, find_model, read_config
from exactrl.model.folder import read_tensors
from exactrl.model.qwen3 import Qwen3
from exactrl.model.weights import load_weights, random_weights
from exactrl.ops import Ops
from exactrl.parity.subject import to_samples
from exactrl.train.trainer import Trainer
from exactrl.types import Request, Sample, SamplingParams

PROMPT, NEW, BATCH, TRAIN_BATCH = 43, 48, 64, 128
SMALL = ModelConfig(
    vocab_size=8192, hidden_size=512, intermediate_size=1536, num_layers=6, num_heads=8, num_kv_heads=4, head_dim=64,
    rope_theta=1e6, tie_word_embeddings=True, max_positions=1024,
)  # fmt: skip


def tensors_of(name: str) -> tuple[ModelConfig, list[tuple[str, torch.Tensor]]]:
    if name == "tiny":
        folder = find_model("tiny")
        return read_config(folder), list(read_tensors(folder))
    return SMALL, list(random_weights(SMALL, 0))


class Side:
    """Engine and trainer of one mode."""

    def __init__(self, name: str, dtype: torch.dtype, exact: bool, budget: int) -> None:
        self.config, tensors = tensors_of(name)
        ops = Ops(get_contract("exact-v1"), exact)
        models = [Qwen3(self.config, ops, dtype, trainable=t) for t in (False, True)]
        for model in models:
            load_weights(model, tensors, name)
        self.engine = Engine(models[0], max_concurrent=TRAIN_BATCH, kv_tokens=32768)
        self.trainer = Trainer(
            models[1], get_algorithm("grpo"), lr=0.0, max_tokens_per_microbatch=budget,
            recompute_old_logprobs=not exact,
        )  # fmt: skip

    def requests(self, count: int) -> list[Request]:
        generator = np.random.default_rng(0)
        params = SamplingParams(NEW, 1.0, ())
        return [
            Request(
                str(i), tuple(generator.integers(0, self.config.vocab_size, PROMPT).tolist()), params,
                noise_key(0, "bench", 0, 0, str(i), 0),
            )
            for i in range(count)
        ]  # fmt: skip

    def decode(self) -> None:
        self.engine.allocator.reset(self.engine.allocator.root_key)  # every run starts without cached prefixes
        self.engine.generate(self.requests(BATCH))

    def roll_out(self) -> list[Sample]:
        self.engine.allocator.reset(self.engine.allocator.root_key)
        requests = self.requests(TRAIN_BATCH)
        completions = self.engine.generate(requests)
        samples = to_samples(requests, completions)
        for s in samples:
            s.weight_version = self.trainer.version
        return samples

    def forward_backward(self, samples: list[Sample]) -> None:
        old = [s.logprobs for s in samples]
        self.trainer._accumulate(list(range(len(samples))), samples, old, lambda *_: None, {})
        self.trainer.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        self.trainer.step(self.roll_out(), audit=False, observe=lambda *_: None)


def transformers_decode(name: str, dtype: torch.dtype, side: Side) -> Callable[[], Any]:
    """transformers' own generate on the same prompts: sampling, fixed length, KV cache."""
    import transformers

    config, tensors = tensors_of(name)
    skip = ("architectures", "model_type", "torch_dtype", "dtype")
    hf = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**{k: v for k, v in config.to_json().items() if k not in skip})
    )
    hf.load_state_dict(dict(tensors), strict=False)
    hf = hf.to(dtype).eval()
    ids = torch.tensor([r.token_ids for r in side.requests(BATCH)])
    settings = transformers.GenerationConfig(
        max_new_tokens=NEW, min_new_tokens=NEW, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, use_cache=True,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return lambda: hf.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)


def measure(name: str, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    budget = 8192
    exact, plain = (Side(name, dtype, e, budget) for e in (True, False))
    theirs = transformers_decode(name, dtype, plain)
    with torch.no_grad():
        decode = interleaved({"exact": exact.decode, "plain": plain.decode, "transformers": theirs}, repeats)
    samples = exact.roll_out()
    train = interleaved(
        {"exact": lambda: exact.forward_backward(samples), "plain": lambda: plain.forward_backward(samples)}, repeats
    )
    step = interleaved({"exact": exact.step, "plain": plain.step}, repeats)
    tokens = BATCH * NEW
    return {
        "model": name,
        "dtype": str(dtype)[6:],
        "decode_tokens_per_sec": {k: round(tokens / statistics.median(v)) for k, v in decode.items()},
        "decode_time_ratio": ratio(decode["exact"], decode["plain"]),
        "plain_speed_over_transformers": ratio(decode["transformers"], decode["plain"]),
        "fwd_bwd_seconds": {k: statistics.median(v) for k, v in train.items()},
        "fwd_bwd_time_ratio": ratio(train["exact"], train["plain"]),
        "step_seconds": {k: statistics.median(v) for k, v in step.items()},
        "step_time_ratio": ratio(step["exact"], step["plain"]),
        "repeats": repeats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=["tiny", "small"], choices=["tiny", "small"])
    arguments = parser.parse_args()
    rows = []
    print(f"{'model':6} {'dtype':9} {'decode':>7} {'fwd+bwd':>8} {'step':>6}   plain / transformers speed")
    for name in arguments.models:
        for dtype in (torch.float32, torch.bfloat16):
            row = measure(name, dtype, arguments.repeats)
            rows.append(row)
            print(
                f"{name:6} {row['dtype']:9} {row['decode_time_ratio']:7.2f} {row['fwd_bwd_time_ratio']:8.2f} "
                f"{row['step_time_ratio']:6.2f}   {row['plain_speed_over_transformers']:.2f}",
                flush=True,
            )
    keys = ("decode_time_ratio", "fwd_bwd_time_ratio", "step_time_ratio", "plain_speed_over_transformers")
    head = rows[0]
    summary = {"model": head["model"], "dtype": head["dtype"], **{k: head[k] for k in keys}}
    print(f"\nwritten to {write_result('cpu', rows, summary)}")


if __name__ == "__main__":
    main()
