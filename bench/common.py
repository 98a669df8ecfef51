"""What every benchmark shares: machine, interleaved timing, result files."""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exactrl.rl.environment import environment

RESULTS = Path(__file__).parent / "results"


def interleaved(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each function, run in turn A B A B … after one uncounted round, so that drift hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(repeats + 1):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            if i:
                times[name].append(time.perf_counter() - begin)
    return times


def ratio(a: list[float], b: list[float]) -> float:
    """Median of the pairwise ratios a / b."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def write_result(name: str, rows: list[dict[str, Any]], summary: dict[str, Any], suffix: str = "") -> Path:
    """bench/results/NAME[-SUFFIX].json as in docs/architecture.md."""
    env = environment()
    machine = {key: env[key] for key in ("platform", "cpu", "cpu_count", "memory_bytes", "threads", "gpu", "variables")}
    result = {
        "name": name,
        "date": datetime.date.today().isoformat(),
        "machine": machine,
        "versions": {"python": env["python"], "exactrl": env["exactrl"], **env["versions"]},
        "git_revision": env["git_revision"],
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "rows": rows,
        "summary": summary,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}{'-' + suffix if suffix else ''}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
