"""Settings of an RL run that are fine alone and wrong together: each rule says why, and what to use instead."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from exactrl.config.algorithms import (
    aggregation_fits,
    clip_is_higher,
    dual_clip_fits,
    equal_rewards_are_empty,
    group_has_baseline,
)

# Keys of settings -> a function of their values that gives "" or the problem.
Rules = Mapping[tuple[str, ...], Callable[..., str]]


def _minibatches_divide(prompts: int, samples: int, minibatches: int) -> str:
    total = prompts * samples
    if total % minibatches == 0:
        return ""
    return (
        f"train.minibatches = {minibatches} does not divide the {total} samples of a step "
        f"(rollout.prompts_per_step {prompts} x rollout.samples_per_prompt {samples}); use {_near(total, minibatches)}"
    )


def _near(total: int, wanted: int) -> str:
    """The divisors of `total` next to a number that is none: 1 is always below it."""
    below = next(n for n in range(min(wanted, total), 0, -1) if total % n == 0)
    above = next((n for n in range(wanted, total + 1) if total % n == 0), below)
    return f"{below}" if above == below else f"{below} or {above}"


def _entropy_has_gradient(coef: float, true_on_policy: bool) -> str:
    if coef == 0 or true_on_policy:
        return ""
    return (
        f"train.entropy_coef = {coef} needs contract.true_on_policy: the plain ops report entropy without a gradient; "
        "use 0 without it"
    )


def _overlong_fits(cache: int, max_new_tokens: int) -> str:
    if cache <= max_new_tokens:
        return ""
    return (
        f"train.overlong_cache = {cache} is longer than the longest response (rollout.max_new_tokens {max_new_tokens})"
    )


def _reference_is_used(reference: str, coef: float) -> str:
    if not reference or coef > 0:
        return ""
    return f'train.reference = "{reference}" is only read with a KL penalty; set train.kl_coef above 0, or remove it'


def _warmup_ends(warmup: int, steps: int) -> str:
    if warmup < steps:
        return ""
    return f"train.warmup_steps = {warmup} leaves none of the run's {steps} steps at the full learning rate"


def _minimum_is_used(schedule: str, ratio: float) -> str:
    if schedule != "constant" or ratio == 0:
        return ""
    return f'train.min_lr_ratio = {ratio} has no meaning with train.lr_schedule = "constant"; use "linear" or "cosine"'


def _pattern_has_label(pattern: str, label_key: str) -> str:
    if not pattern or label_key:
        return ""
    return f"data.label_pattern = {pattern!r} has nothing to search: data.label_key is empty"


def _eval_samples_differ(samples: int, temperature: float) -> str:
    if samples == 1 or temperature > 0:
        return ""
    return (
        f"run.eval_samples = {samples} with run.eval_temperature = 0: greedy responses are all the same; use 1 sample, "
        "or a temperature above 0"
    )


def _eval_settings_are_used(every: int, samples: int, temperature: float) -> str:
    given = {"run.eval_samples": (samples, 1), "run.eval_temperature": (temperature, 0.0)}
    return _rests("run.eval_every above 0", given) if every == 0 else ""


def _kl_settings_are_used(coef: float, estimator: str, place: str) -> str:
    given = {"train.kl_estimator": (estimator, "k3"), "train.kl_in": (place, "loss")}
    return _rests("train.kl_coef above 0", given) if coef == 0 else ""


def _rounds_are_used(dynamic: bool, rounds: int) -> str:
    return "" if dynamic else _rests("train.dynamic_sampling = true", {"train.max_sampling_rounds": (rounds, 10)})


def _thinking_is_used(template: bool, thinking: bool) -> str:
    return "" if template else _rests("data.apply_chat_template = true", {"data.enable_thinking": (thinking, False)})


def _reward_key_is_used(name: str, key: str) -> str:
    return "" if ":" in name else _rests("a reward.name of your own, module:function", {"reward.key": (key, "")})


def _rests(need: str, given: Mapping[str, tuple[object, object]]) -> str:
    """Refuses a value other than the default, (value, default), of a setting whose feature is off unless asked for:
    whoever set it expects the feature to be on."""
    key = next((key for key, (value, default) in given.items() if value != default), "")
    if not key:
        return ""
    value, default = (json.dumps(x) for x in given[key])
    return f"{key} = {value} has no effect without {need}; set that, or leave {key} at {default}"


def _eval_has_data(every: int, tables: Mapping[str, str]) -> str:
    if every == 0 or tables:
        return ""
    return f"run.eval_every = {every} but data.eval is empty; name a held-out set in [data.eval] or use 0"


RL_RULES: Rules = {
    ("rollout.prompts_per_step", "rollout.samples_per_prompt", "train.minibatches"): _minibatches_divide,
    ("train.algorithm", "rollout.prompts_per_step", "rollout.samples_per_prompt"): group_has_baseline,
    ("train.algorithm", "train.loss_aggregation"): aggregation_fits,
    ("train.algorithm", "train.clip_low", "train.clip_high"): clip_is_higher,
    ("train.algorithm", "train.dual_clip"): dual_clip_fits,
    ("train.entropy_coef", "contract.true_on_policy"): _entropy_has_gradient,
    ("train.algorithm", "train.dynamic_sampling"): equal_rewards_are_empty,
    ("train.reference", "train.kl_coef"): _reference_is_used,
    ("train.overlong_cache", "rollout.max_new_tokens"): _overlong_fits,
    ("train.warmup_steps", "run.steps"): _warmup_ends,
    ("train.lr_schedule", "train.min_lr_ratio"): _minimum_is_used,
    ("data.label_pattern", "data.label_key"): _pattern_has_label,
    ("run.eval_every", "data.eval"): _eval_has_data,
    ("run.eval_samples", "run.eval_temperature"): _eval_samples_differ,
    ("run.eval_every", "run.eval_samples", "run.eval_temperature"): _eval_settings_are_used,
    ("train.kl_coef", "train.kl_estimator", "train.kl_in"): _kl_settings_are_used,
    ("train.dynamic_sampling", "train.max_sampling_rounds"): _rounds_are_used,
    ("data.apply_chat_template", "data.enable_thinking"): _thinking_is_used,
    ("reward.name", "reward.key"): _reward_key_is_used,
}
