"""`exactrl report`: one self-contained HTML file from a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from exactrl.cli.options import NoColor, Quiet, Verbose, late_import
from exactrl.errors import UsageError

EXAMPLE = "Example: exactrl report runs/demo --out demo.html"


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="File to write [RUN/report.html].", metavar="FILE")] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_color: NoColor = False,
) -> None:
    """Write the HTML report of a run and print its path."""
    if not run.is_dir():
        raise UsageError(f"{run} is not a run folder; give the --out folder of a training run")
    typer.echo(str(late_import("exactrl.report").write_report(run, out)))
