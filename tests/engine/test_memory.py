"""What counts as free memory on a CPU machine."""

from __future__ import annotations

import psutil
import pytest
import torch

from exactrl.engine import memory

GROUPS = {
    "none": ({}, None),
    "version 2": ({"memory.max": "8000", "memory.current": "5000", "memory.stat": "anon 1\ninactive_file 700"}, 3700),
    "version 2, no limit": ({"memory.max": "max", "memory.current": "5", "memory.stat": "inactive_file 7"}, None),
    "version 1": (
        {"memory/memory.limit_in_bytes": "900", "memory/memory.usage_in_bytes": "1000",
         "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 300"}, 200,
    ),
    "of another kind": ({"memory.max": "8000", "memory.current": "5000", "memory.stat": "what is this"}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_what_a_container_does_not_allow_is_not_free(name: str, tmp_path, monkeypatch):
    files, left = GROUPS[name]
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    monkeypatch.setattr(memory, "CONTAINER", tmp_path)
    free = memory.free_memory(torch.device("cpu"))
    if left is not None:
        assert free == left
    else:
        machine = psutil.virtual_memory()
        assert 0.5 * machine.available < free <= machine.total


def test_pages_that_only_cache_files_are_free(monkeypatch, tmp_path):
    found = psutil.virtual_memory()._replace(available=7 << 30, free=1 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: found)
    monkeypatch.setattr(memory, "CONTAINER", tmp_path)
    assert memory.free_memory(torch.device("cpu")) == 7 << 30
