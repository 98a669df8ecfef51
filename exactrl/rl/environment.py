"""What a run's bits and times may depend on besides its recipe: machine, libraries, threads, git revision."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numba
import torch

from exactrl import __version__
from exactrl.ops.cpu.jit import sources_digest
from exactrl.ops.cuda import determinism

LIBRARIES = ("torch", "numba", "llvmlite", "numpy", "safetensors", "tokenizers", "jinja2", "pyarrow", "pydantic")
VARIABLES = ("GOMP_SPINCOUNT", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def environment() -> dict[str, Any]:
    """JSON-ready description of this process's environment."""
    return {
        "exactrl": __version__,
        "git_revision": git_revision(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None,
        "threads": {"kernels": numba.get_num_threads(), "torch": torch.get_num_threads()},
        "versions": {name: metadata.version(name) for name in LIBRARIES},
        "kernel_sources_digest": sources_digest(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "gpu_determinism": determinism.state() if torch.cuda.is_available() else None,
    }


def git_revision() -> str | None:
    """Commit of the source tree the package runs from, "+dirty" when it has changes. Of a copy that git does not know
    EXACTRL_GIT_REVISION, which whoever made the copy sets; else None."""
    given = os.environ.get("EXACTRL_GIT_REVISION")
    folder = Path(__file__).parent.parent
    try:
        run = lambda *a: subprocess.run(("git", "-C", str(folder), *a), capture_output=True, text=True, timeout=10)  # noqa: E731
        if run("ls-files", "--error-unmatch", "--", __file__).returncode:
            return given
        commit = run("rev-parse", "HEAD")
        changed = run("status", "--porcelain", "--", str(folder)).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return given
    return commit.stdout.strip() + ("+dirty" if changed else "")


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
