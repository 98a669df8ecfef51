"""What the head's kernels compile to for sm90: the roundings of the definition are in the machine's instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

if find_spec("triton") is None:  # not imported here: other tests need its interpreter, which is chosen on import
    pytest.skip("triton is not installed (pip install 'triton>=3.6' on Linux x86-64)", allow_module_level=True)

LOGARITHMS = {"ln": 1, "blocks sampling": 2 + 2 * 16, "merge": 1, "merge sampling": 1}
"""Of one thread: two for each number of noise; the likely best entry alone, and all 16 of a program's 2048."""


@pytest.fixture(scope="module")
def counts(tmp_path_factory) -> dict[str, dict[str, int]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "tests.ops.cuda.compiled"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_nothing_is_contracted(counts) -> None:
    """libdevice's logarithm is written with fused multiply-adds; there are no others."""
    each = counts["ln"]["fma"]
    assert each > 0
    assert {name: c["fma"] for name, c in counts.items()} == {name: each * LOGARITHMS.get(name, 0) for name in counts}


def test_divisions_are_ieee_and_the_only_approximation_is_exp2(counts) -> None:
    for name, c in counts.items():
        assert c["approximate_division"] == c["other_approximation"] == 0, name
        assert (c["ieee_division"] > 0) == (name != "ln"), name
    assert {name for name, c in counts.items() if c["exp2"]} == {
        "blocks", "blocks sampling", "merge", "merge sampling", "backward"
    }  # fmt: skip


def test_what_one_thread_stores_is_not_read_before_the_barrier(counts) -> None:
    """The interpreter runs a program's threads as one and cannot show it."""
    assert all(counts[name]["barrier_after_stores"] == 1 for name in ("merge", "merge sampling"))


def test_no_kernel_touches_memory_before_the_one_before_it_is_done(counts) -> None:
    """They are launched while it still runs."""
    assert {name: c["waits_first"] for name, c in counts.items()} == {name: name != "ln" for name in counts}
