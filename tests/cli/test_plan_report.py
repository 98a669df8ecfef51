"""`exactrl plan` and `exactrl report`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

PLAN = {
    "contract": {"name": "exact-v1", "digest": "ab", "limits": {"kv_split": 512}},
    "checks": {"layouts": [{"tp": 1, "ok": True}], "flags": ["a", "b"], "none": []},
    "version": 1,
}


def test_plan_prints_aligned_sections(run, launch):
    launch.plan = lambda config: {**PLAN, "steps": config.run.steps}
    out = run("plan", "tiny", "--run.steps", "4").out
    assert out.splitlines() == [
        "plan",
        "  version  1",
        "  steps    4",
        "",
        "contract",
        "  name             exact-v1",
        "  digest           ab",
        "  limits.kv_split  512",
        "",
        "checks",
        "  layouts[0].tp  1",
        "  layouts[0].ok  true",
        "  flags          a, b",
        "  none           none",
        "",
    ]


def test_plan_json_is_the_plan(run, launch):
    launch.plan = lambda config: PLAN
    assert json.loads(run("plan", "tiny", "--json").out) == PLAN


def test_report_prints_the_path(run, monkeypatch, tmp_path):
    fake = ModuleType("exactrl.report")
    fake.write_report = lambda folder, out: out or folder / "report.html"
    monkeypatch.setitem(sys.modules, "exactrl.report", fake)
    assert run("report", str(tmp_path)).out == f"{tmp_path / 'report.html'}\n"
    assert run("report", str(tmp_path), "--out", "x.html").out == f"{Path('x.html')}\n"


def test_report_needs_a_run_folder(run, tmp_path):
    outcome = run("report", str(tmp_path / "nope"))
    assert outcome.code == 2
    assert "is not a run folder" in outcome.err
