"""The settings themselves: one frozen class per recipe section, each key with its type, limits and meaning."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from exactrl.config.algorithms import AlgorithmName
from exactrl.config.rules import RL_RULES, Rules
from exactrl.contract import CONTRACTS


def _refuse(allowed: Callable[[Any], bool], reason: str | Mapping[Any, str]) -> AfterValidator:
    """Validator for values that have the right type but that this version cannot honour.

    `reason` says why and what to use instead; a mapping gives one reason per value, "" for any other value.
    """

    def check(value: Any) -> Any:
        if allowed(value):
            return value
        raise ValueError(reason if isinstance(reason, str) else reason.get(value, reason[""]))

    return AfterValidator(check)


def _one_today(what: str) -> AfterValidator:
    return _refuse(lambda value: value == 1, f"{what} is not built yet; use 1")


def _has_one_group(pattern: str) -> bool:
    try:
        return pattern == "" or re.compile(pattern).groups == 1
    except re.error:
        return False


def _reward_known(name: str) -> bool:
    return name in ("math", "dapo", "arithmetic") or re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None


_REWARD_CHOICES = 'use "math", "dapo", "arithmetic", or "module:function" to name a Python function of your own'

Text = Annotated[str, Field(min_length=1)]
Whole = Annotated[int, Field(ge=0)]  # 0 has a meaning of its own, given in the description
Count = Annotated[int, Field(ge=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Tables = dict[Annotated[str, Field(pattern=r"^[\w-]+$")], Text]  # name -> data file


class Section(BaseModel):
    """A frozen table. Strict: no bool as a number, no number as text, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


# Settings that are fine alone and wrong together: their keys, and what is wrong ("" = nothing).


class Recipe(Section):
    """A kind of recipe: its fields are sections. `command` runs it; `rules` are checked once single values are fine."""

    command: ClassVar[str]
    rules: ClassVar[Rules]

    @classmethod
    def sections(cls) -> dict[str, type[Section]]:
        return {
            name: field.annotation
            for name, field in cls.model_fields.items()
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        }

    @classmethod
    def settings(cls) -> dict[str, FieldInfo]:
        """Every setting by "section.key", in order."""
        return {f"{name}.{key}": f for name, table in cls.sections().items() for key, f in table.model_fields.items()}

    @classmethod
    def disagreements(cls, values: Mapping[str, Any]) -> list[tuple[tuple[str, ...], str]]:
        """The rules that are broken, as (keys, message).

        `values` maps "section.key" to a valid value; a rule whose keys are not all there is left out.
        """
        problems = []
        for keys, rule in cls.rules.items():
            if all(key in values for key in keys) and (text := rule(*(values[key] for key in keys))):
                problems.append((keys, text))
        return problems

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        values = {f"{section}.{key}": value for section, table in self for key, value in table}
        if problems := self.disagreements(values):
            raise ValueError("\n".join(text for _, text in problems))
        return self


class ModelConfig(Section):
    path: Text = Field(description='Model folder in Hugging Face layout, or "bundled:tiny".')
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="Storage type of the compute weights."
    )


class ContractConfig(Section):
    name: Annotated[str, _refuse(CONTRACTS.__contains__, f"unknown contract; known: {', '.join(CONTRACTS)}")] = Field(
        default="exact-v1", description="Numerics contract that fixes the bits of every logprob."
    )
    true_on_policy: bool = Field(
        default=True, description="Rollout and trainer must agree to the last bit; a differing token stops the run."
    )
    k_leaves: Annotated[Count, _refuse(lambda n: n & (n - 1) == 0, "must be a power of two")] = Field(
        default=1,
        description="Leaves that row-parallel linears are cut into; a power of two. Plain ops have none.",
    )
    residual_dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="Type of the residual stream; a float32 model always has a float32 one."
    )


class DataConfig(Section):
    train: Text = Field(description="Training prompts: a data file, optionally `path@[a:b]`, or a `bundled:` name.")
    eval: Tables = Field(
        default_factory=dict, description="Held-out sets, a table of name = path; metrics are `eval/<name>/mean`."
    )
    prompt_key: Text = Field(default="prompt", description="Column that holds the prompt.")
    label_key: str = Field(
        default="label", description="Column with the answer the reward compares with; empty = none."
    )
    label_pattern: Annotated[
        str, _refuse(_has_one_group, 'must be a regular expression with one group, such as "#### (.+)"')
    ] = Field(
        default="",
        description="Regular expression searched in every label; its group becomes the label. Empty = the whole label.",
    )
    id_key: str = Field(default="", description="Column that holds a unique id; empty = the row number.")
    apply_chat_template: bool = Field(
        default=False,
        description="Render prompts (chat messages, or a text as one user message) with the model's own chat template.",
    )
    enable_thinking: bool = Field(default=False, description="Passed to the chat template; needs apply_chat_template.")
    max_prompt_tokens: Count = Field(default=1024, description="Longest prompt, in tokens, after the chat template.")
    overlong_prompts: Literal["error", "filter"] = Field(
        default="error",
        description="What to do with longer prompts: stop before training, or leave them out and count them.",
    )
    shuffle: bool = Field(default=True, description="Shuffle prompts each epoch, from `rollout.seed`.")
    dedupe: bool = Field(
        default=False, description="Keep only the first of rows with the same prompt, in `data.eval` sets, too."
    )


