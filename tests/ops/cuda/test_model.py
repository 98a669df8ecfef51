"""The GPU's engine and trainer in Triton's interpreter: the same kernels, rows, pages and cache, on a tiny model.

float16, see test_triton_matmul.py; numpy's matrix product is no canonical one, so that linears are written out here.
"""

from __future__ import annotations

from tests.ops.cuda import interpreter  # isort: skip  # noqa: F401 - sets up Triton before it is imported

import functools
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from exactrl.algo.algorithm import get_algorithm
from exactrl.contract import get_contract, noise_key
from exactrl.engine import piecewise_graphs
from exactrl.engine.decode_graphs import DecodeGraphs
from exactrl.engine.engine import Engine
from exactrl.engine.piecewise_graphs import PiecewiseGraphs
from exactrl.model.attention_state import paged_state
from exactrl.model.config import find_model, read_config
from exactrl.model.qwen3 import Qwen3
from exactrl.model.weights import load_weights, random_weights
from exactrl.ops.cuda import binding
from exactrl.ops.cuda.attention import AttentionChoice, attention_implementations
from exactrl.ops.cuda.binding import CudaOps
from exactrl.parity import check as ladder
from exactrl.parity.subject import Subject, to_samples
from exactrl.train.trainer import Trainer
from exactrl.types import Completion, Request, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy names every NaN that a mask drops
FOUND = attention_implementations()
CHOICE = AttentionChoice(FOUND["triton-split:16-w4-s5-c3"], FOUND["reference"], 16)
CONFIG = replace(
    read_config(find_model("tiny")), num_layers=1, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2,
    head_dim=16, vocab_size=80,
)  # fmt: skip
PROMPTS = (3, 67)


def product(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype, leaves: int = 1) -> torch.Tensor:
    y = torch.zeros(len(x), len(w))
    for k in range(x.shape[1]):
        y += x[:, k : k + 1].float() * w[:, k].float()
    return y.to(out_dtype)


OPS = CudaOps(get_contract("exact-v1", residual_dtype="float32"), product, lambda shape: CHOICE, torch.device("cpu"))


def model(*, trainable: bool) -> Qwen3:
    made = Qwen3(CONFIG, OPS, torch.float16, trainable=trainable)
    load_weights(made, random_weights(CONFIG, 0, embed=0.3), "random weights")
    return made


