"""docs/cases.md and the names of the tests agree: every case is tested or has a reason, and no number is made up."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cases.md"
NUMBERS = {
    "A": "01 03 04 05 06 09 10 11 12 15 18 21 23 26 27 28 29 31 33 34 35 36 37 38 39 40 41 42 43 45 46 47 49 50 51 52 "
    "53 55 58",
    "B": "01 04 06 07 08 09 11 13 14 15 16 17 18 20 21 23 25 26 28 30",
    "C": "01 03 10 12 13 15 17 21 22 24 25 26 27 28 29 30 31 35 36 37 38 39 40 42 43 44 45 46 47 48 49 50 52 58 59 61 "
    "62 63 67 68 69 70 71 73 74 77 78 79 82 83 85 88 91 92 94 95 97 98 99 100 103 105 107 108 109 111 113 114 118 119 "
    "120",
    "D": "01 04 05 06 07 09 13 15 17 18 21 22 23 24 25 27 29 31 32 34 35 36 39 40 41 42 43 44 45 46 47 48",
    "E": "01 04 05 06 07 10 14 15 17 19 27 29 30 31 32",
}
IDS = {f"{group}-{number}" for group, numbers in NUMBERS.items() for number in numbers.split()}


def names_of_tests(path: Path) -> list[str]:
    """Names of a file's test functions; of the one that makes a test of every case, those that pytest will find."""
    if path.name == "test_grading_cases.py":
        module = importlib.import_module("tests.tasks.test_grading_cases")
        return [name for name, value in vars(module).items() if name.startswith("test_") and callable(value)]
    return re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)


def cases_in_names() -> dict[str, set[str]]:
    """Case id -> files with a test that has it in its name."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in names_of_tests(path):
            if not re.match(r"test_[A-Ea-e]_?\d", name):
                continue
            match = re.fullmatch(r"test_([A-E])_(\d\d+)_[A-Za-z0-9]\w*", name)
            assert match, f"{path.name}: {name} does not spell its case as test_A_01_what"
            found.setdefault(f"{match[1]}-{match[2]}", set()).add(str(path.relative_to(ROOT)))
    return found


def table(heading: str) -> dict[str, str]:
    """Case id -> last column, of the table under a heading."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([A-Z]-\d+) \| [^|]+ \| ([^|]+) \|$", section, re.M)
    assert len(rows) == section.count("\n| ") - 1, "a row is not | id | fault | last column |"
    assert len(rows) == len(dict(rows)), "a case is listed twice"
    return dict(rows)


def test_every_case_is_tested_or_has_a_reason():
    names, reasons = set(cases_in_names()), set(table("Not tested"))
    assert names & reasons == set(), "tested, and listed as not tested"
    assert IDS - names - reasons == set(), "neither tested nor listed"
    assert (names | reasons) - IDS == set(), "no such case"


def test_the_page_names_the_files_of_all_tests():
    assert {case: set(re.findall(r"`([^`]+)`", where)) for case, where in table("Tested").items()} == cases_in_names()


def test_the_numbers_are_those_of_the_collection():
    counts = {group: sum(case.startswith(f"{group}-") for case in IDS) for group in NUMBERS}
    assert counts == {"A": 39, "B": 20, "C": 71, "D": 32, "E": 15}