class RewardConfig(Section):
    name: Annotated[str, _refuse(_reward_known, f"unknown reward; {_REWARD_CHOICES}")] = Field(
        default="math",
        description='Reward function: "math" (last box, 1 or 0), "dapo" (last `Answer:` line, +1 or -1), "arithmetic", '
        'or "module:function" for your own. Rules: docs/rewards.md.',
    )
    timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=5.0, description="Time limit for one response, in seconds."
    )
    key: str = Field(
        default="", description="Entry to use of a dict that your own reward function returns; empty = no dict."
    )
    on_error: Literal["stop", "zero", "drop"] = Field(
        default="stop",
        description="When a reward fails: stop the run, count it as 0, or drop the sample; always counted.",
    )


class RolloutConfig(Section):
    backend: Annotated[
        str,
        _refuse(
            lambda name: name == "native",
            {"sglang": 'the SGLang backend is not built yet; use "native"', "": 'must be "native"'},
        ),
    ] = Field(default="native", description="Engine that generates responses.")
    prompts_per_step: Count = Field(description="Prompts drawn for each step.")
    samples_per_prompt: Count = Field(description="Responses sampled for each prompt; their group sets the baseline.")
    max_new_tokens: Count = Field(description="Longest response, in tokens.")
    temperature: Annotated[float, Field(ge=0.001)] = Field(default=1.0, description="Sampling temperature.")
    stop_token_ids: tuple[Whole, ...] = Field(
        default=(), description="Token ids that end a response; empty = the model's own."
    )
    seed: Seed = Field(default=0, description="Seed of sampling and of data order.")
    max_concurrent: Count = Field(default=256, description="Most sequences decoded together; never changes a bit.")
    kv_tokens: Whole = Field(
        default=0, description="Size of the KV cache, in tokens; 0 = what fits. Never changes a bit."
    )
    chunk_tokens: Count = Field(default=2048, description="Most tokens of one engine step; never changes a bit.")
    tensor_parallel: Annotated[Count, _one_today("tensor parallelism")] = Field(
        default=1, description="Devices that share one engine."
    )


