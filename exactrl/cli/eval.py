"""`exactrl eval`: pass@1, pass@k and mean@n of a model on a data set."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from exactrl.cli.generate import Bar, finite
from exactrl.cli.options import Device, Dtype, Model, NoColor, Quiet, TrueOnPolicy, Verbose, late_import
from exactrl.errors import UsageError

EXAMPLE = "Example: exactrl eval tiny bundled:arithmetic/heldout.jsonl --reward arithmetic --samples 4 --temperature 1"


def evaluate(
    ctx: typer.Context,
    model: Model,
    data: Annotated[str, typer.Argument(metavar="DATA", help="Data file, optionally path@[a:b].", show_default=False)],
    samples: Annotated[int, typer.Option(min=1, help="Responses for each problem.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, callback=finite, help="0 = greedy.")] = 0.0,
    k: Annotated[list[int] | None, typer.Option(min=1, help="pass@k to report [1, 2, 4, ... samples].")] = None,
    reward: Annotated[str, typer.Option(help='"math", "dapo", "arithmetic" or module:function.')] = "math",
    reward_key: Annotated[str, typer.Option(help="Entry of a dict that a module:function returns.")] = "",
    on_error: Annotated[str, typer.Option(help="When a reward fails: stop, or zero (counted).")] = "stop",
    timeout: Annotated[float, typer.Option(min=0.01, callback=finite, help="Seconds for one reward.")] = 5.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 1024,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longest prompt, in tokens.")] = 1024,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling noise.")] = 0,
    prompt_key: Annotated[str, typer.Option(help="Column with the prompt.")] = "prompt",
    label_key: Annotated[str, typer.Option(help="Column with the answer.")] = "label",
    label_pattern: Annotated[str, typer.Option(help="Regular expression whose group is the answer.")] = "",
    id_key: Annotated[str, typer.Option(help="Column with a unique id [row number].")] = "",
    chat_template: Annotated[bool, typer.Option(help="Render prompts with the model's chat template.")] = False,
    thinking: Annotated[bool, typer.Option(help="enable_thinking of the chat template.")] = False,
    out: Annotated[Path | None, typer.Option(help="JSONL file for the responses.", metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    max_concurrent: Annotated[int, typer.Option(min=1, help="Most sequences decoded together.")] = 256,
    kv_tokens: Annotated[int, typer.Option(min=0, help="Size of the KV cache, in tokens; 0 = what fits.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Storage type of the weights.")] = Dtype.bfloat16,
    true_on_policy: TrueOnPolicy = True,
    device: Annotated[Device, typer.Option(help="Where to run.")] = Device.cpu,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_color: NoColor = False,
) -> None:
    """Score a model on a data set: mean@n with a 95 % confidence interval, and unbiased pass@k. Repeated problems count
    once."""
    from exactrl.cli.rows import open_output
    from exactrl.config import make_eval_config

    if samples > 1 and temperature == 0:
        raise UsageError(f"--samples {samples} with --temperature 0: greedy responses are all the same; use 1 sample")
    if too_many := [n for n in k or () if n > samples]:
        raise UsageError(f"pass@{too_many[0]} needs --samples of at least {too_many[0]}, not {samples}")
    data_keys = {
        "train": data, "prompt_key": prompt_key, "label_key": label_key, "label_pattern": label_pattern,
        "id_key": id_key, "apply_chat_template": chat_template, "enable_thinking": thinking,
        "max_prompt_tokens": max_prompt_tokens,
    }  # fmt: skip
    reward_keys = {"name": reward, "key": reward_key, "timeout_s": timeout, "on_error": on_error}
    settings = make_eval_config({"data": data_keys, "reward": reward_keys})
    launch = late_import("exactrl.launch")
    with open_output(out) if out else nullcontext(lambda line: None) as write, Bar(ctx) as bar:
        summary, rows = launch.evaluate(
            model, settings.data, settings.reward, samples=samples, temperature=temperature, seed=seed, ks=k,
            max_new_tokens=max_new_tokens, dtype=dtype.value, true_on_policy=true_on_policy, device=device.value,
            max_concurrent=max_concurrent, kv_tokens=kv_tokens, on_progress=bar.show,
        )  # fmt: skip
        for row in rows:
            write(json.dumps(row, ensure_ascii=False))
    if as_json:
        typer.echo(json.dumps(summary))
        return
    for line in summary_lines(summary):
        typer.echo(line)


def summary_lines(s: dict[str, Any]) -> list[str]:
    """The result for people: one number a line."""
    n = s["num_samples"]
    repeated = f" ({s['rows']} rows)" if s["rows"] != s["num_problems"] else ""
    lines = [f"{s['num_problems']} problems{repeated}, {n} samples each, temperature {s['temperature']:g}"]
    spread = (
        "one problem: no confidence interval"
        if s["low"] is None
        else f"95 % confidence: {s['low']:.4f} to {s['high']:.4f}"
    )
    lines.append(f"mean@{n}  {s['mean']:.4f}  ({spread})")
    lines += [f"pass@{k}  {value:.4f}" for k, value in s["pass_at"].items()]
    lines.append(f"cut off at the longest length: {100 * s['truncated_ratio']:.1f} %")
    if s["failed"]:
        lines.append(f"failed rewards, counted as 0: {s['failed']}")
    if verdicts := s.get("verdicts"):
        lines.append("verdicts: " + ", ".join(f"{kind} {number}" for kind, number in verdicts.items() if number))
    return lines
