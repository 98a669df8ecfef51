"""Builds the bundled tiny model and its arithmetic data sets; seeded.

    python scripts/make_tiny_model.py [--seed N] [--steps N] [--out exactrl/assets]

Writes OUT/tiny/ (a Hugging Face folder, bf16, with a README that holds the results) and
OUT/arithmetic/{train,heldout,sft}.jsonl. The supervised warm-up (`exactrl sft`, fp32, from random weights) teaches the
format and the column sums, but in most of its demonstrations a carry is forgotten. So the model starts with a bad habit
that it can also do without: wrong more often than not, greedy decoding above all, and right often enough for
reinforcement learning to find the better way.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

import exactrl
from exactrl.cli.options import Settings, console
from exactrl.cli.progress import SFT_VIEW, train_events
from exactrl.contract import get_contract
from exactrl.launch import Engine
from exactrl.model.folder import load_model, save_model
from exactrl.model.weights import named_weights
from exactrl.ops import Ops
from exactrl.tasks import arithmetic
from exactrl.types import Prompt, Sample, SamplingParams

SPECIAL = ["<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>"]
# Every id of the model's vocabulary has a text: printable ASCII, newline, and some signs that fill it up to 112.
CHARACTERS = ["\n"] + [chr(c) for c in range(32, 127)] + list("×÷±≤≥≠√π°·→")
NUM_TRAIN, NUM_HELDOUT, DATA_SEED = 2048, 256, 1234
NUM_SFT, SFT_SEED = 512, 4321
MAX_NEW_TOKENS = 48

README = """# The bundled tiny model

A character-level Qwen3 of {parameters:,} parameters for the arithmetic task (`exactrl/tasks/arithmetic.py`), made by

    {command}

with seed {seed}: {steps} steps of supervised warm-up, {batch} demonstrations each, in which a carry is forgotten with
probability {p_forget:g}. That is on purpose: the model can add, but has a bad habit that reinforcement learning
removes. The weights are stored in bf16. Another machine or torch version may give slightly different weights.

Results on the {num_heldout} held-out problems (`exactrl/assets/arithmetic/heldout.jsonl`), weights as stored,
decoded by our engine in bfloat16:

