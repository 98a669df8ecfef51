"""Which sources a part of a certificate depends on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from exactrl.contract import KERNEL_DIGESTS
from exactrl.ops.cuda import machine


def test_linears_depend_on_what_their_implementations_import_and_compile() -> None:
    assert machine.kernel_sources("linears") == {
        "matmul.py", "nvrtc.py", "tiles.py", "triton_matmul.py", "wgmma_matmul.cu", "wgmma_matmul.py",
    }  # fmt: skip


def test_every_cuda_source_belongs_to_a_part() -> None:
    behind = {name for part in KERNEL_DIGESTS for name in machine.kernel_sources(part)}
    assert {p.name for p in machine.FOLDER.iterdir() if p.suffix in (".cu", ".cuh")} <= behind
    assert {p.name for p in machine.FOLDER.glob("*attention*.py")} - {"certified_attention.py"} <= behind


@pytest.mark.parametrize(
    ("edited", "changed"),
    [
        ("wgmma_matmul.cu", {"linears"}),
        ("triton_matmul.py", {"linears"}),
        ("hopper.cuh", {"attention"}),
        ("triton_exact.py", {"attention"}),
        ("nvrtc.py", {"linears", "attention"}),
        ("norm.py", set()),
    ],
)
def test_an_edit_changes_the_digests_of_the_parts_it_reaches(edited, changed, tmp_path, monkeypatch) -> None:
    before = {part: machine.kernels_digest(part) for part in KERNEL_DIGESTS}
    copy = Path(shutil.copytree(machine.FOLDER, tmp_path / "cuda"))
    monkeypatch.setattr(machine, "FOLDER", copy)
    assert before == {part: machine.kernels_digest(part) for part in KERNEL_DIGESTS}
    whole = machine.kernels_digest()
    (copy / edited).write_text((copy / edited).read_text() + "\n")
    assert {part for part in before if machine.kernels_digest(part) != before[part]} == changed
    assert machine.kernels_digest() != whole
