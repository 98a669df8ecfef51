"""Kernels that are launched early: nothing they read or overwrite is another's, eager, in graphs and between streams.

Each chain runs once with a pause after every step, when nothing can overlap, and then as it is meant to run. Mixed in:
kernels and copies that know nothing of early launches, and memory that the allocator hands on while it is still read.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch

from exactrl.contract import LinearShape
from exactrl.ops.qkv import HeadShape, RopeTable
from exactrl.parity.compare import differing

if not torch.cuda.is_available():  # before kernels are imported, which tests/ops/cuda wants to run interpreted
    pytest.skip("needs an H100 or H200", allow_module_level=True)
pytest.importorskip("triton")
from exactrl.ops.cuda import triton_norm, wgmma_matmul
from exactrl.ops.cuda.norm import add_rms_norm, rms_norm
from exactrl.ops.cuda.qkv import qkv_into_cache
from exactrl.ops.cuda.sampling import sample_exact
from exactrl.ops.cuda.swiglu import swiglu

EPS, BF16, ROWS, WIDTH = 1e-6, torch.bfloat16, 8192, 2560
Pause = Callable[[], None]


def normal(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(BF16)


@pytest.fixture(scope="module")
def inputs() -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Large ones, a row, a weight."""
    return [normal(ROWS, WIDTH, seed=i) for i in range(4)], normal(1, WIDTH, seed=7), normal(WIDTH, seed=8)


