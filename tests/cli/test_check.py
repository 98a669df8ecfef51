"""`exactrl check`: the table, JSON, and what fails a ladder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import pytest


@dataclass
class Rung:
    name: str
    dtype: str = "float32"
    status: str = "pass"
    compared: int = 1000
    mismatched: int = 0
    detail: str = ""
    seconds: float = 0.5

    def as_dict(self) -> dict:
        return asdict(self)


@pytest.fixture
def ladder(launch):
    """Makes launch.check return the given rungs; returns a function that sets them and a list of calls."""
    calls = []

    def set_rungs(*rungs):
        def check(model, *, on_rung, **options):
            calls.append({"model": model, **options})
            for rung in rungs:
                on_rung(rung)
            return list(rungs)

        launch.check = check
        return calls

    return set_rungs


def test_passing_ladder_prints_a_row_per_rung(run, ladder):
    calls = ladder(Rung("batch"), Rung("chunks", "bfloat16", compared=2500))
    outcome = run("check", "tiny")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines[1].split() == ["pass", "batch", "float32", "1,000", "0", "0.50"]
    assert lines[2].split() == ["pass", "chunks", "bfloat16", "2,500", "0", "0.50"]
    assert lines[3] == "2 rungs passed, 0 failed, 0 skipped; 3,500 values compared, 0 differ"
    assert calls == [
        {
            "model": "tiny",
            "dtypes": ["bfloat16", "float32"],
            "device": "cpu",
            "true_on_policy": True,
            "seed": 0,
            "k_leaves": 1,
            "residual_dtype": "bfloat16",
            "rungs": None,
        }
    ]


def test_options_reach_the_check(run, ladder):
    calls = ladder(Rung("a"))
    options = [
        "--dtype",
        "float32",
        "--device",
        "cuda",
        "--no-true-on-policy",
        "--seed",
        "7",
        "--rung",
        "a",
        "--rung",
        "b",
    ]
    assert run("check", "m", *options).code == 0
    assert calls[0] == {
        "model": "m",
        "dtypes": ["float32"],
        "device": "cuda",
        "true_on_policy": False,
        "seed": 7,
        "k_leaves": 1,
        "residual_dtype": "bfloat16",
        "rungs": ["a", "b"],
    }


@pytest.mark.parametrize(
    ("rungs", "reason"),
    [
        ([Rung("a"), Rung("b", status="fail", mismatched=3, detail="token 7")], "b (float32): 3 of 1000 values differ"),
        ([Rung("a", mismatched=1)], "a (float32): 1 of 1000 values differ"),
        ([Rung("a"), Rung("b", status="skip", compared=0, detail="no GPU")], "--allow-skip b accepts that"),
        ([Rung("a"), Rung("b", compared=0)], "b (float32) compared no values"),
        ([], "nothing was compared"),
    ],
)
def test_failures_exit_with_3_and_say_why(run, ladder, rungs, reason):
    ladder(*rungs)
    for extra in ([], ["--json"]):
        outcome = run("check", "tiny", *extra)
        assert outcome.code == 3
        assert outcome.err.startswith("error: the parity check failed\n")
        assert reason in outcome.err


def test_allowed_skip_passes_but_not_alone(run, ladder):
    skip = Rung("gpu", status="skip", compared=0, detail="no GPU")
    ladder(Rung("a"), skip)
    assert run("check", "tiny", "--allow-skip", "gpu").code == 0
    assert run("check", "tiny", "--allow-skip", "other").code == 3
    ladder(skip)
    assert run("check", "tiny", "--allow-skip", "gpu").code == 3


def test_json_is_one_object_on_stdout(run, ladder):
    rungs = [Rung("a"), Rung("b", status="fail", mismatched=2)]
    ladder(*rungs)
    outcome = run("check", "tiny", "--json")
    assert json.loads(outcome.out) == {
        "model": "tiny",
        "device": "cpu",
        "dtypes": ["bfloat16", "float32"],
        "true_on_policy": True,
        "rungs": [rung.as_dict() for rung in rungs],
        "passed": False,
    }
    ladder(Rung("a"))
    assert json.loads(run("check", "tiny", "--json").out)["passed"] is True


def test_quiet_prints_the_summary_only(run, ladder):
    ladder(Rung("a"))
    assert run("check", "tiny", "-q").out.count("\n") == 1
