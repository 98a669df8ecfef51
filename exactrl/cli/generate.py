"""`exactrl generate`: prompts in, JSONL rows out."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated

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

EXAMPLE = "Example: exactrl generate tiny --prompts prompts.jsonl --samples 4 --out samples.jsonl"


def finite(value: float) -> float:
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def generate(
    ctx: typer.Context,
    model: Model,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="One prompt; read from stdin without it and --prompts.")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(help="JSONL rows with prompt or prompt_token_ids, and an optional id.", metavar="FILE"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSONL file to write [stdout].", metavar="FILE")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Responses for each prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling noise.")] = 0,
    temperature: Annotated[float, typer.Option(min=0, callback=finite, help="0 = greedy.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 128,
    max_concurrent: Annotated[int, typer.Option(min=1, help="Most sequences decoded together.")] = 256,
    kv_tokens: Annotated[int, typer.Option(min=0, help="Size of the KV cache, in tokens; 0 = what fits.")] = 0,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one engine step.")] = 2048,
    dtype: Annotated[Dtype, typer.Option(help="Storage type of the weights.")] = Dtype.bfloat16,
    true_on_policy: TrueOnPolicy = True,
    device: Annotated[Device, typer.Option(help="Where to run.")] = Device.cpu,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_color: NoColor = False,
) -> None:
    """Generate responses with their logprobs. One JSON row each: id, sample, token_ids, text, logprobs, logprob_bits,
    finish_reason. --max-concurrent, --kv-tokens and --chunk-tokens never change a bit."""
    from exactrl.cli.rows import open_output, read_prompts, row_line

    requested = read_prompts(prompt, prompts)
    launch = late_import("exactrl.launch")
    with open_output(out) as write, Bar(ctx) as bar:
        for row in launch.generate(
            model,
            requested,
            samples=samples,
            seed=seed,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            max_concurrent=max_concurrent,
            kv_tokens=kv_tokens,
            chunk_tokens=chunk_tokens,
            dtype=dtype.value,
            true_on_policy=true_on_policy,
            device=device.value,
            on_progress=bar.show,
        ):
            write(row_line(row))


LINE_EVERY = 10.0  # seconds between plain lines of progress


class Bar:
    """On stderr, while responses finish: a bar on a terminal, otherwise a line now and then; nothing when quiet."""

    def __init__(self, ctx: typer.Context) -> None:
        self.screen = console(ctx.obj, stderr=True)
        self.bar = None
        self.quiet, self.shown = ctx.obj.quiet, time.monotonic()
        if is_interactive(self.screen) and not ctx.obj.quiet:
            from rich.progress import Progress

            self.bar = Progress(console=self.screen, transient=True)
            self.task = self.bar.add_task("generate", total=None)

    def __enter__(self) -> Bar:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def show(self, phase: str, done: int, total: int) -> None:
        if self.bar:
            self.bar.update(self.task, description=phase, completed=done, total=total)
        elif not self.quiet and time.monotonic() - self.shown > LINE_EVERY:
            self.shown = time.monotonic()
            self.screen.print(f"{phase}: {done:,} of {total:,}", highlight=False)
