"""`exactrl certify`: which GPU kernels keep the contract's bits on this machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from exactrl.cli.options import NoColor, Quiet, Verbose, console, is_interactive, late_import

if TYPE_CHECKING:
    from exactrl.parity.certify import LinearResult
    from exactrl.parity.certify_attention import AttentionResult

EXAMPLE = "Example: exactrl certify path/to/Qwen3-4B --k-leaves 2"


def certify(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Model folder, or a bundled model. Without one: every shape certified before on this device, which is "
            "what a new library version needs.",
            show_default=False,
        ),
    ] = None,
    k_leaves: Annotated[int, typer.Option(min=1, help="As contract.k_leaves of the run: 1, 2, 4 or 8.")] = 1,
    decode_rows: Annotated[int, typer.Option(min=1, help="Check every number of rows up to this one.")] = 256,
    max_rows: Annotated[int, typer.Option(min=1, help="Largest number of rows checked; more are sliced.")] = 16384,
    again: Annotated[bool, typer.Option("--again", help="Check shapes anew that the certificate holds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_color: NoColor = False,
) -> None:
    """Certify this machine's GPU kernels, linears and attention, for a model's shapes: bits compared, survivors timed,
    certificate written."""
    launch = late_import("exactrl.launch.certifying")
    rows = late_import("exactrl.parity.certify").Rows(decode_rows, max(decode_rows, max_rows))
    screen = console(ctx.obj, stderr=as_json)
    silent = ctx.obj.quiet or (as_json and not is_interactive(screen))

    def show(result: LinearResult) -> None:
        if not silent:
            for line in lines(result):
                screen.print(line, soft_wrap=True, markup=False)

    def show_attention(result: AttentionResult) -> None:
        if not silent:
            for line in attention_lines(result):
                screen.print(line, soft_wrap=True, markup=False)

    done = launch.certify(model, k_leaves=k_leaves, rows=rows, again=again, on_linear=show, on_attention=show_attention)
    if as_json:
        found = {"linears": [r.to_json() for r in done.results], "attention": [r.to_json() for r in done.attention]}
        typer.echo(json.dumps({"path": str(done.path), **found}, indent=2))
        return
    compared = sum(result.compared_elements for result in done.results)
    refused = sum(len(result.refused) for result in done.results)
    rows_compared = sum(result.compared_rows for result in done.attention)
    refused_attention = sum(len(result.refused) for result in done.attention)
    typer.echo(
        f"{len(done.results)} linears certified; {compared:,} values compared; "
        f"{refused} implementations refused for some rows\n"
        f"{len(done.attention)} shapes of attention certified; {rows_compared:,} rows compared; "
        f"{refused_attention} implementations refused\ncertificate: {done.path}"
    )


def lines(result: LinearResult) -> list[str]:
    """One result as text: what runs at which number of rows, and who was refused, with the first difference."""
    found = [str(result.shape)]
    start = 0
    for i, choice in enumerate(result.choices):
        following = result.choices[i + 1] if i + 1 < len(result.choices) else None
        if following is None or following.implementation != choice.implementation:
            first = result.choices[start].m_min
            seconds = result.seconds[choice.m_max]
            ratio = seconds.get("cublas", 0.0) / seconds[choice.implementation]
            speed = f", {ratio:.2f} of cuBLAS's speed" if ratio else ""
            found.append(f"  {first:>6} to {choice.m_max:<6} rows  {choice.implementation}{speed}")
            start = i + 1
    return [*found, *(f"  refused: {refusal}" for refusal in result.refused)]


def attention_lines(result: AttentionResult) -> list[str]:
    """What attends, by kind, with its time at each workload, and who was refused, with the first difference."""
    found = [f"{result.shape}: {result.compared_rows:,} rows compared"]
    for kind, name in result.choices.items():
        times = ", ".join(f"{work} {t[name] * 1e6:.0f} us" for work, t in result.seconds[kind].items())
        found.append(f"  {kind:8}  {name}{'  ' + times if times else ''}")
    if result.left_out:
        found.append(f"  not compared: {', '.join(result.left_out)} data, of which it makes NaN or infinity")
    return [*found, *(f"  refused: {refusal}" for refusal in result.refused)]
