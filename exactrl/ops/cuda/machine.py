"""Which machine a certificate is of: device, driver, and a digest of every library whose code decides bits."""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import subprocess
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from exactrl.contract import KERNEL_DIGESTS
from exactrl.ops.cuda import nvrtc

FOLDER = Path(__file__).parent
ROOTS = {"linears": ("matmul.py",), "attention": ("attention.py", "fa3_attention.py")}
"""Part of a certificate -> the sources that list its implementations."""
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
        **{key: kernels_digest(part) for part, key in KERNEL_DIGESTS.items()},
        **libraries,
        **({"deep_gemm": _deep_gemm()} if find_spec("deep_gemm") else {}),
        **({"flash_attn_3": _flash_attn_3()} if find_spec("flash_attn_3") else {}),
    }


def kernels_digest(part: str | None = None) -> str:
    """Of the sources behind one part of a certificate; of all of this folder without `part`."""
    names = kernel_sources(part) if part else [p.name for p in FOLDER.iterdir() if p.suffix in (".py", ".cu", ".cuh")]
    return _digest([(FOLDER / name).read_bytes() for name in sorted(names)])


def kernel_sources(part: str) -> set[str]:
    """Names of files of this folder: the roots, what they import from it, and the CUDA sources they name."""
    found: set[str] = set()
    waiting = list(ROOTS[part])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _named_in(FOLDER / name) if name.endswith(".py") else ()
    return found


def _named_in(path: Path) -> set[str]:
    """Modules of this folder that are imported anywhere in a file, and its string constants that name a file here."""
    package, names = __name__.rpartition(".")[0], set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module == package:
            names |= {f"{alias.name}.py" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{package}."):
            names.add(f"{node.module.removeprefix(f'{package}.')}.py")
        elif isinstance(node, ast.Constant) and str(node.value).endswith((".cu", ".cuh")):
            names.add(str(node.value))
    return {name for name in names if (FOLDER / name).is_file()}


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
