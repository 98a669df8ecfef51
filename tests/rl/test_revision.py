"""Which commit a run names as its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from exactrl.rl import environment

GIVEN = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch) -> Path:
    """The module's file in a folder that git does not know."""
    file = tmp_path / "rl" / "environment.py"
    file.parent.mkdir()
    shutil.copy(environment.__file__, file)
    monkeypatch.setattr(environment, "__file__", str(file))
    return file


def test_a_copy_outside_git_has_the_revision_it_was_given_or_none(copy: Path, monkeypatch) -> None:
    assert environment.git_revision() is None
    monkeypatch.setenv("EXACTRL_GIT_REVISION", GIVEN)
    assert environment.git_revision() == GIVEN


def committed(folder: Path, name: str) -> str:
    """The commit of a new repository in `folder` that has only the file `name`."""
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", folder], check=True)
    subprocess.run([*git, "add", name], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "all"], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def test_a_copy_inside_another_repository_does_not_take_its_revision(copy: Path, monkeypatch) -> None:
    (copy.parent.parent / "other").write_text("")
    committed(copy.parent.parent, "other")
    assert environment.git_revision() is None
    monkeypatch.setenv("EXACTRL_GIT_REVISION", GIVEN)
    assert environment.git_revision() == GIVEN


def test_what_git_knows_is_not_overridden(copy: Path, monkeypatch) -> None:
    head = committed(copy.parent.parent, "rl")
    monkeypatch.setenv("EXACTRL_GIT_REVISION", GIVEN)
    assert environment.git_revision() == head
    copy.write_text("changed")
    assert environment.git_revision() == f"{head}+dirty"
