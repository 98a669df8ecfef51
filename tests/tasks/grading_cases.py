"""Cases in which graders went wrong (cases_c.jsonl), and what this project decides where they leave it open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# docs/rewards.md gives the reasons.
POLICY = {"C-10": True, "C-29": False, "C-35": False, "C-62": True, "C-120": True}


def read_cases() -> list[dict[str, Any]]:
    """Rows with `id`, `gist`, `response`, `gold`, `correct`, and `input` and `expected` as they are in the file."""
    rows = []
    for line in (Path(__file__).parent / "cases_c.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        response = row["input"]["response"]
        if row["id"] == "C-26":
            assert row["input"]["build"] == "'x = 1 + 2. ' * 18000 + response"
            response = "x = 1 + 2. " * 18000 + response
        decided = row["expected"]["correct"]
        correct = POLICY[row["id"]] if decided is None else decided
        rows.append({**row, "response": response, "gold": row["input"]["gold"], "correct": correct})
    return rows


CASES = read_cases()
