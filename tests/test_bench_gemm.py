"""Results of several runs in one file."""

from __future__ import annotations

from typing import Any

from bench.gemm import merged


def result(revision: str, *rows: dict[str, Any], runs: list[dict] | None = None) -> dict[str, Any]:
    header = {"date": "d", "git_revision": revision, "command": "c", "versions": {}}
    return {**header, "rows": list(rows), **({"runs": runs} if runs else {})}


def row(op: str, value: float, **others: int) -> dict[str, Any]:
    return {"model": "4B", "op": op, "leaves": 1, "speed_ratio": [value], **others}


def test_the_newest_row_of_each_shape_stays_and_names_its_run() -> None:
    first = result("a", row("o", 1.0), row("down", 1.0), row("head", 1.0))
    second = result(
        "c", row("head", 2.0, run=1), row("down", 2.0, run=0), runs=[{"git_revision": "b"}, {"git_revision": "c"}]
    )
    rows, runs = merged([row("o", 3.0), row("qkv", 3.0)], [first, second])
    revisions = [*(run["git_revision"] for run in runs), "now"]
    found = {r["op"]: (r["speed_ratio"][0], revisions[r["run"]]) for r in rows}
    assert found == {"o": (3.0, "now"), "down": (2.0, "b"), "head": (2.0, "c"), "qkv": (3.0, "now")}
    assert revisions == ["b", "c", "now"], "a run of which nothing is left is not named"


def test_alone_a_run_needs_no_name() -> None:
    assert merged([row("o", 1.0)], []) == ([row("o", 1.0)], [])
