"""Each fault of the catalogue is caught by the check named beside it; and the suite itself can fail.

EXACTRL_MUTATIONS=all runs every fault (as `make mutation` does, with a table), a number is the seed of the sample.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from exactrl.parity import op_trace
from tests.mutations import catalogue, one_ulp, op_faults
from tests.mutations.fault import Fault
from tests.mutations.runner import run, run_all
from tests.mutations.scenarios import ORACLE_TRAIN, Catcher, Setup, ops_rung, rung

CHOICE = os.environ.get("EXACTRL_MUTATIONS", "0")
FAULTS = catalogue.ALL if CHOICE == "all" else catalogue.sample(int(CHOICE))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_caught(fault: Fault) -> None:
    assert run(fault).problem == ""


def nothing(world, hits):
    """A harmless "fault": it says it was applied, and changes nothing."""
    hits()
    return nullcontext()


def clean_runs() -> dict[tuple, Fault]:
    """One harmless fault per scenario and setup of the catalogue."""
    found: dict[tuple, Fault] = {}
    for fault in catalogue.WHOLE:
        key = (fault.caught_by.place, repr(fault.setup))
        found.setdefault(key, replace(fault, id=f"{fault.caught_by.place}-{len(found)}", apply=nothing))
    return found


@pytest.mark.parametrize("fault", clean_runs().values(), ids=lambda fault: fault.id)
def test_without_a_fault_no_check_says_anything(fault: Fault) -> None:
    outcome = run(fault)
    assert (outcome.said, outcome.hits) == ("", 1)
    assert outcome.problem == f"NOT caught; expected {fault.caught_by.name}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_one_ulp_check_without_a_fault(dtype: str) -> None:
    fault = next(f for f in catalogue.ONE_ULP if f.setup.dtype == dtype)
    assert run(replace(fault, apply=nothing)).problem.startswith("NOT caught")


def test_the_contracts_own_order_made_by_hand_is_no_fault() -> None:
    """So that what catches leaves/order is the order, not the way the test adds."""
    outcome = run(op_faults.CONTROL)
    assert outcome.hits > 0
    assert outcome.said == ""


def test_a_fault_that_is_never_applied_fails_the_suite() -> None:
    fault = Fault("never/applied", "", lambda world, hits: nullcontext(), ORACLE_TRAIN)
    assert run(fault).problem == "the fault was never applied"


def test_a_fault_caught_elsewhere_fails_the_suite() -> None:
    fault = next(f for f in catalogue.WHOLE if f.id == "rope/theta")
    elsewhere = replace(fault, caught_by=ops_rung(r"layers\.1\.attention"))
    assert run(elsewhere).problem.startswith("caught, but not by rung engine_vs_trainer_ops: layers.1.attention: ")


def test_one_ulp_must_be_named_exactly() -> None:
    """The op alone is not enough: sample, position and element are compared, too."""
    fault = next(f for f in catalogue.ONE_ULP if f.id == "ulp/k/layer1-float32-engine-first")
    said = run(fault).said
    assert run(fault).problem == ""
    op, sample, position, element = one_ulp.choose("layers.1.k", "float32", "first")
    assert (op, sample, position, element) == ("layers.1.k", 0, 0, (0, 0))
    assert f"position {position}, element {element}: " in said


def test_a_blind_comparison_lets_everything_pass(monkeypatch) -> None:
    """A ladder that compares nothing would catch nothing, and the suite says so."""
    monkeypatch.setattr(op_trace, "differing", lambda a, b: torch.zeros(a.shape, dtype=torch.bool))
    fault = next(f for f in catalogue.ONE_ULP if f.id == "ulp/k/layer1-float32-engine-first")
    assert run(fault).problem.startswith("NOT caught")


def test_the_table_and_the_exit_code() -> None:
    lines: list[str] = []
    good = next(f for f in catalogue.WHOLE if f.id == "position/engine")
    assert run_all([good], lines.append) is True
    assert "1 of 1 faults caught by the named check: 100.00 %" in lines[-1]
    assert run_all([good, replace(good, id="no/fault", apply=nothing)], lines.append) is False
    assert "NOT caught; expected rung engine_vs_trainer_ops: positions" in lines[-2]
    assert "1 of 2 faults caught by the named check: 50.00 %" in lines[-1]


def test_every_op_that_the_seam_shows_has_its_faults() -> None:
    shown = {op.rpartition(".")[2] for op in one_ulp.clean_trace("float32").ops} - {"ids", "positions"}
    assert shown == {f.kind.removeprefix("ulp/") for f in catalogue.ONE_ULP}
    assert len({f.id for f in catalogue.ALL}) == len(catalogue.ALL)


def test_the_sample_holds_every_kind_on_every_side() -> None:
    for seed in range(3):
        chosen = catalogue.sample(seed)
        assert {f.kind for f in chosen} == {f.kind for f in catalogue.ALL}
        for kind in {f.kind for f in catalogue.ONE_ULP}:
            sides = {f.description.split()[-1] for f in chosen if f.kind == kind}
            assert sides == set(one_ulp.SIDES)
    assert [f.id for f in catalogue.sample(1)] == [f.id for f in catalogue.sample(1)]
    assert [f.id for f in catalogue.sample(1)] != [f.id for f in catalogue.sample(2)]


def test_an_exception_that_is_no_alarm_is_not_taken_for_one() -> None:
    def broken(world) -> str:
        raise KeyError("a mistake in the suite")

    with pytest.raises(KeyError):
        run(Fault("a/mistake", "", nothing, Catcher("broken", "", broken, "")))


def test_a_skipped_rung_catches_nothing(monkeypatch) -> None:
    from exactrl.ops.cpu import jit

    monkeypatch.setattr(jit, "max_threads", lambda: 1)
    fault = Fault("skipped/rung", "", nothing, rung("threads"), Setup())
    assert run(fault).problem.startswith("NOT caught")
