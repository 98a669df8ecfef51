"""`exactrl train`: an RL run from a recipe."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from exactrl.cli.options import NoColor, Quiet, Recipe, Verbose, console, late_import, overrides

EXAMPLE = "Example: exactrl train tiny --run.steps 5 --rollout.temperature=0.8 --out runs/short"


class Mode(StrEnum):
    normal = "normal"
    debug_minimal = "debug_minimal"


# A run of seconds that goes through every part. Its groups are so small that rewards may well all be equal, and the
# gradient then 0.
_DEBUG_MINIMAL = [
    ("run.steps", "2"),
    ("run.eval_every", "0"),
    ("run.eval_samples", "1"),
    ("run.eval_temperature", "0"),
    ("rollout.prompts_per_step", "2"),
    ("rollout.samples_per_prompt", "2"),
    ("rollout.max_new_tokens", "16"),
    ("train.minibatches", "1"),
]


def train(
    ctx: typer.Context,
    recipe: Recipe,
    true_on_policy: Annotated[
        bool | None,
        typer.Option(
            "--true-on-policy/--no-true-on-policy", help="Rollout and trainer agree to the last bit (on by default)."
        ),
    ] = None,
    train_backend: Annotated[str | None, typer.Option(help="Same as --train.backend.", metavar="NAME")] = None,
    rollout_backend: Annotated[str | None, typer.Option(help="Same as --rollout.backend.", metavar="NAME")] = None,
    mode: Annotated[
        Mode, typer.Option(help="debug_minimal: 2 steps of 2 prompts x 2 samples, 16 new tokens, no evaluation.")
    ] = Mode.normal,
    out: Annotated[str | None, typer.Option(help="Run folder; same as --run.out.", metavar="DIR")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest complete checkpoint of the run folder, bit for bit.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_color: NoColor = False,
) -> None:
    """Train with RL from a recipe. Any setting can be given as --section.key VALUE."""
    from exactrl.cli.progress import train_events
    from exactrl.config import load_recipe

    short = {
        "contract.true_on_policy": None if true_on_policy is None else str(true_on_policy).lower(),
        "train.backend": train_backend,
        "rollout.backend": rollout_backend,
        "run.out": out,
    }
    given = [(key, value) for key, value in short.items() if value is not None]
    debug = _DEBUG_MINIMAL if mode is Mode.debug_minimal else []
    config = load_recipe(recipe, [*debug, *given, *overrides(ctx)])
    launch = late_import("exactrl.launch")
    with train_events(console(ctx.obj), ctx.obj, config.run.steps, tuple(config.data.eval)) as events:
        summary = launch.train(config, events, resume=resume)
    events.conclude(summary)
