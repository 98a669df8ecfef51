"""`exactrl check`: the parity ladder on a model, one row per rung."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from exactrl.cli.options import (
    Device,
    Dtype,
    Model,
    NoColor,
    Quiet,
    TrueOnPolicy,
    Verbose,
    console,
    is_interactive,
    late_import,
)
from exactrl.errors import ParityError

if TYPE_CHECKING:
    from exactrl.parity.check import RungResult

EXAMPLE = "Example: exactrl check tiny --dtype float32 --json"


def check(
    ctx: typer.Context,
    model: Model,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    device: Annotated[Device, typer.Option(help="Where to run.")] = Device.cpu,
    dtype: Annotated[Dtype | None, typer.Option(help="Storage type of the weights [both; bfloat16 on a GPU].")] = None,
    allow_skip: Annotated[
        list[str] | None, typer.Option(help="Rung that may be skipped; can be repeated.", metavar="NAME")
    ] = None,
    true_on_policy: TrueOnPolicy = True,
    k_leaves: Annotated[int, typer.Option(min=1, help="As contract.k_leaves of the run.")] = 1,
    residual_dtype: Annotated[str, typer.Option(help="As contract.residual_dtype.", metavar="DTYPE")] = "bfloat16",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts and of the sampling.")] = 0,
    rung: Annotated[list[str] | None, typer.Option(help="Run only this rung; can be repeated.", metavar="NAME")] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_color: NoColor = False,
) -> None:
    """Check bit for bit that rollout and trainer agree on a model. Exit code 3 if they do not."""
    every = [Dtype.bfloat16] if device == Device.cuda else list(Dtype)  # the GPU contract has no float32 models
    dtypes = [each.value for each in ([dtype] if dtype else every)]
    launch = late_import("exactrl.launch")
    table = _Table(ctx, as_json)
    results = launch.check(
        model,
        dtypes=dtypes,
        device=device.value,
        true_on_policy=true_on_policy,
        seed=seed,
        k_leaves=k_leaves,
        residual_dtype=residual_dtype,
        rungs=rung or None,
        on_rung=table.row,
    )
    problems = violations(results, allow_skip or [])
    if as_json:
        head = {"model": model, "device": device.value, "dtypes": dtypes, "true_on_policy": true_on_policy}
        rungs = [result.as_dict() for result in results]
        typer.echo(json.dumps({**head, "rungs": rungs, "passed": not problems}, indent=2))
    else:
        typer.echo(_summary(results))
    if problems:
        raise ParityError("\n".join(["the parity check failed", *problems]))


def violations(results: Sequence[RungResult], allow_skip: Sequence[str]) -> list[str]:
    """Why a ladder does not pass, one line each. A rung that passed without comparing anything proves nothing."""
    problems = []
    for result in results:
        name = f"{result.name} ({result.dtype})"
        if result.status == "skip":
            if result.name not in allow_skip:
                problems.append(f"{name} was skipped: {result.detail} (--allow-skip {result.name} accepts that)")
        elif result.status != "pass" or result.mismatched:
            problems.append(f"{name}: {result.mismatched} of {result.compared} values differ. {result.detail}".rstrip())
        elif result.compared == 0:
            problems.append(f"{name} compared no values")
    if not any(result.compared for result in results):
        problems.append("nothing was compared")
    return problems


def _summary(results: Sequence[RungResult]) -> str:
    count = {status: sum(result.status == status for result in results) for status in ("pass", "fail", "skip")}
    compared = sum(result.compared for result in results)
    mismatched = sum(result.mismatched for result in results)
    return (
        f"{count['pass']} rungs passed, {count['fail']} failed, {count['skip']} skipped; "
        f"{compared:,} values compared, {mismatched:,} differ"
    )


_STYLES = {"pass": "green", "fail": "bold red", "skip": "yellow"}


class _Table:
    """Prints a row as soon as its rung is done; on stderr beside JSON, and then only on a terminal."""

    def __init__(self, ctx: typer.Context, as_json: bool) -> None:
        self.screen = console(ctx.obj, stderr=as_json)
        self.silent = ctx.obj.quiet or (as_json and not is_interactive(self.screen))
        self.started = False

    def row(self, result: RungResult) -> None:
        from rich.text import Text

        if self.silent:
            return
        if not self.started:
            self.started = True
            head = f"{'':4}  {'rung':<28}  {'dtype':<8}  {'compared':>12}  {'differ':>8}  {'seconds':>7}"
            self.screen.print(Text(head, style="bold"), soft_wrap=True)
        line = Text(result.status, style=_STYLES.get(result.status, ""))
        line.append(
            f"  {result.name:<28}  {result.dtype:<8}  {result.compared:>12,}  {result.mismatched:>8,}  "
            f"{result.seconds:>7.2f}  {result.detail}".rstrip(),
            style="default",
        )
        self.screen.print(line, soft_wrap=True)
        self.screen.file.flush()
