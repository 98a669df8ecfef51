"""`exactrl export`: a run's model as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from exactrl.cli.options import Dtype, NoColor, Quiet, Verbose, late_import
from exactrl.errors import UsageError

EXAMPLE = "Example: exactrl export runs/demo my-model --step 40"


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, or a checkpoint.", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; must not exist.", show_default=False)],
    step: Annotated[int | None, typer.Option(min=1, help="Step of the checkpoint [the newest complete one].")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Type of the weights [the run's].")] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_color: NoColor = False,
) -> None:
    """Write a model that transformers opens: safetensors, config, tokenizer."""
    if not run.is_dir():
        raise UsageError(f"{run} is not a run folder; give the --out folder of a training run")
    launch = late_import("exactrl.launch")
    found = launch.export(run, out, step=step, dtype=dtype.value if dtype else None)
    typer.echo(f"{out}: step {found['step']}, {found['dtype']}, compute digest {found['compute_digest']}")