def slow(h: torch.Tensor, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """All programs start at once, so that the next kernel may too, and each of them reads and writes for long."""
    return triton_norm.backward(h, w, dy, None, EPS, BF16, False)[0]


@functools.cache
def rope_of(dim: int, positions: int) -> RopeTable:
    """Made before a chain is captured: a graph takes nothing from the host."""
    return RopeTable.build(1e6, dim, positions).to("cuda")


def memory_is_written_again(inputs, pause: Pause) -> list[torch.Tensor]:
    """A long reader of y, then a short kernel that writes into y, where the long one reads last, too."""
    large, row, w = inputs
    shape = HeadShape(20, 20, 128)
    assert shape.kv_heads * shape.dim == WIDTH
    rope = rope_of(shape.dim, 1024)
    slots = torch.arange(7, ROWS, 8, device="cuda")
    x, positions = row.expand(len(slots), -1).repeat(1, 3), torch.arange(len(slots), device="cuda") % 1024
    found = []
    for i in range(6):
        y, values = rms_norm(large[i % 3], w, EPS), large[3].clone()
        pause()
        found.append(slow(y, large[3], w))
        pause()
        pages = [t.view(-1, 64, shape.kv_heads, shape.dim) for t in (y, values)]
        found += [qkv_into_cache(x, w[:128], w[128:256], rope, positions, shape, EPS, *pages, slots), y, values]
        pause()
    return found


def memory_is_handed_on(inputs, pause: Pause) -> list[torch.Tensor]:
    """A long reader of y, then kernels that write what the allocator makes of y's memory."""
    large, _, w = inputs
    found = []
    for i in range(6):
        y = rms_norm(large[i % 3], w, EPS)
        pause()
        found.append(slow(y, large[3], w))
        pause()
        del y
        again = rms_norm(large[(i + 1) % 3], w, EPS)
        pause()
        found.append(rms_norm(again[-3:], w, EPS))
        pause()
        del again
    return found


def results_of_the_one_before_last(inputs, pause: Pause) -> list[torch.Tensor]:
    """Long, short, and readers of what the long one wrote last."""
    large, row, w = inputs
    found = []
    for i in range(6):
        y = slow(large[i % 3], large[3], w)
        pause()
        if i % 2:
            found.append(rms_norm(row, w, EPS))
            pause()
        found += add_rms_norm(y[-64:], row.expand(64, -1).contiguous() if i > 3 else large[3][:64], w, EPS)
        pause()
    return found


def others_in_between(inputs, pause: Pause) -> list[torch.Tensor]:
    """Library products, element-wise kernels, copies and fills before and after early kernels."""
    large, _, w = inputs
    buffer = torch.empty(ROWS, WIDTH, dtype=BF16, device="cuda")
    found = []
    for i in range(4):
        buffer.copy_(large[i % 3])
        pause()
        found.append(slow(buffer, large[3], w))
        pause()
        buffer.zero_()
        pause()
        found.append(swiglu(buffer[-64:]))
        pause()
        buffer.add_(large[(i + 1) % 3])
        pause()
        y = rms_norm(slow(buffer, large[3], w), w, EPS)
        pause()
        found.append(y[-64:] @ y[:512].T)
        pause()
    return found


def two_streams(inputs, pause: Pause) -> list[torch.Tensor]:
    large, row, w = inputs
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    found = []
    for i in range(4):
        side.wait_stream(here)
        with torch.cuda.stream(side):
            y = slow(large[i % 3], large[3], w)
        pause()
        short = rms_norm(row, w, EPS)
        pause()
        here.wait_stream(side)
        y.record_stream(here)
        found += [*add_rms_norm(y[-64:], y[:64], w, EPS), short]
        pause()
    return found


@functools.cache
def weight_of(n: int, k: int) -> torch.Tensor:
    """Made before a chain is captured: products fetch it before the kernels before them are done."""
    return normal(n, k, seed=n + k)


def products(inputs, pause: Pause) -> list[torch.Tensor]:
    """A layer's products, each cut, between short kernels; a long one writes the first one's input late. Inputs change
    from layer to layer, out of step with the memory that the allocator hands on, so that stale ones show."""
    large, _, w = inputs
    up, down = LinearShape(2 * WIDTH, WIDTH), LinearShape(WIDTH, WIDTH)
    found, layer = [], itertools.count()
    for rows in (1, 17, 64, 100, 128, 250):
        ups, downs = (
            [cut for cut in sorted(wgmma_matmul.cuts(s), key=str) if wgmma_matmul.fits(cut, s, rows)]
            for s in (up, down)
        )
        count = max(len(ups), len(downs))
        for a, b in itertools.islice(zip(itertools.cycle(ups), itertools.cycle(downs), strict=False), count):
            x = slow(large[next(layer) % 3], large[3], w)[-rows:]
            pause()
            both = wgmma_matmul.matmul(x, weight_of(up.n, up.k), BF16, 1, a)
            pause()
            active = swiglu(both)
            del both
            pause()
            y = wgmma_matmul.matmul(active, weight_of(down.n, down.k), BF16, 1, b)
            del active
            pause()
            h, normed = add_rms_norm(y, x, w, EPS)
            pause()
            found += [h, wgmma_matmul.matmul(normed, weight_of(up.n, up.k), torch.float32, 1, a)]
            pause()
    assert len(found) > 20, "no cuts to try"
    return found


CHAINS = [
    memory_is_written_again, memory_is_handed_on, results_of_the_one_before_last, others_in_between, two_streams,
    products,
]  # fmt: skip


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.__name__)
def test_nothing_overtakes(chain, inputs) -> None:
    expected = [t.clone() for t in chain(inputs, torch.cuda.synchronize)]
    for _ in range(5):
        found = chain(inputs, lambda: None)
        assert [int(differing(a, b).sum()) for a, b in zip(found, expected, strict=True)] == [0] * len(expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(inputs, lambda: None)
    for _ in range(5):
        graph.replay()
        assert [int(differing(a, b).sum()) for a, b in zip(found, expected, strict=True)] == [0] * len(expected)
        for t in found:
            t.fill_(float("nan"))


def test_padded_rows_may_hold_anything() -> None:
    """In a graph, as a decoder runs them: no fault, no hang, and no bit of the rows that count."""
    shape, rows, real, vocabulary = HeadShape(8, 4, 64), 16, 5, 5000
    n = (shape.heads + 2 * shape.kv_heads) * shape.dim
    rope = rope_of(shape.dim, 100)
    w, x = normal(n, seed=1), normal(rows, n, seed=2)
    logits = normal(rows, vocabulary, seed=3).float()
    positions = torch.arange(rows).cuda()
    slots = torch.arange(rows).cuda()
    keys, temperatures = torch.arange(rows).cuda() << 40, torch.ones(rows, device="cuda")

    def step(x, logits, positions, slots, keys, temperatures):
        pages = [torch.zeros(2, 16, shape.kv_heads, shape.dim, dtype=BF16, device="cuda") for _ in "kv"]
        h, y = add_rms_norm(x, x, w, EPS)
        q = qkv_into_cache(y, w[:64], w[64:128], rope, positions, shape, EPS, *pages, slots)
        tokens, logprobs, _ = sample_exact(logits, temperatures, keys, positions)
        return [h, y, q, swiglu(y), tokens, logprobs], pages

    clean, clean_pages = step(*(t[:real].contiguous() for t in (x, logits, positions, slots, keys, temperatures)))
    x[real:], logits[real:], temperatures[real:], slots[real:] = torch.nan, torch.nan, torch.nan, -1
    x[-1], logits[-1], logits[-2], temperatures[-1], temperatures[-2] = torch.inf, -torch.inf, torch.inf, 0, -1
    positions[real:] = torch.tensor([-1, 100, 2**40, -(2**62), 2**62, 0, -7, 5, 99, 101, 2**31], device="cuda")
    graph = torch.cuda.CUDAGraph()
    step(x, logits, positions, slots, keys, temperatures)
    with torch.cuda.graph(graph):
        padded, padded_pages = step(x, logits, positions, slots, keys, temperatures)
    graph.replay()
    torch.cuda.synchronize()
    assert not any(differing(a[:real], b).any() for a, b in zip(padded, clean, strict=True))
    assert not any(differing(a, b).any() for a, b in zip(padded_pages, clean_pages, strict=True))
    assert ((padded[4] >= -1) & (padded[4] < vocabulary)).all(), "an index past the embedding's end would be a fault"
