"""Fixtures of the tasks tests: the bundled tokenizer, and a writer of data files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from exactrl.tasks.files import ASSETS
from exactrl.tasks.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    loaded = load_tokenizer(ASSETS / "tiny")
    assert loaded is not None
    return loaded


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """write(text_or_bytes, name="data.jsonl") -> path of the file written."""

    def write(content: str | bytes, name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write
