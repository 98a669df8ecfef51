"""`exactrl sft`: supervised fine-tuning from a recipe."""

from __future__ import annotations

from typing import Annotated

import typer

from exactrl.cli.options import NoColor, Quiet, SftRecipe, Verbose, console, late_import, overrides

EXAMPLE = "Example: exactrl sft tiny_sft --train.lr 1e-4 --run.epochs 1 --out runs/sft"


def sft(
    ctx: typer.Context,
    recipe: SftRecipe,
    out: Annotated[str | None, typer.Option(help="Run folder; same as --run.out.", metavar="DIR")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest complete checkpoint of the run folder, bit for bit.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_color: NoColor = False,
) -> None:
    """Fine-tune on prompts and responses from a recipe. Any setting can be given as --section.key VALUE."""
    from exactrl.cli.progress import SFT_VIEW, train_events
    from exactrl.config import load_sft_recipe

    given = [] if out is None else [("run.out", out)]
    config = load_sft_recipe(recipe, [*given, *overrides(ctx)])
    launch = late_import("exactrl.launch")
    with train_events(console(ctx.obj), ctx.obj, config.run.steps, tuple(config.data.eval), SFT_VIEW) as events:
        summary = launch.sft(config, events, resume=resume)
    events.conclude(summary)
