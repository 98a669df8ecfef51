"""split_attention.cu, stream_attention.cu and merge_splits.cu on the host: their text, compiled by g++ against a
model of the GPU (host/device_on_host.h), must give the bits of the definition written down in numpy with the same
matrix unit. And who takes few splits, who many.

What only a GPU can show, the bits of its matrix unit and exp2, is in tests/gpu.
"""

from __future__ import annotations

from tests.ops.cuda import interpreter  # isort: skip  # noqa: F401 - sets up Triton before it is imported

import ctypes
import functools
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exactrl.contract import AttentionShape
from exactrl.ops.cuda import decode_attention, listed_splits, merge_splits, nvrtc, split_attention, stream_attention
from exactrl.ops.cuda.attention import (
    HEAD_DIMS,
    RESERVED_BYTES,
    SHARED_BYTES,
    AttentionRows,
    attention_implementations,
)
from exactrl.ops.cuda.attention_host import scale_of
from exactrl.ops.cuda.attention_tiles import StreamTile, WarpTile
from exactrl.ops.cuda.nvrtc import MAX_SHARED, TensorMap, _address, _argument
from exactrl.ops.cuda.triton_split_attention import SplitPlan
from tests.gpu.attention_inputs import Sequences, draw

HOST = Path(__file__).parent / "host"
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles the kernel with g++")
BLOCK, SPLIT = 64, 512
Tile = WarpTile | StreamTile


