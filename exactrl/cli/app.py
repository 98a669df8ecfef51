"""The `exactrl` command: its subcommands, and how errors become messages and exit codes."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from exactrl import __version__
from exactrl.cli import bench, certify, check, export, generate, grade, plan, report, sft, train
from exactrl.cli import eval as evaluation
from exactrl.cli.options import USAGE_ERROR, NoColor, Quiet, RecipeCommand, Settings, SftRecipeCommand, Verbose
from exactrl.errors import ExactRLError, Interrupted

app = typer.Typer(
    name="exactrl",
    help="RL post-training for LLMs whose rollout and trainer agree to the last bit.",
    epilog="Example: exactrl train tiny --run.steps 5",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train", cls=RecipeCommand, epilog=train.EXAMPLE)(train.train)
app.command("sft", cls=SftRecipeCommand, epilog=sft.EXAMPLE)(sft.sft)
app.command("plan", cls=RecipeCommand, epilog=plan.EXAMPLE)(plan.plan)
app.command("check", epilog=check.EXAMPLE)(check.check)
app.command("certify", epilog=certify.EXAMPLE)(certify.certify)
app.command("generate", epilog=generate.EXAMPLE)(generate.generate)
app.command("eval", epilog=evaluation.EXAMPLE)(evaluation.evaluate)
app.command("grade", epilog=grade.EXAMPLE)(grade.grade)
app.command("export", epilog=export.EXAMPLE)(export.export)
app.command("report", epilog=report.EXAMPLE)(report.report)
app.command("bench", epilog=bench.EXAMPLE, context_settings=bench.ANY_ARGUMENTS)(bench.bench)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"exactrl {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_color: NoColor = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 0 done, 1 unexpected error, 2 usage, configuration or input,
    3 parity, 4 environment, 130 interrupted. A reader that closes our pipe ends the command quietly with 1."""
    settings = Settings()
    _open_closed_streams()
    try:
        code = _invoke(list(sys.argv[1:] if argv is None else argv), settings)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python would flush stdout once more at exit and complain; give it somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", Interrupted.exit_code)
    except ExactRLError as error:
        return _fail(str(error), error.exit_code)
    except USAGE_ERROR as error:
        return _fail(_usage_message(error), 2)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT):
            return _fail(str(error), 4)
        return _unexpected(error, settings)
    except Exception as error:  # noqa: BLE001 - the one place where an unexpected error meets the user
        return _unexpected(error, settings)


def _open_closed_streams() -> None:
    """Puts the null device where stdin, stdout or stderr is closed (`exactrl train … >&-`): or the next file that is
    opened would get its number, and whatever a library prints there would land in that file."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            assert os.open(os.devnull, os.O_RDWR) == number, number  # the lowest number that is free
            if name != "stdin":  # commands tell a closed stdin from an empty one
                setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def _invoke(argv: list[str], settings: Settings) -> int:
    command = typer.main.get_command(app)
    try:
        with command.make_context("exactrl", argv, obj=settings) as ctx:
            command.invoke(ctx)
    except typer.Exit as stop:
        return stop.exit_code
    return 0


def _fail(message: str, code: int) -> int:
    """Prints `error: message` to stderr, later lines indented under the first."""
    sys.stderr.write("error: " + message.replace("\n", "\n       ") + "\n")
    return code


def _usage_message(error: Exception) -> str:
    ctx = getattr(error, "ctx", None)
    command = ctx.command_path if ctx else "exactrl"
    return f"{error.format_message()}\nsee {command} --help"  # type: ignore[attr-defined]


def _unexpected(error: Exception, settings: Settings) -> int:
    if settings.verbose:
        traceback.print_exc()
    name = type(error).__name__
    if isinstance(error, MemoryError) or name == "OutOfMemoryError":
        return _fail(f"out of memory: {error}", 4)
    hint = "" if settings.verbose else "; add -v for the traceback"
    return _fail(f"unexpected {name}: {error}{hint}", 1)
