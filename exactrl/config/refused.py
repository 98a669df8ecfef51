"""Settings that other frameworks have and this one refuses, each with the reason: "unknown setting" would not help."""

from __future__ import annotations

import re

# The first pattern that fits a whole key, or the name of a section, gives the reason.
_REASONS = {
    r"top_p|top_k|min_p|typical_p|(repetition|presence|frequency)_penalty": "responses are sampled from the whole "
    "distribution: a logprob over the kept tokens only is not the one the trainer has, and their ratio would not be 1; "
    "leave it out and use rollout.temperature",
    r"logprobs?_mode|raw_logprobs|processed_logprobs": "a rollout's logprobs are always those of the distribution it "
    "samples from, rollout.temperature included; leave it out",
    r"(use_)?(lora|peft|qlora|adapters?)(_.*)?|target_modules": "adapters are not built: all weights are trained and "
    "handed to the engine; leave it out, and merge an adapter into a model folder before training on it",
    r"(use_)?(torch_)?compile(_.*)?|compilation_config|attn_implementation": "forwards are never compiled or swapped: "
    "another compiler or attention kernel adds in another order, and rollout and trainer would differ; leave it out",
    r"(use_)?(autocast|amp)(_.*)?|mixed_precision|fp16|bf16": "nothing runs under autocast: model.dtype is the type of "
    "the compute weights, masters and logprobs are float32; use model.dtype",
}


def refusal(name: str) -> str:
    """Why "section.key", or a section, is refused; "" where there is no reason of its own."""
    parts = name.lower().replace("-", "_").split(".")
    return next((why for key, why in _REASONS.items() if any(re.fullmatch(key, part) for part in parts)), "")
