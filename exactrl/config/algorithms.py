"""What each algorithm's name allows: aggregations, group sizes, clips. The algorithms themselves are in algo/."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AlgorithmName = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "cispo", "dapo"]
TOKEN, SEQUENCE, CONSTANT = "token-mean", "sequence-mean", "constant-length"


@dataclass(frozen=True, slots=True)
class AlgorithmRules:
    """aggregations: allowed ones, the first is what "auto" means; min_group: fewest samples of a prompt;
    dual_clip: whether the loss has an unbounded side to clip; because: why other aggregations are refused."""

    aggregations: tuple[str, ...] = (TOKEN, SEQUENCE, CONSTANT)
    min_group: int = 2
    dual_clip: bool = True
    because: str = ""


ALGORITHM_RULES: dict[str, AlgorithmRules] = {
    "grpo": AlgorithmRules(),
    "dr_grpo": AlgorithmRules(
        (CONSTANT, TOKEN), because="it divides each response by its own length, the bias that dr_grpo removes"
    ),
    "rloo": AlgorithmRules(),
    "reinforce_pp": AlgorithmRules(min_group=1),
    "reinforce_pp_baseline": AlgorithmRules(),
    "gspo": AlgorithmRules(
        (SEQUENCE,), dual_clip=False, because="gspo has one ratio per response, and all responses weigh the same"
    ),
    "cispo": AlgorithmRules(
        (TOKEN, CONSTANT), dual_clip=False, because="cispo keeps every token's gradient at the same weight"
    ),
    "dapo": AlgorithmRules((TOKEN,), because="the mean over tokens is part of dapo; grpo takes the others"),
}


def aggregation_of(algorithm: str, loss_aggregation: str) -> str:
    """The aggregation that `train.loss_aggregation` means with this algorithm."""
    return ALGORITHM_RULES[algorithm].aggregations[0] if loss_aggregation == "auto" else loss_aggregation


def aggregation_fits(algorithm: str, loss_aggregation: str) -> str:
    rules = ALGORITHM_RULES[algorithm]
    if loss_aggregation in ("auto", *rules.aggregations):
        return ""
    allowed = " or ".join(f'"{name}"' for name in ("auto", *rules.aggregations))
    return (
        f'train.loss_aggregation = "{loss_aggregation}" makes no sense with {algorithm}: {rules.because}; use {allowed}'
    )


def dual_clip_fits(algorithm: str, dual_clip: float) -> str:
    if dual_clip == 0 or ALGORITHM_RULES[algorithm].dual_clip:
        return ""
    why = {"cispo": "cispo clips its weights on both sides already", "gspo": "gspo clips responses, not tokens"}
    return f"train.dual_clip = {dual_clip} makes no sense with {algorithm}: {why[algorithm]}; use 0"


def equal_rewards_are_empty(algorithm: str, dynamic_sampling: bool) -> str:
    if not dynamic_sampling or algorithm != "reinforce_pp":
        return ""
    return (
        "train.dynamic_sampling makes no sense with reinforce_pp: its baseline is the mean of the step, so a group of "
        "equal rewards has a learning signal; use false, or reinforce_pp_baseline"
    )


def clip_is_higher(algorithm: str, clip_low: float, clip_high: float) -> str:
    if algorithm != "dapo" or clip_high > clip_low:
        return ""
    return (
        f"train.clip_high = {clip_high} is not above train.clip_low = {clip_low}, but the higher upper bound is part "
        "of dapo; raise it, or use grpo"
    )


def group_has_baseline(algorithm: str, prompts: int, samples: int) -> str:
    if ALGORITHM_RULES[algorithm].min_group > samples:
        return (
            f"rollout.samples_per_prompt = {samples} gives no learning signal with {algorithm}: the advantage of a "
            "sample is its distance to its group's mean, and a group of one is its own mean; use 2 or more"
        )
    if prompts * samples > 1:
        return ""
    return (
        f"one sample per step gives no learning signal with {algorithm}: its advantage is the distance to the step's "
        "mean; raise rollout.prompts_per_step or rollout.samples_per_prompt"
    )
