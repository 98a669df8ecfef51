"""`exactrl plan`: everything a recipe's one switch derives, without running anything."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from exactrl.cli.options import NoColor, Quiet, Recipe, Verbose, late_import, overrides

EXAMPLE = "Example: exactrl plan tiny --contract.k_leaves 4 --json"


def plan(
    ctx: typer.Context,
    recipe: Recipe,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    true_on_policy: Annotated[
        bool | None, typer.Option("--true-on-policy/--no-true-on-policy", help="The one switch (on by default).")
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_color: NoColor = False,
) -> None:
    """Print what a recipe leads to: contract, kernels, flags, checks. Runs nothing."""
    from exactrl.config import load_recipe

    switch = [] if true_on_policy is None else [("contract.true_on_policy", str(true_on_policy).lower())]
    derived = late_import("exactrl.launch").plan(load_recipe(recipe, [*switch, *overrides(ctx)]))
    if as_json:
        typer.echo(json.dumps(derived, indent=2, ensure_ascii=False))
        return
    for line in plan_lines(derived):
        typer.echo(line)


def plan_lines(derived: Mapping[str, Any]) -> Iterator[str]:
    """One block per section: a title, then aligned `key  value` rows; nested keys are joined with dots."""
    loose = {key: value for key, value in derived.items() if not isinstance(value, Mapping)}
    blocks = {key: value for key, value in derived.items() if isinstance(value, Mapping)}
    if loose:
        blocks = {"plan": loose, **blocks}
    for title, section in blocks.items():
        rows = list(_flatten(section))
        width = max((len(key) for key, _ in rows), default=0)
        yield title
        yield from (f"  {key:<{width}}  {value}".rstrip() for key, value in rows)
        yield ""


def _flatten(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value):
                yield from _flatten(item if isinstance(item, Mapping) else {"": item}, f"{prefix}{key}[{number}].")
        else:
            yield f"{prefix}{key}", _cell(value)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_cell, value)) or "none"
    if value is None or value == {}:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)