def requests() -> list[Request]:
    generator = np.random.default_rng(0)
    return [
        Request(
            f"r{i}", tuple(generator.integers(0, CONFIG.vocab_size, n).tolist()), SamplingParams(3, 1.0, ()),
            noise_key(0, "test", 0, 0, f"r{i}", 0),
        )
        for i, n in enumerate(PROMPTS)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def completions() -> list[Completion]:
    """Prefill in chunks of 40 beside decoding, pages that hold NaN before."""
    engine = Engine(model(trainable=False), max_concurrent=2, kv_tokens=320, chunk_tokens=40)
    engine.cache.fill(float("nan"))
    return engine.generate(requests())


def test_the_trainer_finds_the_engines_logprobs(completions) -> None:
    samples = to_samples(requests(), completions)
    scored = Trainer(model(trainable=True), get_algorithm("grpo"), lr=1e-3).score(samples)
    assert min(len(x) for x in scored) == 3
    assert max(x.max() for x in scored) < -0.01, "a model that is sure of everything shows nothing"
    assert [x.tobytes() for x in scored] == [c.logprobs.tobytes() for c in completions]


def test_one_ulp_in_a_norm_is_found(completions) -> None:
    samples = to_samples(requests(), completions)
    trainer = Trainer(model(trainable=True), get_algorithm("grpo"), lr=1e-3)

    def see(name: str, x: torch.Tensor) -> torch.Tensor:
        if name == "layers.0.post_norm":
            x = x.clone()
            x.view(torch.int16)[:, 5] += 1
        return x

    trainer.see = see
    assert [x.tobytes() for x in trainer.score(samples)] != [c.logprobs.tobytes() for c in completions]


def test_what_a_probe_sees_and_what_attention_reads_are_the_same() -> None:
    """The fused kernel writes k and v into the cache; a probe reads them from there and may replace them."""
    made = model(trainable=False)
    made.reserve_positions(8)
    rows = OPS.rows(np.array([0, 5]), np.array([0]), np.array([[1]], np.int32), made.shape)
    outs = []
    for seen in (False, True):
        state = paged_state(OPS, 1, 2, made.shape, torch.float16)
        state.fill(float("nan"))
        state.rows = rows
        x = torch.linspace(-1, 1, 5 * 8 * 16).view(5, 128).half()
        layer = made.layers[0]
        arguments = (layer.q_norm, layer.k_norm, made.rope, torch.arange(5), made.shape, 1e-6)
        q, k, v = state.qkv(0, x, arguments, seen)
        assert (k is None, v is None) == (not seen, not seen)
        outs.append(state.attend(0, q, k, v))
        if seen:
            packed = OPS.qkv(x, *arguments)
            assert torch.equal(k, packed[1])
            assert torch.equal(v, packed[2])
            assert not torch.equal(state.attend(0, q, k, v.roll(1, 0)), outs[0])
    assert torch.equal(*outs)


@pytest.mark.parametrize("ulps", [0, 1])
def test_the_rung_of_the_references_compares_with_them(monkeypatch, ulps: int) -> None:
    def other(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype, leaves: int = 1) -> torch.Tensor:
        y = product(x, w, out_dtype, leaves)
        if out_dtype == torch.float16:
            y.view(torch.int16)[:, 3] += ulps
        return y

    rollout = model(trainable=False)
    monkeypatch.setattr(Subject, "requests", requests()[:1])
    monkeypatch.setattr(binding, "with_references", lambda ops: replace(ops, product=other))
    subject = Subject(rollout, lambda **limits: Engine(rollout, kv_tokens=320), None, None, "float16", 0)
    (result,) = ladder.check([subject], ["reference_kernels"], lambda result: None)
    assert (result.status, result.compared) == (("pass", "fail")[ulps], 3)
    assert rollout.ops is OPS


class Replays:
    """A Capture that runs everything anew: a piece goes on where the one before it was cut, in a thread of its own."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, run):
        cuts: list[int] = []
        run(lambda: cuts.append(1))
        go, done = threading.Semaphore(0), threading.Semaphore(0)

        def whole() -> None:
            def cut() -> None:
                done.release()
                go.acquire()

            with torch.no_grad():  # a thread's own setting
                run(cut)
            done.release()

        def piece(i: int) -> None:
            self.count += 1
            if i:
                go.release()
            else:
                threading.Thread(target=whole, daemon=True).start()
            assert done.acquire(timeout=120)

        return [partial(piece, i) for i in range(len(cuts) + 1)]


def more_requests() -> list[Request]:
    more = [*requests(), *(replace(r, id=f"{r.id}b", noise_key=r.noise_key + 1) for r in requests()[::-1])]
    return [replace(r, params=SamplingParams(n, 1.0, ())) for r, n in zip(more, (5, 3, 6, 8), strict=True)]


def bits(completions: list[Completion]) -> list[tuple[list[int], bytes]]:
    return [(c.token_ids, c.logprobs.tobytes()) for c in completions]


@functools.cache
def without_graphs() -> list[Completion]:
    return Engine(model(trainable=False), kv_tokens=640).generate(more_requests())


@pytest.mark.parametrize("kv_tokens", [640, 192])
def test_decode_steps_with_padded_rows_have_the_same_bits(completions, kv_tokens: int) -> None:
    """What a graph replays, here run anew each time: rows rounded up, inputs in place, tokens handed on unseen."""
    more, expected = more_requests(), without_graphs()
    assert [c.logprobs.tobytes()[:12] for c in expected[:2]] == [c.logprobs.tobytes()[:12] for c in completions]
    engine = Engine(model(trainable=False), max_concurrent=5, kv_tokens=kv_tokens, chunk_tokens=40, overlap=True)
    capture, limit = Replays(), CONFIG.max_positions
    graphs = DecodeGraphs(engine.model, engine.cache, engine.runner.results, limit, capture)
    engine.runner.graphs = graphs
    engine.cache.fill(float("nan"))
    engine.generate(more[:1])  # needs less of the workspace than what follows, which drops its graph
    assert graphs.num_captured == 1
    assert bits(engine.generate(more)) == bits(expected)
    assert capture.count > 2
    plans = [p for g in graphs._graphs.values() for p in g.held[0].attention.plans.values() if hasattr(p, "partial")]
    assert len(plans) == graphs.num_captured > 0
    assert {p.partial.data_ptr() for p in plans} == {graphs._workspace.floats.data_ptr()}, "one for all, no older one"
    assert (engine.stats.peak_running < len(more)) == (kv_tokens == 192), "with few pages sequences wait"


def two_layers() -> Engine:
    two = replace(CONFIG, num_layers=2)
    found = Qwen3(two, OPS, torch.float16, trainable=False)
    load_weights(found, random_weights(two, 0, embed=0.3), "random weights")
    return Engine(found, kv_tokens=320, chunk_tokens=36, overlap=True)


def two_requests() -> list[Request]:
    return [replace(r, params=SamplingParams(n, 1.0, ())) for r, n in zip(requests(), (4, 2), strict=True)]


@functools.cache
def op_by_op() -> list[tuple[list[int], bytes]]:
    """In the same chunks: numpy's products in attention depend on them."""
    return bits(two_layers().generate(two_requests()))


@pytest.mark.parametrize("most", [2048, 16])
def test_steps_with_prompts_in_pieces_have_the_same_bits(monkeypatch, most: int) -> None:
    """Chunks beside decoding, tokens rounded up; steps of more than `most` tokens run op by op."""
    asked, engine, capture, expected = two_requests(), two_layers(), Replays(), op_by_op()
    monkeypatch.setattr(piecewise_graphs, "MOST_TOKENS", most)
    pieces = PiecewiseGraphs(engine.model, engine.cache, CONFIG.max_positions, capture)
    engine.runner.pieces = pieces
    engine.cache.fill(float("nan"))
    assert bits(engine.generate(asked)) == expected
    steps, every = divmod(capture.count, 3)
    assert every == 0, "two layers are three pieces"
    assert steps == (engine.stats.steps if most == 2048 else engine.stats.steps - 2)
    assert 1 <= pieces.num_captured <= steps
    if most == 16:
        engine.see = lambda name, x: x
        assert bits(engine.generate(asked)) == expected
        assert capture.count == 3 * steps, "a probe sees every op"
