"""What commands share: global options, overrides of recipe settings, late imports."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from exactrl.errors import ConfigError, EnvironmentProblem

if TYPE_CHECKING:
    from rich.console import Console

    from exactrl.config.settings import Recipe as RecipeKind

# Base of all wrong-usage errors of the parser, which typer either vendors or imports.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]

_OVERRIDES = "exactrl.overrides"


@dataclass
class Settings:
    """Global options; given before or after the command, they mean the same."""

    quiet: bool = False
    verbose: bool = False
    no_color: bool = False


def _set(name: str) -> Any:
    def callback(ctx: typer.Context, value: bool) -> bool:
        if value:
            setattr(ctx.obj, name, True)
        return value

    return callback


Quiet = Annotated[
    bool, typer.Option("-q", "--quiet", callback=_set("quiet"), is_eager=True, help="Print only the final line.")
]
Verbose = Annotated[
    bool,
    typer.Option(
        "-v", "--verbose", callback=_set("verbose"), is_eager=True, help="Show tracebacks of unexpected errors."
    ),
]
NoColor = Annotated[
    bool, typer.Option("--no-color", callback=_set("no_color"), is_eager=True, help="No colours on a terminal.")
]
Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="TOML file, or a bundled recipe: tiny, tiny_rloo, tiny_gspo, tiny_dapo.",
        show_default=False,
    ),
]
SftRecipe = Annotated[
    str, typer.Argument(metavar="RECIPE", help="TOML file, or a bundled recipe: tiny_sft.", show_default=False)
]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Model folder, or a bundled model: tiny.", show_default=False)
]
TrueOnPolicy = Annotated[
    bool,
    typer.Option("--true-on-policy/--no-true-on-policy", help="Bit-exact kernels; off runs the plain ones instead."),
]


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"


def console(settings: Settings, *, stderr: bool = False) -> Console:
    """A rich console; NO_COLOR in the environment works like --no-color."""
    from rich.console import Console

    return Console(stderr=stderr, no_color=settings.no_color or None, highlight=False, emoji=False)


def is_interactive(screen: Console) -> bool:
    return screen.is_terminal and not screen.is_dumb_terminal


def late_import(module: str) -> Any:
    """Imports a heavy module. Raises EnvironmentProblem where a package that it needs is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "exactrl":
            raise
        raise EnvironmentProblem(f"the package {error.name!r} is missing; pip install exactrl installs it") from error


def overrides(ctx: typer.Context) -> list[tuple[str, str]]:
    """Settings given as --section.key VALUE, in order."""
    return list(ctx.meta.get(_OVERRIDES, []))


class RecipeCommand(TyperCommand):
    """A command that takes an RL recipe and any of its settings as `--section.key VALUE`."""

    @staticmethod
    def kind() -> type[RecipeKind]:
        from exactrl.config import Config

        return Config

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        kind = self.kind()
        rest, found = split_overrides(args, kind)
        ctx.meta[_OVERRIDES] = found
        try:
            return super().parse_args(ctx, rest)
        except USAGE_ERROR as error:
            if flag := getattr(error, "option_name", ""):
                known = [name for parameter in self.get_params(ctx) for name in parameter.opts]
                raise ConfigError(_unknown_flag(flag, known, kind)) from error
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        from exactrl.config import describe

        with formatter.section("Settings of a recipe, each also an option: --section.key VALUE"):
            formatter.write_dl([(f"--{row.key}", f"{row.help}  [{row.default}]") for row in describe(self.kind())])


class SftRecipeCommand(RecipeCommand):
    """The same for a recipe of supervised fine-tuning."""

    @staticmethod
    def kind() -> type[RecipeKind]:
        from exactrl.config import SftConfig

        return SftConfig


_OVERRIDE = re.compile(r"--(no-)?([\w-]+\.[\w.-]+)(?:=(.*))?", re.DOTALL)


def split_overrides(args: list[str], kind: type[RecipeKind]) -> tuple[list[str], list[tuple[str, str]]]:
    """Takes `--section.key VALUE`, `--section.key=VALUE` and, for a bool, `--no-section.key` out of the arguments.

    A value that starts with "--" needs the form with "=". Raises ConfigError for an override without a value.
    """
    rest: list[str] = []
    found: list[tuple[str, str]] = []
    queue = list(args)
    while queue:
        arg = queue.pop(0)
        if arg == "--":
            return [*rest, arg, *queue], found
        match = _OVERRIDE.fullmatch(arg)
        if match is None:
            rest.append(arg)
            continue
        negated, name, value = match.groups()
        if negated:
            value = _negate(name, value, kind)
        elif value is None:
            if not queue or queue[0].startswith("--") or queue[0] in ("-q", "-v", "-h"):
                raise ConfigError(_no_value(name, kind))
            value = queue.pop(0)
        found.append((name, value))
    return rest, found


def _negate(name: str, value: str | None, kind: type[RecipeKind]) -> str:
    settings = kind.settings()
    if name in settings and (settings[name].annotation is not bool or value is not None):
        raise ConfigError(f"--no-{name} does not exist; write --{name} VALUE")
    return "false"


def _no_value(name: str, kind: type[RecipeKind]) -> str:
    from exactrl.config.explain import allowed, unknown

    settings = kind.settings()
    if name not in settings:
        return unknown(name, kind)
    return f"--{name} needs a value ({allowed(settings[name])}); write --{name} VALUE"


def _unknown_flag(flag: str, known: list[str], kind: type[RecipeKind]) -> str:
    settings = kind.settings()
    key = flag.lstrip("-").replace("-", "_")
    near = [f"--{name}" for name in settings if name.endswith(f".{key}")]
    if not near:
        by_key = {name.partition(".")[2]: f"--{name}" for name in settings}
        near = get_close_matches(flag, known, 1) or [by_key[k] for k in get_close_matches(key, by_key, 1)]
    return f"unknown option {flag}" + (f"; did you mean {' or '.join(near)}?" if near else "; see --help")