class HostMap(ctypes.Structure):
    """host/device_on_host.h: TensorMap."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("strides", ctypes.c_uint64 * 4),
        ("extents", ctypes.c_uint64 * 4),
        ("box", ctypes.c_uint32 * 4),
    )

    def getPtr(self) -> int:
        return ctypes.addressof(self)


def host_map(pages: torch.Tensor, rows: int) -> TensorMap:
    count, page_size, kv_heads, dim = pages.shape
    strides = (1, pages.stride(2), pages.stride(1), pages.stride(0))
    quadruples = (tuple(strides), (dim, kv_heads, page_size, count), (64, 1, rows, 1))
    return TensorMap(HostMap(pages.data_ptr(), *quadruples))


def library(module: Any, options: list[str], folder: Path) -> ctypes.CDLL:
    name = module.__name__.rsplit(".", 1)[1]
    text = "".join((listed_splits.FOLDER / file).read_text() for file in module.FILES)
    kernel, built = folder / "kernel.h", folder / "kernel.so"
    kernel.write_text("\n".join(line for line in text.splitlines() if "extern __shared__" not in line))
    includes = [f"-I{HOST}", f"-I{listed_splits.FOLDER}", f'-DKERNEL="{kernel}"']
    flags = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-fno-strict-aliasing", "-ffp-contract=off"]
    command = ["g++", *flags, *includes, *options[1:], str(HOST / f"{name}.cpp"), "-o", str(built)]
    compiled = subprocess.run(command, check=False, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    found = ctypes.CDLL(str(built))
    found.exp2_on_host.restype = found.lse_on_host.restype = ctypes.c_float
    found.exp2_on_host.argtypes, found.lse_on_host.argtypes = [ctypes.c_float], [ctypes.c_float] * 2
    return found


class HostKernel:
    """nvrtc.Kernel, on the host. `seed` draws the order of threads."""

    def __init__(self, function: Any, seed: int, shared: int = 0) -> None:
        self.function, self.seed, self.shared = function, seed, shared

    def launch(self, grid: tuple, threads: int, arguments: Any) -> None:
        self.ready(grid, threads, arguments)()

    def ready(self, grid: tuple, threads: int, arguments: Any, early: bool = False) -> HostLaunch:
        return HostLaunch(self, grid[0], threads, [_argument(a) for a in arguments], early)


@dataclass
class HostLaunch:
    """nvrtc.Launch."""

    kernel: HostKernel
    blocks: int
    threads: int
    values: list[Any]
    early: bool

    def replace(self, place: int, value: TensorMap) -> None:
        assert isinstance(self.values[place], TensorMap)
        self.values[place] = value

    def __call__(self) -> None:
        pointers = (ctypes.c_void_p * len(self.values))(*(_address(v) for v in self.values))
        waits = self.kernel.function(self.blocks, self.threads, self.kernel.shared, self.kernel.seed, pointers)
        assert waits == self.blocks * self.threads or not self.early, "what is launched early waits, in every thread"


class Definition:
    """attention.py's definition of one row, with the model's matrix unit and exp2."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.exp2 = np.vectorize(library.exp2_on_host, otypes=[np.float32])
        self.lse = library.lse_on_host

    def product(self, c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """c [N] + a [N, K] b [K], 16 of K at a time."""
        for k in range(0, a.shape[1], 16):
            total = c.astype(np.float64)
            for i in range(k, k + 16):
                total = total + a[:, i].astype(np.float64) * np.float64(b[i])
            c = total.astype(np.float32)
        return c

    def split(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: int, scale: np.float32) -> tuple:
        """k, v: the split's keys that exist; `seen` of them the row sees."""
        m, l, acc = np.float32(-np.inf), np.zeros(1, np.float32), np.zeros(len(q), np.float32)
        for first in range(0, len(k), BLOCK):
            keys, values = np.zeros((2, BLOCK, len(q)), np.float32)
            inside = slice(first, min(first + BLOCK, len(k)))
            keys[: inside.stop - first], values[: inside.stop - first] = k[inside], v[inside]
            s = self.product(np.zeros(BLOCK, np.float32), keys, q) * scale
            s[max(0, seen - first) :] = -np.inf
            mn = np.maximum(m, s.max())
            mz = np.float32(0) if np.isneginf(mn) else mn
            p = torch.from_numpy(self.exp2(s - mz)).bfloat16().float().numpy()
            al = self.exp2(m - mz)
            l = self.product(l * al, np.ones((1, BLOCK), np.float32), p)
            acc, m = self.product(acc * al, np.ascontiguousarray(values.T), p), mn
        return m, l[0], acc

    def row(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: int, scale: np.float32) -> tuple:
        """(out, lse)"""
        M, L, A = np.float32(-np.inf), np.float32(0), np.zeros(len(q), np.float32)
        for first in range(0, len(k), SPLIT):
            at = slice(first, first + SPLIT)
            m, l, acc = self.split(q, k[at], v[at], seen - first, scale)
            if np.isneginf(m):
                continue
            mn = np.maximum(M, m)
            a, b = self.exp2(M - mn), self.exp2(m - mn)
            A, L, M = A * a + acc * b, L * a + l * b, mn
        return torch.from_numpy(A / L).bfloat16(), self.lse(M, L)


def expected(data: Sequences, counts: np.ndarray, definition: Definition) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, D], lse [H, T]) of the last `counts` rows of each sequence."""
    (_, heads, dim), group = data.q.shape, data.q.shape[1] // data.k.shape[1]
    scale = np.float32(scale_of(dim))
    out = torch.empty(int(counts.sum()), heads, dim, dtype=torch.bfloat16)
    lse = torch.empty(heads, len(out))
    q, k, v = (t.float().numpy() for t in (data.q, data.k, data.v))
    t = 0
    for start, n, count in zip(data.starts, data.lengths, counts, strict=False):
        for position in range(n - count, n):
            for h in range(heads):
                keys, values = (x[start : start + n, h // group] for x in (k, v))
                out[t, h], lse[h, t] = definition.row(q[start + position, h], keys, values, position + 1, scale)
            t += 1
    return out, lse


class OnHost:
    """attend_splits or attend_stream, whose launches run on the host, on `held` multiprocessors."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, tile: Tile, shape: AttentionShape, held: int) -> None:
        self.module = stream_attention if isinstance(tile, StreamTile) else split_attention
        self.compiled = library(self.module, self.module.source_options(shape, tile), folder)
        self.kernel = HostKernel(self.compiled.attend_on_host, 0, tile.shared_bytes(shape.dim))
        patch.setattr(self.module, "_kernel", lambda *_: self.kernel)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(type(tile), "of", lambda _: tile)
        patch.setattr(listed_splits, "_lister", lambda *_: HostKernel(self.compiled.list_on_host, 0))
        patch.setattr(listed_splits, "multiprocessors", lambda _: held)
        patch.setattr(stream_attention, "page_map", host_map)
        patch.setattr(merge_splits, "MANY", 2)  # the longest has three splits
        patch.setattr(merge_splits, "FEW", 2 if shape.dim == 64 else 8)
        patch.setattr(merge_splits, "_kernel", functools.cache(lambda *of: self.merge(folder, *of)))

    def merge(self, folder: Path, shape: AttentionShape, parts: int, in_flight: int, _: int) -> HostKernel:
        into = folder / f"merge-{parts}-{in_flight}"
        into.mkdir()
        options = merge_splits.source_options(shape, parts, in_flight)
        return HostKernel(library(merge_splits, options, into).attend_on_host, 0)

    def __call__(self, seed: int, *arguments: Any) -> None:
        self.kernel.seed = seed
        (self.module.attend_stream if self.module is stream_attention else self.module.attend_splits)(*arguments)


