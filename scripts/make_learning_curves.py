"""Learning curves of the bundled recipes: runs each with several seeds, writes docs/learning-curves.{md,svg}.

    python scripts/make_learning_curves.py [--seeds 0 1] [--runs runs/curves]

A run folder that is complete already is read, not run again.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import numpy as np
import torch

import exactrl
from exactrl.config import load_recipe

DOCS = Path(__file__).resolve().parent.parent / "docs"
RECIPES = {"tiny": "GRPO", "tiny_rloo": "RLOO", "tiny_gspo": "GSPO", "tiny_dapo": "DAPO"}
COLORS = ("#1f5fa8", "#b3541e")
WIDTH, HEIGHT, LEFT, TOP = 330, 190, 46, 34

PAGE = """# Learning curves

Four recipes on the bundled tiny model, two seeds each, as `python scripts/make_learning_curves.py` made them
({machine}). Reward is the mean of all sampled responses of a step, held-out accuracy that of 256 problems, greedy. In
every run each sampled token was compared: `train/logprob_mismatch_tokens` is 0 and
`train/train_rollout_logprob_abs_diff` exactly 0 at every step.

![Mean reward and held-out accuracy of each recipe and seed](learning-curves.svg)

| recipe | seed | reward, first tenth | last tenth | held-out before | after | compared tokens | uncompared | \
mismatches | largest difference | groups discarded |
|---|---|---|---|---|---|---|---|---|---|---|
{rows}

The seeds differ in sampling noise and data order only; the model starts from the same weights. DAPO's reward is of all
it sampled, discarded groups included. One run is no ranking: learning rates are those of the recipes, not tuned against
each other.
"""


def run(recipe: str, seed: int, folder: Path) -> list[dict]:
    """Metrics rows of one run."""
    out = folder / f"{recipe}-seed{seed}"
    if not (out / "report.html").is_file():
        print(f"{recipe}, seed {seed} …", flush=True)
        exactrl.train(load_recipe(recipe, [("rollout.seed", str(seed)), ("run.out", str(out))]))
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def table_row(name: str, seed: int, rows: list[dict]) -> str:
    tenth = max(1, len(rows) // 10)
    reward = [r["rollout/raw_reward"] for r in rows]
    held = [r["eval/heldout/mean"] for r in rows if "eval/heldout/mean" in r]

    def total(key: str) -> int:
        return int(sum(r.get(key, 0) for r in rows))

    cells = [
        name, seed, f"{np.mean(reward[:tenth]):.3f}", f"{np.mean(reward[-tenth:]):.3f}", f"{held[0]:.3f}",
        f"{held[-1]:.3f}", f"{total('train/logprob_compared_tokens'):,}", total("train/logprob_uncompared_tokens"),
        total("train/logprob_mismatch_tokens"), max(r["train/logprob_abs_diff_max"] for r in rows),
        total("rollout/discarded_groups"),
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def panel(title: str, runs: list[list[dict]], x0: int, y0: int) -> str:
    """One recipe: rewards as lines, held-out accuracy as dots, a colour per seed; y from 0 to 1."""
    steps = max(len(rows) for rows in runs)

    def at(step: float, value: float) -> tuple[float, float]:
        x = x0 + LEFT + (WIDTH - LEFT - 12) * step / steps
        return round(x, 1), round(y0 + TOP + (HEIGHT - TOP - 26) * (1 - value), 1)

    parts = [f'<text x="{x0 + LEFT}" y="{y0 + 20}" class="t">{title}</text>']
    for value in (0, 0.5, 1):
        (left, y), (right, _) = at(0, value), at(steps, value)
        parts.append(
            f'<path d="M{left} {y}H{right}" class="g"/><text x="{left - 6}" y="{y + 4}" class="y">{value}</text>'
        )
    for step in range(0, steps + 1, 10):
        x, y = at(step, 0)
        parts.append(f'<text x="{x}" y="{y + 16}" class="x">{step}</text>')
    for color, rows in zip(COLORS, runs, strict=False):
        line = " ".join("{},{}".format(*at(r["step"], r["rollout/raw_reward"])) for r in rows)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        for r in rows:
            if "eval/heldout/mean" in r:
                x, y = at(0 if r["step"] == 1 else r["step"], r["eval/heldout/mean"])
                parts.append(f'<circle cx="{x}" cy="{y}" r="3.2" fill="#fff" stroke="{color}" stroke-width="1.6"/>')
    return "".join(parts)


def figure(found: dict[str, list[list[dict]]], seeds: list[int]) -> str:
    names = list(found)
    panels = [panel(RECIPES[n], found[n], (i % 2) * WIDTH, (i // 2) * HEIGHT) for i, n in enumerate(names)]
    width, height = 2 * WIDTH, -(-len(names) // 2) * HEIGHT + 28
    legend = "".join(
        f'<text x="{LEFT + 70 * i}" y="{height - 10}" fill="{c}" class="t">seed {s}</text>'
        for i, (c, s) in enumerate(zip(COLORS, seeds, strict=False))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        "<style>text{font:12px sans-serif}.t{font-weight:600}.g{stroke:#ddd}.y{text-anchor:end;fill:#666}"
        '.x{text-anchor:middle;fill:#666}</style><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(panels)}{legend}"
        f'<text x="{LEFT + 160}" y="{height - 10}" fill="#333">lines: mean reward of a step; circles: held-out accuracy'
        "</text></svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--runs", type=Path, default=Path("runs/curves"))
    args = parser.parse_args()
    found = {name: [run(name, seed, args.runs) for seed in args.seeds] for name in RECIPES}
    rows = [table_row(RECIPES[n], s, r) for n, runs in found.items() for s, r in zip(args.seeds, runs, strict=True)]
    machine = f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}"
    (DOCS / "learning-curves.md").write_text(PAGE.format(machine=machine, rows="\n".join(rows)), encoding="utf-8")
    (DOCS / "learning-curves.svg").write_text(figure(found, args.seeds), encoding="utf-8")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
