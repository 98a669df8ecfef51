"""What the compiler makes of the fused kernels for sm90: no contraction, no approximate division, no atomics.

Needs Triton, but no GPU. That the bits are those of the definition on a GPU is for tests/gpu to show.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("triton") is None:  # not imported here: other tests need its interpreter, which is chosen on import
    pytest.skip("triton is not installed (pip install 'triton>=3.6' on Linux x86-64)", allow_module_level=True)
ROOT = Path(__file__).parents[3]
FORBIDDEN = re.compile(r"\b(?:fma\.|div\.full|div\.approx|rcp\.|rsqrt\.|sqrt\.approx|atom\.|red\.)[\w.]*")
UNROUNDED = re.compile(r"\b(?:add|sub|mul)\.(?:ftz\.)?(?:f32|bf16|bf16x2)\b")
"""Without .rn the assembler may still contract them."""
DIVIDING = {
    "rms_norm",
    "add_rms_norm",
    "rms_norm_rows",
    "rms_norm_backward",
    "rms_norm_backward_two",
    "qkv",
    "qkv_into_cache",
    "qkv_backward",
}


def compiled(*arguments: str, cache: Path) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.ops.cuda.ptx", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> dict[str, str]:
    return compiled(cache=tmp_path_factory.mktemp("triton"))


def test_nothing_is_contracted_approximated_or_added_in_the_order_of_arrival(kernels) -> None:
    assert len(kernels) == 12
    for name, text in kernels.items():
        assert ".target sm_90" in text, name
        assert FORBIDDEN.findall(text) == [], name
        assert UNROUNDED.findall(text) == [], name
        flushed = set(re.findall(r"\b[\w.]+\.ftz[\w.]*", text))
        assert flushed == ({"ex2.approx.ftz.f32"} if "swiglu" in name else set()), name


def test_divisions_and_roots_are_ieee(kernels) -> None:
    for name, text in kernels.items():
        divides = name in DIVIDING or "swiglu" in name
        assert ("div.rn.f32" in text) == divides, name
        assert ("sqrt.rn.f32" in text) == (name in DIVIDING), name


def test_no_kernel_touches_memory_before_the_one_before_it_is_done(kernels) -> None:
    """They are launched while it still runs, and the next one, to wait, while it may still run, too."""
    for name, text in kernels.items():
        events = re.findall(r"griddepcontrol\.\w+|(?:ld|st)\.global|cp\.async\.c[ag]", text)
        assert events[:2] == ["griddepcontrol.launch_dependents", "griddepcontrol.wait"], name
        assert not any(event.startswith("griddepcontrol") for event in events[2:]), name


def test_contraction_would_be_seen(tmp_path: Path) -> None:
    """The same kernels with the compiler's default."""
    text = compiled("--contract", cache=tmp_path)
    assert {name for name in text if FORBIDDEN.search(text[name])} >= {"qkv", "qkv_backward", "rms_norm_backward"}
    assert {name for name in text if UNROUNDED.search(text[name])} >= {"rms_norm", "swiglu"}