# tile, heads, kv heads, head dim, page size, multiprocessors, peak, rows
CASES = [
    (WarpTile(4, 1), 4, 2, 64, 16, 1, 1.0, 1),
    (WarpTile(3, 1), 2, 1, 64, 64, 2, 4.0, 4),
    (WarpTile(6, 1), 5, 1, 128, 32, 99, 16.0, 1),
    (WarpTile(2, 1), 2, 1, 256, 256, 1, 2.0, 2),
    (StreamTile(2, 1), 4, 2, 64, 16, 1, 1.0, 1),
    (StreamTile(5, 1), 2, 1, 128, 64, 3, 4.0, 4),
    (StreamTile(12, 1), 5, 1, 64, 32, 99, 16.0, 1),
    (StreamTile(3, 2), 2, 1, 256, 256, 1, 2.0, 2),
]
LENGTHS = [1, 70, 512, 577, 1026]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{type(case[0]).__name__}-{case[0].ring}-{case[3]}")
def test_bits_are_those_of_the_definition(case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tile, heads, kv_heads, dim, page_size, held, peak, most = case
    kernel = OnHost(monkeypatch, tmp_path, tile, AttentionShape(heads, kv_heads, dim, page_size), held)
    data = draw(LENGTHS, heads, kv_heads, dim, page_size, peak, 0, "cpu")
    counts = np.minimum(most, data.lengths)
    right, right_lse = expected(data, counts, Definition(kernel.compiled))
    number, rows = data.last(counts, data.lengths, np.arange(len(data.lengths)))
    asked = np.array([0, 1, 3, 4])
    others = np.repeat(np.isin(np.arange(len(counts)), asked, invert=True), counts)
    right[others], right_lse[:, others] = -7.0, -7.0
    kept = []
    for seed in range(2):  # two layers of one step
        out, lse = torch.full_like(right, -7.0), torch.full_like(right_lse, -7.0)
        layer = [t.clone() for t in (data.q[number], data.k_pages, data.v_pages)]
        kernel(seed, *layer, rows, out, lse, asked)
        assert torch.equal(out, right)
        assert torch.equal(lse, right_lse)
        for t in layer:
            kept.append(t.fill_(torch.nan))  # what a launch that was made ready for this layer would read


@pytest.mark.parametrize("tile", [WarpTile(4, 1), StreamTile(4, 1)], ids=lambda tile: type(tile).__name__)
def test_lengths_beyond_what_a_plan_has_room_for_give_nan(
    tile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = OnHost(monkeypatch, tmp_path, tile, AttentionShape(2, 1, 64, 64), 4)
    data = draw([513, 1025], 2, 1, 64, 64, 1.0, 0, "cpu")
    number, _ = data.last(np.ones(2, int), data.lengths, np.arange(2))
    rows = AttentionRows.build(np.ones(2), data.lengths, data.tables, "cpu", most_keys=np.array([512, 512]))
    out = torch.zeros(2, 2, 64, dtype=torch.bfloat16)
    kernel(0, data.q[number], data.k_pages, data.v_pages, rows, out, None, np.arange(2))
    assert out.isnan().all()


def store_splits(plan: SplitPlan, data: Sequences, counts: np.ndarray, definition: Definition) -> None:
    """What kernels with parallel splits leave for the merge: places are those of the splits, sequence by sequence."""
    (_, heads, dim), kv_heads, place = data.q.shape, data.k.shape[1], 0
    q, k, v = (t.float().numpy() for t in (data.q, data.k, data.v))
    group, scale = heads // kv_heads, np.float32(scale_of(dim))
    for s in plan.sequences.tolist():
        start, n = data.starts[s], data.lengths[s]
        for first in range(0, n, SPLIT):
            at = slice(start + first, start + min(first + SPLIT, n))
            for r, h in np.ndindex(counts[s], heads):
                position = n - counts[s] + r
                arguments = q[start + position, h], k[at, h // group], v[at, h // group]
                m, l, acc = definition.split(*arguments, position + 1 - first, scale)
                where = place, h // group, r * group + h % group
                plan.stats[where], plan.partial[where] = torch.tensor([m, l]), torch.from_numpy(acc)
            place += 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "most", "in_flight"), [(4, 2, 64, 1, 1), (2, 1, 128, 3, 2), (5, 1, 64, 1, 8)]
)
def test_the_merge_of_splits(heads, kv_heads, dim, most, in_flight, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that one split makes whole are left alone."""
    data = draw(LENGTHS, heads, kv_heads, dim, 64, 4.0, 0, "cpu")
    counts, asked = np.minimum(most, data.lengths), np.array([0, 1, 3, 4])
    _, rows = data.last(counts, data.lengths, np.arange(len(data.lengths)))
    parts = -(-int(counts[asked].max()) * (heads // kv_heads) * dim // (merge_splits.THREADS * 4))
    options = merge_splits.source_options(AttentionShape(heads, kv_heads, dim, 64), parts, in_flight)
    compiled = library(merge_splits, options, tmp_path)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(listed_splits, "_lister", lambda *_: HostKernel(compiled.list_on_host, 0))
    monkeypatch.setattr(merge_splits, "_kernel", lambda *_: HostKernel(compiled.attend_on_host, 0))
    plan, definition = listed_splits.listed_plan(data.q, data.k_pages, rows, asked), Definition(compiled)
    plan.splits.partial.fill_(float("nan"))
    store_splits(plan.splits, data, counts, definition)
    right, right_lse = expected(data, counts, definition)
    others = np.repeat(np.isin(np.arange(len(counts)), [3, 4], invert=True), counts)
    right[others], right_lse[:, others] = -7.0, -7.0
    out, lse = torch.full_like(right, -7.0), torch.full_like(right_lse, -7.0)
    arguments = plan.arguments(data.q[: len(out)], data.k_pages, data.v_pages, out, lse)
    merge_splits.merge_splits(replace(plan, most_keys=512), arguments)
    assert (out == -7).all(), "no sequence can have more than one split"
    merge_splits.merge_splits(plan, arguments)
    assert torch.equal(out, right)
    assert torch.equal(lse, right_lse)


@pytest.mark.parametrize("name", ["stream_attention.cu", "merge_splits.cu"])
def test_what_is_launched_early_reads_nothing_of_others_before_it_waits(name: str) -> None:
    """Only its parameters, tensor maps among them, and its own shared memory."""
    entry = listed_splits.source_of(name).rpartition('extern "C" __global__')[2]
    before, after = entry[entry.index(") {") :].split("wait_for_kernels_before();")
    assert not re.search(r"\ba\.|\*a\b|\(a\b|\b(merges|starts|lengths)\b|\battend\(|\bproduce\(", before), before
    assert re.search(r"\ba\b", after)


@pytest.mark.parametrize("dim", [dim for dim in HEAD_DIMS if dim >= 64])
@pytest.mark.parametrize("kind", [WarpTile, StreamTile])
def test_as_many_blocks_fit_a_multiprocessor_as_a_tile_says(kind: type[Tile], dim: int) -> None:
    shared = kind.of(dim).shared_bytes(dim)
    assert shared <= MAX_SHARED
    assert kind.of(dim).ctas * (shared + RESERVED_BYTES) <= SHARED_BYTES


def test_what_is_offered_and_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    offered = {n: i for n, i in attention_implementations().items() if n.startswith("cuda-")}
    assert list(offered) == ["cuda-split", "cuda-stream", "cuda-decode"]
    assert offered["cuda-decode"].attend is decode_attention.attend_few_or_many
    shapes = [AttentionShape(8, 2, dim, page) for dim in HEAD_DIMS for page in (0, 16, 64, 256)]
    for i in offered.values():
        assert (i.kind, i.most_rows) == ("split", 8)
        assert [s for s in shapes if i.serves(s)] == [s for s in shapes if s.page_size and s.dim >= 64]
        assert [i.serves(AttentionShape(group, 1, 64, 64)) for group in (8, 9)] == [True, False]


@pytest.mark.parametrize(("last", "taken"), [(512, "stream"), (513, "splits")])
def test_more_splits_than_some_for_each_multiprocessor_go_to_warps(last, taken, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(decode_attention, "multiprocessors", lambda _: 4)
    monkeypatch.setattr(listed_splits.ListedPlan, "refresh", lambda _: None)
    monkeypatch.setattr(decode_attention, "attend_stream", lambda *_: calls.append("stream"))
    monkeypatch.setattr(decode_attention, "attend_splits", lambda *_: calls.append("splits"))
    count = decode_attention.FEW * 4 // 2  # of two kv heads
    lengths = np.array([512] * (count - 1) + [last, 9999])
    rows = AttentionRows.build(np.ones(count + 1), lengths, np.zeros((count + 1, 200), np.int32), "cpu")
    q, k = torch.zeros(count + 1, 4, 128), torch.zeros(1, 64, 2, 128)
    decode_attention.attend_few_or_many(q, k, k, rows, q, None, np.arange(count))  # the last is not asked for
    assert calls == [taken]
