"""Settings of supervised fine-tuning. Sections and limits that an RL run has too are settings.py's."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from exactrl.config.settings import (
    Config,
    ContractConfig,
    Count,
    ModelConfig,
    OptimizerConfig,
    Recipe,
    Section,
    Seed,
    Tables,
    Text,
    Whole,
)


class SftModelConfig(ModelConfig):
    init: Literal["folder", "random"] = Field(
        default="folder",
        description='Where the weights come from: the model folder, or "random" for new ones (the folder then needs '
        "config.json and tokenizer only): normal with its initializer_range, norms 1.",
    )
    seed: Seed = Field(default=0, description='Seed of random weights, for init = "random" only.')


class SftDataConfig(Section):
    train: Text = Field(description="Training rows: a data file, optionally `path@[a:b]`, or a `bundled:` name.")
    eval: Tables = Field(
        default_factory=dict, description="Held-out sets, a table of name = path; metrics are `eval/<name>/loss`."
    )
    prompt_key: Text = Field(default="prompt", description="Column that holds the prompt.")
    response_key: Text = Field(default="response", description="Column that holds the response to learn.")
    id_key: str = Field(default="", description="Column that holds a unique id; empty = the row number.")
    append_eos: bool = Field(
        default=True, description="End each response with the model's end token, unless it ends with one already."
    )
    max_tokens: Count = Field(default=4096, description="Longest row: prompt, response and end token.")
    overlong_rows: Literal["error", "filter"] = Field(
        default="error",
        description="What to do with longer rows: stop before training, or leave them out and count them.",
    )
    shuffle: bool = Field(default=True, description="Shuffle rows each epoch, from `run.seed`.")


class SftTrainConfig(OptimizerConfig):
    batch_size: Count = Field(
        description="Rows of one optimizer update; the last batch of an epoch has those that are left."
    )
    loss_aggregation: Literal["token-mean", "sequence-mean"] = Field(
        default="token-mean", description="Average over all response tokens of a batch, or over its responses."
    )


class SftRunConfig(Section):
    steps: Whole = Field(default=0, description="Optimizer updates; 0 = as many as `run.epochs` make.")
    epochs: Whole = Field(default=0, description="Passes over the training rows; 0 = `run.steps` decides.")
    eval_every: Whole = Field(default=0, description="Updates between evaluations on `data.eval`; 0 = never.")
    checkpoint_every: Whole = Field(default=0, description="Updates between checkpoints; 0 = only at the end.")
    keep_checkpoints: Count = Field(default=3, description="Newest checkpoints kept.")
    device: Literal["cpu", "cuda"] = Field(
        default="cpu",
        description='Where the trainer runs: "cpu", or "cuda" (one Hopper GPU; with contract.true_on_policy its '
        "kernels must be certified for the model: `exactrl certify`; bfloat16 only).",
    )
    out: Text = Field(default="runs/sft", description="Run folder.")
    seed: Seed = Field(default=0, description="Seed of data order.")


def _one_length(steps: int, epochs: int) -> str:
    if (steps > 0) != (epochs > 0):
        return ""
    what = "are both set" if steps else "are both 0"
    return f"run.steps = {steps} and run.epochs = {epochs} {what}; exactly one says how long the run is"


def warmup_ends(warmup: int, steps: int) -> str:
    """Steps 0 (run.epochs decides) pass: the length is known when the rows are read."""
    return Config.rules["train.warmup_steps", "run.steps"](warmup, steps) if steps else ""


def _seed_is_used(init: str, seed: int) -> str:
    if seed == 0 or init == "random":
        return ""
    return f'model.seed = {seed} has no effect with model.init = "folder": no weights are drawn; use "random", or 0'


# Rules that an RL run has, too.
_SHARED = (("train.lr_schedule", "train.min_lr_ratio"), ("run.eval_every", "data.eval"))


class SftConfig(Recipe):
    """A whole supervised run. Built by `load_sft_recipe` or `make_sft_config`."""

    command = "sft"
    rules = {  # noqa: RUF012 (pydantic takes the annotation from Recipe)
        ("run.steps", "run.epochs"): _one_length,
        ("model.init", "model.seed"): _seed_is_used,
        ("train.warmup_steps", "run.steps"): warmup_ends,
        **{keys: Config.rules[keys] for keys in _SHARED},
    }

    model: SftModelConfig
    contract: ContractConfig = ContractConfig()
    data: SftDataConfig
    train: SftTrainConfig
    run: SftRunConfig
