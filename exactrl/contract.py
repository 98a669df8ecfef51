"""The numerics contract as data: what fixes the bits of a logprob (docs/numerics.md).

A contract names the canonical order of every reduction and where results are rounded. Kernels may parallelise in any
way that gives the same bits. The digest goes into prefix-cache keys, run folders and certificates.

On a GPU no kernel is believed before it is certified on this machine. A certificate is read here; parity/certify.py
makes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from exactrl.errors import CertificationError, ConfigError, EnvironmentProblem


@dataclass(frozen=True, slots=True)
class Contract:
    """Parameters of the canonical order. Lengths are in tokens or elements.

    k_leaves        leaves of row-parallel linears (o_proj, down_proj), added as a balanced fp32 tree
    residual_dtype  "bfloat16" or "float32"; a float32 model always has a float32 residual stream
    kv_split        attention: KV cut at absolute multiples of this, splits merged ascending
    kv_block        attention: online-softmax block inside a split
    vocab_block     log-softmax: (max, sum) per block of the vocabulary, merged ascending
    lanes           CPU row reductions: element i belongs to lane i % lanes, lanes added as a balanced tree
    """

    name: str = "exact-v1"
    k_leaves: int = 1
    residual_dtype: str = "bfloat16"
    kv_split: int = 512
    kv_block: int = 64
    vocab_block: int = 128
    lanes: int = 16

    @property
    def digest(self) -> str:
        return hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def attention(self) -> str:
        """Whose order attention has: "canonical", or "fa3" (Flash Attention 3 with num_splits=1; GPUs only)."""
        return "fa3" if self.name == FA3 else "canonical"


FA3 = "exact-v1-fa3"
CONTRACTS = {"exact-v1": Contract(), FA3: Contract(name=FA3)}


def get_contract(name: str, *, k_leaves: int = 1, residual_dtype: str = "bfloat16") -> Contract:
    """The named contract with the two parameters a recipe may choose.

    Raises ConfigError for an unknown name, a k_leaves that is not a power of two, or another residual dtype.
    """
    if name not in CONTRACTS:
        raise ConfigError(f"contract.name {name!r} is unknown; known contracts: {', '.join(CONTRACTS)}")
    if k_leaves < 1 or k_leaves & (k_leaves - 1):
        raise ConfigError(f"contract.k_leaves must be a power of two, not {k_leaves}")
    if residual_dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"contract.residual_dtype must be 'bfloat16' or 'float32', not {residual_dtype!r}")
    return replace(CONTRACTS[name], k_leaves=k_leaves, residual_dtype=residual_dtype)


def noise_key(seed: int, stream: str, step: int, retry: int, row_id: str, sample_index: int) -> int:
    """64-bit Philox key of one response: all that its sampling noise depends on besides position and vocabulary index.

    `stream` separates uses of the same seed ("train", "eval/<name>", "generate"), `row_id` is the prompt's unique id.
    """
    row = hashlib.blake2b(row_id.encode(), digest_size=8).digest()
    head = struct.pack("<qqqq", seed, step, retry, sample_index)
    return int.from_bytes(hashlib.blake2b(head + row + stream.encode(), digest_size=8).digest(), "little")


CERTIFICATE_FORMAT = 2  # 1 had no attention


@dataclass(frozen=True, slots=True, order=True)
class LinearShape:
    """y [M, n] = x [M, k] Wᵀ with bf16 inputs; `out_dtype` "bfloat16" or "float32"."""

    n: int
    k: int
    out_dtype: str = "bfloat16"
    leaves: int = 1

    def __str__(self) -> str:
        leaves = f", {self.leaves} leaves" if self.leaves > 1 else ""
        return f"linear {self.k} -> {self.n} ({self.out_dtype}{leaves})"


@dataclass(frozen=True, slots=True, order=True)
class AttentionShape:
    """Causal attention of `heads` query heads that share `kv_heads`; bf16. `page_size` 0: packed K and V, no pages.
    `order` as Contract.attention."""

    heads: int
    kv_heads: int
    dim: int
    page_size: int = 0
    kv_split: int = 512
    kv_block: int = 64
    order: str = "canonical"

    def __str__(self) -> str:
        pages = f"pages of {self.page_size}" if self.page_size else "packed"
        order = "" if self.order == "canonical" else f"{self.order}, "
        return f"attention {self.heads}/{self.kv_heads} x {self.dim} ({order}{pages})"


ATTENTION_KINDS = ("split", "in_order")
"""Few rows of a sequence, its KV splits in parallel; any number of rows, splits one after another. Same bits."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest implementation that was bit-exact at every checked number of rows in m_min … m_max."""

    m_min: int
    m_max: int
    implementation: str


