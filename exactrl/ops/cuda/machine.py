"""Which machine a certificate is of: device, driver, and a digest of every library whose code decides bits."""

from __future__ import annotations

import functools
import hashlib
import re
import subprocess
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from exactrl.ops.cuda import nvrtc

LOADED = ("libcublas.so", "libcublasLt.so", "libnvrtc")


@functools.cache
def machine() -> dict[str, str]:
    """What must be unchanged for a certificate to hold. Digests are of file contents, as loaded in this process.

    Needs a GPU. cuBLAS and NVRTC are found among the mapped files of this process, so that a replaced library is seen
    whatever its version says.
    """
    major, minor = torch.cuda.get_device_capability()
    libraries = {path.name.split(".so")[0]: _file_digest(path) for path in _loaded_libraries()}
    return {
        "device": torch.cuda.get_device_name(),
        "capability": f"sm{major}{minor}",
        "driver": driver_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": _triton(),
        "kernels": kernels_digest(),
        **libraries,
        **({"deep_gemm": _deep_gemm()} if find_spec("deep_gemm") else {}),
        **({"flash_attn_3": _flash_attn_3()} if find_spec("flash_attn_3") else {}),
    }


def kernels_digest() -> str:
    """Of the sources of this folder."""
    folder = Path(__file__).parent
    return _digest([p.read_bytes() for suffix in ("py", "cu", "cuh") for p in sorted(folder.glob(f"*.{suffix}"))])


def driver_version() -> str:
    try:
        found = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
        if found:
            return found[1]
    except OSError:
        pass
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def _loaded_libraries() -> list[Path]:
    torch.zeros(1, device="cuda")  # a context for the next line
    torch.cuda.current_blas_handle()  # loads cuBLAS
    nvrtc.load_compiler()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    return sorted(Path(p) for p in mapped if Path(p).name.startswith(LOADED))


def _triton() -> str:
    if find_spec("triton") is None:
        return "absent"
    folder = Path(next(iter(find_spec("triton").submodule_search_locations)))  # type: ignore[union-attr,arg-type]
    compiler = folder / "_C" / "libtriton.so"
    return f"{metadata.version('triton')} {_file_digest(compiler)}"


def _deep_gemm() -> str:
    """The compiled part and the CUDA headers that its kernels are compiled from at run time."""
    folder = Path(next(iter(find_spec("deep_gemm").submodule_search_locations)))  # type: ignore[union-attr,arg-type]
    headers = sorted((folder / "include" / "deep_gemm").rglob("*.cuh"))
    compiled = sorted(folder.glob("*.so"))
    return _digest([_file_digest(path).encode() for path in (*compiled, *headers)])


def _flash_attn_3() -> str:
    folder = Path(next(iter(find_spec("flash_attn_3").submodule_search_locations)))  # type: ignore[union-attr,arg-type]
    return _digest([_file_digest(path).encode() for path in sorted(folder.glob("*.so"))])


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _digest(parts: list[bytes]) -> str:
    h = hashlib.sha256()
    for part in parts:
        h.update(part)
    return h.hexdigest()[:16]
