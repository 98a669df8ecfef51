"""Builds the bundled tiny model and its arithmetic data sets; seeded.

    python scripts/make_tiny_model.py [--seed N] [--steps N] [--out exactrl/assets]

Writes OUT/tiny/ (a Hugging Face folder, bf16, with a README that holds the results) and
OUT/arithmetic/{train,heldout}.jsonl. The supervised warm-up teaches the format and the column sums, but in most of its
demonstrations a carry is forgotten. So the model starts with a bad habit that it can also do without: wrong more often
than not, greedy decoding above all, and right often enough for reinforcement learning to find the better way.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from exactrl.tasks import arithmetic
from exactrl.types import Prompt, Sample

SPECIAL = ["<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>"]
# Every id of the model's vocabulary has a text: printable ASCII, newline, and some signs that fill it up to 112.
CHARACTERS = ["\n"] + [chr(c) for c in range(32, 127)] + list("×÷±≤≥≠√π°·→")
IGNORE = -100
NUM_TRAIN, NUM_HELDOUT, DATA_SEED = 2048, 256, 1234
MAX_NEW_TOKENS = 48

README = """# The bundled tiny model

A character-level Qwen3 of {parameters:,} parameters for the arithmetic task (`exactrl/tasks/arithmetic.py`), made by

    {command}

with seed {seed}: {steps} steps of supervised warm-up, {batch} demonstrations each, in which a carry is forgotten with
probability {p_forget:g}. That is on purpose: the model can add, but has a bad habit that reinforcement learning
removes. The weights are stored in bf16. Another machine or torch version may give slightly different weights.

Results on the {num_heldout} held-out problems (`exactrl/assets/arithmetic/heldout.jsonl`), weights as stored:

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


def write_data(folder: Path, num_train: int, num_heldout: int, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", num_train), ("heldout", num_heldout)):
        with open(folder / f"{part}.jsonl", "w", encoding="utf-8") as file:
            for i, operands in enumerate(arithmetic.problems(count, seed=seed, heldout=part == "heldout")):
                row = {
                    "id": f"{part}-{i:04d}",
                    "prompt": arithmetic.prompt_text(operands),
                    "label": arithmetic.label(operands),
                }
                file.write(json.dumps(row) + "\n")


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


def batch_tensors(tokenizer: Tokenizer, pairs: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and targets (IGNORE on prompt and padding), both [B, longest]."""
    pad, end = tokenizer.token_to_id("<|pad|>"), tokenizer.token_to_id("<|im_end|>")
    rows, targets = [], []
    for prompt, solution in pairs:
        p, s = tokenizer.encode(prompt).ids, [*tokenizer.encode(solution).ids, end]
        rows.append(p + s)
        targets.append([IGNORE] * (len(p) - 1) + s + [IGNORE])
    length = max(map(len, rows))
    ids = torch.tensor([r + [pad] * (length - len(r)) for r in rows])
    return ids, torch.tensor([t + [IGNORE] * (length - len(t)) for t in targets])


def warm_up(model: torch.nn.Module, tokenizer: Tokenizer, args: argparse.Namespace) -> float:
    """Supervised warm-up in fp32: AdamW, linear warm-up, cosine decay. Returns the last loss (nats per token)."""
    rng = random.Random(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    started, value = time.time(), math.nan
    for step in range(args.steps):
        scale = min((step + 1) / 30, 0.5 * (1 + math.cos(math.pi * step / args.steps)) + 0.02)
        optimizer.param_groups[0]["lr"] = args.lr * scale
        ids, targets = batch_tensors(tokenizer, [demonstration(rng, args.p_right) for _ in range(args.batch)])
        logits = model(ids).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value = loss.item()
        if step % 25 == 0 or step == args.steps - 1:
            print(f"step {step} loss {value:.4f} ({time.time() - started:.0f} s)", flush=True)
    return value


@torch.no_grad()
def generate(model: torch.nn.Module, prompts: torch.Tensor, end: int, *, greedy: bool) -> torch.Tensor:
    """Responses to prompts of equal length, int64 [B, MAX_NEW_TOKENS]; behind a stop token come stop tokens only."""
    out = torch.full((len(prompts), MAX_NEW_TOKENS), end)
    cache, tokens, done = DynamicCache(), prompts, torch.zeros(len(prompts), dtype=torch.bool)
    for position in range(MAX_NEW_TOKENS):
        logits = model(tokens, past_key_values=cache, logits_to_keep=1).logits[:, -1].float()
        drawn = logits.argmax(-1) if greedy else torch.multinomial(logits.softmax(-1), 1)[:, 0]
        out[:, position] = drawn.masked_fill(done, end)
        done |= out[:, position] == end
        tokens = out[:, position : position + 1]
        if done.all():
            break
    return out


def evaluate(model: torch.nn.Module, tokenizer: Tokenizer, *, copies: int, greedy: bool) -> tuple[float, float, float]:
    """Mean reward, mean response length in tokens, and the fraction cut off, on the held-out problems."""
    end = tokenizer.token_to_id("<|im_end|>")
    heldout = arithmetic.problems(NUM_HELDOUT, seed=DATA_SEED, heldout=True) * copies
    prompts = torch.tensor([tokenizer.encode(arithmetic.prompt_text(operands)).ids for operands in heldout])
    rewards, lengths, cut = [], [], []
    for operands, row in zip(heldout, generate(model, prompts, end, greedy=greedy).tolist(), strict=True):
        ids = row[: row.index(end)] if end in row else row
        text = tokenizer.decode(ids, skip_special_tokens=False)
        reason = "stop" if end in row else "length"
        sample = Sample("", 0, (), ids, np.zeros(0, np.float32), reason, 0, 1.0, text=text)
        rewards.append(arithmetic.reward(Prompt("", "", (), arithmetic.label(operands)), sample))
        lengths.append(len(ids) + (end in row))
        cut.append(end not in row)
    return float(np.mean(rewards)), float(np.mean(lengths)), float(np.mean(cut))


def save(model: torch.nn.Module, folder: Path) -> None:
    """Weights in bf16; the tied LM head is not stored a second time."""
    tensors = {k: v.detach().bfloat16().contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def write_readme(folder: Path, tokenizer: Tokenizer, loss: float, args: argparse.Namespace) -> None:
    """Evaluates the weights as stored (bf16 values, fp32 arithmetic) and writes README.md."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    greedy, _, _ = evaluate(model, tokenizer, copies=1, greedy=True)
    sampled, length, truncated = evaluate(model, tokenizer, copies=4, greedy=False)
    text = README.format(
        parameters=sum(p.numel() for p in model.parameters()),
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
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    folder = args.out / "tiny"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    write_tokenizer(tokenizer, folder)
    write_json(folder / "config.json", model_config(tokenizer))
    write_json(folder / "generation_config.json", generation_config(tokenizer))
    write_data(args.out / "arithmetic", NUM_TRAIN, NUM_HELDOUT, DATA_SEED)
    model = Qwen3ForCausalLM(Qwen3Config(**model_config(tokenizer)))
    loss = warm_up(model, tokenizer, args)
    save(model, folder)
    write_readme(folder, tokenizer, loss, args)


if __name__ == "__main__":
    main()