KERNEL_DIGESTS = {"linears": "linear_kernels", "attention": "attention_kernels"}
"""Part of a certificate -> the entry of `machine` with the digest of its kernels' sources."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What may run on one machine: for each linear, ranges of rows without gaps, from 1 upwards; for each attention one
    implementation of each kind. `outdated` names parts left out because their kernels' sources have changed."""

    machine: Mapping[str, str]
    linears: Mapping[LinearShape, tuple[Choice, ...]]
    attention: Mapping[AttentionShape, Mapping[str, str]] = field(default_factory=dict)
    outdated: tuple[str, ...] = ()

    def excerpt(self, linears: Sequence[LinearShape], attention: Sequence[AttentionShape]) -> dict[str, Any]:
        """What runs for these shapes and on which machine that was certified; JSON-ready. Raises CertificationError for
        a linear without certificate."""
        return {
            "machine": dict(self.machine),
            "linears": [
                {"shape": asdict(shape), "choices": [asdict(choice) for choice in self._choices(shape)]}
                for shape in dict.fromkeys(linears)
            ],
            "attention": [
                {"shape": asdict(shape), "choices": dict(self.attention.get(shape, {}))}
                for shape in dict.fromkeys(attention)
            ],
        }

    def attends(self, shape: AttentionShape, kind: str) -> str:
        """The implementation of this kind. Raises CertificationError where none is certified."""
        assert kind in ATTENTION_KINDS, kind
        if name := self.attention.get(shape, {}).get(kind):
            return name
        raise CertificationError(
            f"no {kind} kernel is certified for {shape} on this machine{self._since('attention')}; "
            "run: exactrl certify MODEL"
        )

    def max_rows(self, shape: LinearShape) -> int:
        return self._choices(shape)[-1].m_max

    def implementation(self, shape: LinearShape, m: int) -> str:
        """Raises CertificationError where nothing is certified."""
        for choice in self._choices(shape):
            if choice.m_min <= m <= choice.m_max:
                return choice.implementation
        raise CertificationError(f"{shape} is certified for 1 to {self.max_rows(shape)} rows, not for {m}")

    def _choices(self, shape: LinearShape) -> tuple[Choice, ...]:
        if choices := self.linears.get(shape):
            return choices
        raise CertificationError(
            f"no kernel is certified for {shape} on this machine{self._since('linears')}; run: exactrl certify MODEL"
            + (f" --k-leaves {shape.leaves}" if shape.leaves > 1 else "")
        )

    def _since(self, part: str) -> str:
        return f" since the sources of {KERNEL_DIGESTS[part]} changed" if part in self.outdated else ""


def machine_digest(machine: Mapping[str, str]) -> str:
    """Without our kernels' sources: each part of a certificate depends on its own."""
    return hashlib.blake2b(json.dumps(_without_kernels(machine), sort_keys=True).encode(), digest_size=8).hexdigest()


def _without_kernels(machine: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in machine.items() if key not in KERNEL_DIGESTS.values()}


def current(content: Mapping[str, Any], machine: Mapping[str, str], part: str) -> bool:
    """Whether this part of a certificate file is of the kernels that are here now."""
    key = KERNEL_DIGESTS[part]
    return bool(content["machine"].get(key) == machine.get(key))


def cache_folder() -> Path:
    """Certificates and compiled GPU kernels; everything in it can be made again."""
    root = os.environ.get("EXACTRL_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "exactrl"


def write_cached(path: Path, content: bytes) -> None:
    """Writes a file of the cache folder, whole or not at all. Raises EnvironmentProblem when it cannot be written."""
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {path}: {error.strerror}; set EXACTRL_CACHE_DIR") from error


def certificate_folder() -> Path:
    return cache_folder() / "certificates"


def certificate_path(machine: Mapping[str, str]) -> Path:
    return certificate_folder() / f"{machine_digest(machine)}.json"


def read_certificate(machine: Mapping[str, str]) -> Certificate:
    """The certificate of `machine`: device, driver and library digests, all of which must be those certified. Linears
    or attention are left out when the sources of their kernels have changed since.

    Raises CertificationError when there is none, naming what changed since the newest certificate of the same device.
    """
    path = certificate_path(machine)
    if not path.exists():
        raise CertificationError(f"{_why_none(machine)}; run: exactrl certify MODEL")
    content = load_certificate(path)
    if _without_kernels(content["machine"]) != _without_kernels(machine):
        raise CertificationError(
            f"{path} is the certificate of another machine; delete it and run: exactrl certify MODEL"
        )
    linears = {
        LinearShape(**entry["shape"]): tuple(
            Choice(c["m_min"], c["m_max"], c["implementation"]) for c in entry["choices"]
        )
        for entry in content["linears"]
        if current(content, machine, "linears")
    }
    attention = {
        AttentionShape(**entry["shape"]): dict(entry["choices"])
        for entry in content["attention"]
        if current(content, machine, "attention")
    }
    outdated = tuple(part for part in KERNEL_DIGESTS if content[part] and not current(content, machine, part))
    return Certificate(dict(machine), linears, attention, outdated)


def load_certificate(path: Path) -> dict[str, Any]:
    """A certificate file, older formats as if written in the present one.

    Raises CertificationError when it cannot be read or has another format.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CertificationError(
            f"{path} cannot be read ({error}); delete it and run: exactrl certify MODEL"
        ) from error
    if isinstance(content, dict) and content.get("format") == 1:
        content = {**content, "format": CERTIFICATE_FORMAT, "attention": []}
    if not isinstance(content, dict) or content.get("format") != CERTIFICATE_FORMAT:
        raise CertificationError(
            f"{path} is no certificate of format 1 to {CERTIFICATE_FORMAT}; delete it and run: exactrl certify MODEL"
        )
    return content


def _why_none(machine: Mapping[str, str]) -> str:
    others = sorted(certificate_folder().glob("*.json"), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in (load_certificate(path)["machine"] for path in others):
        if old.get("device") == machine.get("device"):
            changed = [
                f"{key} {old.get(key, 'absent')} -> {machine.get(key, 'absent')}"
                for key in sorted({*old, *machine})
                if old.get(key) != machine.get(key)
            ]
            return f"the certificate of this {machine.get('device')} is out of date: {'; '.join(changed)}"
    return f"no certificate for this machine ({machine.get('device')})"
