"""`exactrl bench`: what there is, and that a benchmark gets its own options."""

from __future__ import annotations

import pytest

from exactrl.cli import bench

SCRIPT = 'import sys\nif __name__ == "__main__":\n    print("ran", sys.argv[1:])\n    sys.exit(3)\n'


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    folder = tmp_path / "bench"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "speed.py").write_text(SCRIPT)
    (folder / "helpers.py").write_text("X = 1\n")
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    return folder


def test_the_repositorys_benchmarks_are_listed(run):
    for arguments in ((), ("--help",)):
        outcome = run("bench", *arguments)
        assert outcome.code == 0
        assert "attention, cpu, data, gemm, ops, parity, rl, rollout" in outcome.out


def test_options_and_exit_code_are_the_benchmarks_own(run, checkout):
    outcome = run("bench", "speed", "--part", "ours", "-q", "--help")
    assert (outcome.code, outcome.out.strip()) == (3, "ran ['--part', 'ours', '-q', '--help']")


def test_unknown_names_and_an_installation_without_benchmarks(run, checkout, tmp_path, monkeypatch):
    outcome = run("bench", "sped")
    assert (outcome.code, "did you mean 'speed'?" in outcome.err) == (2, True)
    assert "there are speed" in run("bench", "zzz").err
    assert "options come after it" in run("bench", "-q", "speed").err
    monkeypatch.setattr(bench, "ROOT", tmp_path / "site-packages")
    outcome = run("bench", "speed")
    assert (outcome.code, "part of the repository" in outcome.err) == (4, True)