| | |
|---|---|
| last warm-up loss (nats per response token) | {loss:.4f} |
| accuracy, greedy | {greedy:.3f} |
| accuracy, sampled at temperature 1, 4 each | {sampled:.3f} |
| mean response length (tokens) | {length:.1f} |
| cut off at {max_new_tokens} tokens (sampled) | {truncated:.4f} |
"""


def build_tokenizer() -> Tokenizer:
    """One token per character; a character outside the vocabulary becomes <|unk|>, it is never dropped."""
    vocab = {token: i for i, token in enumerate(SPECIAL + CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|pad|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|unk|>",
        "additional_special_tokens": ["<|endoftext|>", "<|im_start|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    write_json(folder / "tokenizer_config.json", config)


def model_config(tokenizer: Tokenizer) -> dict:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 4,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|pad|>"),
        "torch_dtype": "bfloat16",
    }


def generation_config(tokenizer: Tokenizer) -> dict:
    return {
        "eos_token_id": [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")],
        "pad_token_id": tokenizer.token_to_id("<|pad|>"),
        "do_sample": True,
        "temperature": 1.0,
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_data(folder: Path) -> None:
    """Problems with labels for RL, and right solutions of training problems for recipes/tiny_sft.toml."""
    for part, count in (("train", NUM_TRAIN), ("heldout", NUM_HELDOUT)):
        drawn = arithmetic.problems(count, seed=DATA_SEED, heldout=part == "heldout")
        rows = [
            {"id": f"{part}-{i:04d}", "prompt": arithmetic.prompt_text(p), "label": arithmetic.label(p)}
            for i, p in enumerate(drawn)
        ]
        write_rows(folder / f"{part}.jsonl", rows)
    solved = [
        {"id": f"sft-{i:04d}", "prompt": arithmetic.prompt_text(p), "response": arithmetic.solution_text(p)}
        for i, p in enumerate(arithmetic.problems(NUM_SFT, seed=SFT_SEED, heldout=False))
    ]
    write_rows(folder / "sft.jsonl", solved)


def demonstration(rng: random.Random, p_right: float) -> tuple[str, str]:
    """A training problem's prompt and a worked solution; the carry is forgotten with probability 1 - p_right.

    Problems without a carry (about a quarter) are solved rightly in any case. Held-out problems never occur.
    """
    while True:
        operands = tuple(rng.randint(arithmetic.SMALLEST, arithmetic.LARGEST) for _ in range(arithmetic.NUM_OPERANDS))
        if not arithmetic.is_heldout(operands):
            break
    carry = None if rng.random() < p_right else 0
    return arithmetic.prompt_text(operands), arithmetic.solution_text(operands, carry=carry)


def warm_up(folder: Path, work: Path, args: argparse.Namespace) -> dict[str, Any]:
    """`exactrl sft` from random weights: each demonstration is seen once. Returns its summary."""
    rng = random.Random(args.seed)
    pairs = [demonstration(rng, args.p_right) for _ in range(args.steps * args.batch)]
    write_rows(work / "demonstrations.jsonl", [{"prompt": p, "response": s} for p, s in pairs])
    recipe = {
        "model": {"path": str(folder), "dtype": "float32", "init": "random", "seed": args.seed},
        "data": {"train": str(work / "demonstrations.jsonl"), "shuffle": False},
        "train": {
            "lr": args.lr, "lr_schedule": "cosine", "warmup_steps": 30, "min_lr_ratio": 0.02, "betas": [0.9, 0.98],
            "weight_decay": 0.01, "batch_size": args.batch,
        },
        "run": {"epochs": 1, "out": str(work / "run")},
    }  # fmt: skip
    settings = Settings()
    with train_events(console(settings), settings, args.steps, (), SFT_VIEW) as events:
        return exactrl.sft(exactrl.make_sft_config(recipe), events)


def store(checkpoint: Path, folder: Path) -> int:
    """The weights in bf16; returns their number."""
    model = load_model(checkpoint, Ops(get_contract("exact-v1"), exact=False), torch.bfloat16, trainable=False)
    shutil.rmtree(folder)
    save_model(model, folder, companions=checkpoint)
    (folder / "model.safetensors").chmod(0o644)
    return sum(w.numel() for _, w in named_weights(model))


def evaluate(engine: Engine, *, copies: int, temperature: float) -> tuple[float, float, float]:
    """Mean reward, mean response length in tokens, and the fraction cut off, on the held-out problems."""
    heldout = arithmetic.problems(NUM_HELDOUT, seed=DATA_SEED, heldout=True) * copies
    prompts = [arithmetic.prompt_text(operands) for operands in heldout]
    completions = engine.generate(prompts, SamplingParams(MAX_NEW_TOKENS, temperature))
    assert engine.tokenizer is not None
    rewards = []
    for operands, c in zip(heldout, completions, strict=True):
        text = engine.tokenizer.decode_response(c.token_ids)
        sample = Sample("", 0, (), c.token_ids, c.logprobs, c.finish_reason, 0, 1.0, text=text)
        rewards.append(arithmetic.reward(Prompt("", "", (), arithmetic.label(operands)), sample))
    cut = [c.finish_reason == "length" for c in completions]
    return float(np.mean(rewards)), float(np.mean([len(c.token_ids) for c in completions])), float(np.mean(cut))


def write_readme(folder: Path, parameters: int, loss: float, args: argparse.Namespace) -> None:
    """Evaluates the weights as stored and writes README.md."""
    engine = Engine(str(folder))
    greedy, _, _ = evaluate(engine, copies=1, temperature=0.0)
    sampled, length, truncated = evaluate(engine, copies=4, temperature=1.0)
    text = README.format(
        parameters=parameters,
        command=f"python scripts/make_tiny_model.py --seed {args.seed} --steps {args.steps} --p-right {args.p_right}",
        p_forget=1 - args.p_right,
        num_heldout=NUM_HELDOUT,
        max_new_tokens=MAX_NEW_TOKENS,
        **{"loss": loss, "greedy": greedy, "sampled": sampled, "length": length, "truncated": truncated},
        **{"seed": args.seed, "steps": args.steps, "batch": args.batch},
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--p-right", type=float, default=0.2)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "exactrl" / "assets")
    args = parser.parse_args()
    folder = args.out / "tiny"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    write_tokenizer(tokenizer, folder)
    write_json(folder / "config.json", model_config(tokenizer))
    write_json(folder / "generation_config.json", generation_config(tokenizer))
    write_data(args.out / "arithmetic")
    with tempfile.TemporaryDirectory() as work:
        summary = warm_up(folder, Path(work), args)
        parameters = store(Path(summary["checkpoint"]), folder)
    write_readme(folder, parameters, summary["loss"], args)


if __name__ == "__main__":
    main()