class OptimizerConfig(Section):
    """What every kind of training shares."""

    lr: Annotated[float, Field(ge=0)] = Field(description="Learning rate of AdamW, after warm-up.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="How the learning rate falls from lr to min_lr_ratio * lr over the run."
    )
    warmup_steps: Whole = Field(
        default=0, description="Steps of linear warm-up before the full learning rate; 0 = none."
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0, description="Where a falling learning rate ends, as a part of lr."
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.0, description="Decoupled weight decay of AdamW.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="Decay rates of the two moments of AdamW.")
    grad_clip: Annotated[float, Field(gt=0)] = Field(default=1.0, description="Largest global gradient norm.")
    max_tokens_per_microbatch: Count = Field(
        default=8192, description="Tokens packed into one forward and backward pass."
    )


class TrainConfig(OptimizerConfig):
    backend: Annotated[
        str,
        _refuse(
            lambda name: name == "single",
            {
                "fsdp": 'sharded training is not built yet; use "single" (one process)',
                "megatron": 'the Megatron backend is not built yet; use "single" (one process)',
                "": 'must be "single"',
            },
        ),
    ] = Field(default="single", description='Trainer: "single" is one process on one device.')
    algorithm: AlgorithmName = Field(
        default="grpo",
        description="How advantages are made from rewards, and the loss. gspo's ratios are means over a response: its "
        "paper clips at 3e-4 and 4e-4. cispo's paper sets no lower bound: clip_low = 1. dapo's other parts are "
        "dynamic_sampling, overlong_cache and overlong_filter.",
    )
    minibatches: Count = Field(default=1, description="Optimizer updates per step; must divide the samples of a step.")
    loss_aggregation: Literal["auto", "token-mean", "sequence-mean", "constant-length"] = Field(
        default="auto",
        description="Average over all response tokens, over responses, or over responses x `rollout.max_new_tokens`; "
        '"auto" = constant-length with dr_grpo, sequence-mean with gspo, token-mean with the others.',
    )
    clip_low: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.2, description="Ratios are clipped below 1 - clip_low."
    )
    clip_high: Annotated[float, Field(ge=0)] = Field(
        default=0.28, description="Ratios are clipped above 1 + clip_high."
    )
    dual_clip: Annotated[
        float, Field(ge=0), _refuse(lambda c: c == 0 or c > 1, "it bounds ratios from above; use 0 (off) or above 1")
    ] = Field(default=0.0, description="Bound on the ratio of tokens with a negative advantage, such as 3; 0 = none.")
    entropy_coef: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="Weight of the entropy bonus: that much times the mean entropy, averaged like the loss, is "
        "subtracted from it. At the sampling temperature.",
    )
    overlong_cache: Whole = Field(
        default=0,
        description="Before advantages are made, rewards fall linearly by up to 1 over this many last tokens below "
        "`rollout.max_new_tokens` (DAPO); 0 = never. Reported rewards are those before.",
    )
    overlong_filter: bool = Field(
        default=False,
        description="Leave responses that were cut at `rollout.max_new_tokens` out of the loss (DAPO). Their rewards "
        "still count for the baseline, their tokens are compared.",
    )
    kl_coef: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="Weight of the KL penalty against a frozen reference policy; 0 = none is loaded."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="Estimator of that KL. In the reward only k1 has the gradient of KL on average."
    )
    kl_in: Literal["loss", "reward"] = Field(
        default="loss",
        description="Where the penalty goes: added to the loss, or subtracted from the reward (token by token with "
        "reinforce_pp, else summed over the response).",
    )
    reference: str = Field(
        default="", description="Model folder of the reference policy; empty = `model.path`, before any update."
    )
    dynamic_sampling: bool = Field(
        default=False,
        description="Draw new prompts in place of those whose samples all have the same reward (DAPO), so that a step "
        "has `rollout.prompts_per_step` groups with a learning signal.",
    )
    max_sampling_rounds: Annotated[int, Field(ge=2)] = Field(
        default=10,
        description="Rounds of dynamic sampling; after the last a step is made with the groups it has, or the run "
        "stops where it has none.",
    )
    tensor_parallel: Annotated[Count, _one_today("tensor parallelism")] = Field(
        default=1, description="Devices per layer."
    )
    context_parallel: Annotated[Count, _one_today("context parallelism")] = Field(
        default=1, description="Devices per sequence."
    )
    pipeline_parallel: Annotated[Count, _one_today("pipeline parallelism")] = Field(
        default=1, description="Pipeline stages."
    )
    activation_checkpointing: Annotated[
        str, _refuse(lambda mode: mode == "none", 'activation checkpointing is not built yet; use "none"')
    ] = Field(default="none", description="Recompute activations in the backward pass.")


class RunConfig(Section):
    steps: Count = Field(description="RL steps.")
    eval_every: Whole = Field(default=0, description="Steps between evaluations on `data.eval`; 0 = never.")
    eval_samples: Count = Field(
        default=1,
        description="Responses to each held-out problem; metrics are `eval/<name>/mean`, `/pass@k`, `/ci95`.",
    )
    eval_temperature: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="Sampling temperature of evaluations; 0 = greedy."
    )
    checkpoint_every: Whole = Field(default=0, description="Steps between checkpoints; 0 = only at the end.")
    keep_checkpoints: Count = Field(default=3, description="Newest checkpoints kept.")
    audit_every: Whole = Field(default=10, description="Steps between audits that score every sample again; 0 = never.")
    device: Literal["cpu", "cuda"] = Field(
        default="cpu",
        description='Where rollout and trainer run: "cpu", or "cuda" (one Hopper GPU; with '
        "contract.true_on_policy its kernels must be certified for the model: `exactrl certify`; bfloat16 only).",
    )
    out: Text = Field(default="runs/default", description="Run folder.")
    trackers: Annotated[
        tuple[Text, ...], _refuse(lambda names: not names, "no tracker is built yet; use [] and read metrics.jsonl")
    ] = Field(default=(), description="Experiment trackers besides the run folder.")


class Config(Recipe):
    """A whole RL run. Built by `load_recipe` or `make_config`, which explain problems in the user's terms."""

    command = "train"
    rules = RL_RULES

    model: ModelConfig
    contract: ContractConfig = ContractConfig()
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig
    train: TrainConfig
    run: RunConfig
