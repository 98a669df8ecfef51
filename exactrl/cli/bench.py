"""`exactrl bench`: runs a benchmark of the repository."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from exactrl.errors import EnvironmentProblem, UsageError
from exactrl.rl.interrupt import handling

EXAMPLE = "Example: exactrl bench rollout --part ours --shape 0.6B; exactrl bench cpu --help"
ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
ROOT = Path(__file__).resolve().parents[2]


def names(folder: Path) -> list[str]:
    """Modules of a folder that can be run."""
    return sorted(f.stem for f in folder.glob("*.py") if '__name__ == "__main__"' in f.read_text(encoding="utf-8"))


def bench(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Benchmark; none lists them.")] = "",
) -> None:
    """Run a benchmark from bench/ with its own options; it prints a table and writes bench/results/NAME.json."""
    found = names(ROOT / "bench")
    if not found:
        raise EnvironmentProblem(
            f"no benchmarks in {ROOT / 'bench'}: they are part of the repository, not of the installed package; "
            "run this in a checkout installed with pip install -e"
        )
    if name in ("", "-h", "--help"):
        typer.echo(f"exactrl bench NAME [OPTIONS]\n\n{EXAMPLE}\n\nBenchmarks: {', '.join(found)}")
        return
    if name.startswith("-"):
        raise UsageError(f"{name!r} comes before the benchmark's name; options come after it")
    if name not in found:
        close = get_close_matches(name, found, 1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(found)}"
        raise UsageError(f"no benchmark {name!r}{hint}")
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", f"bench.{name}", *ctx.args]
    code = _run(command, {**os.environ, "PYTHONPATH": paths})
    raise typer.Exit(code if code >= 0 else 128 - code)


def _run(command: list[str], env: dict[str, str]) -> int:
    """The benchmark ends by itself: a terminal's Ctrl-C reaches it, too, and SIGTERM is passed on."""
    process = subprocess.Popen(command, env=env)
    with handling([signal.SIGTERM], lambda number, _: process.send_signal(number)):
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue
