"""Exactness off on a GPU, as far as a machine without one can tell: what is called, with which arguments.

Flash Attention 3 is played by plain torch here: it reads pages, lengths and starts as the real one does, so that a
wrong argument gives wrong attention.
"""

from __future__ import annotations

from tests.ops.cuda import interpreter  # isort: skip  # noqa: F401 - sets up Triton before it is imported

import sys
from dataclasses import fields, replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from exactrl.algo.algorithm import get_algorithm
from exactrl.contract import AttentionShape, get_contract, noise_key
from exactrl.engine.engine import Engine
from exactrl.errors import ExactRLError
from exactrl.launch.device import make_ops
from exactrl.model.config import find_model, read_config
from exactrl.model.qwen3 import Qwen3
from exactrl.model.weights import load_weights, random_weights
from exactrl.ops.cuda import linear, plain
from exactrl.ops.cuda.attention import AttentionChoice, AttentionRows, attention_implementations
from exactrl.ops.cuda.binding import CudaOps, CudaRows
from exactrl.ops.cuda.plain import PlainOps, our_attention
from exactrl.ops.qkv import HeadShape
from exactrl.parity.subject import to_samples
from exactrl.train.trainer import Trainer
from exactrl.types import Request, SamplingParams
from tests.gpu.attention_inputs import draw

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy names every NaN that a mask drops
CONTRACT, DIM, PAGE = get_contract("exact-v1"), 64, 64
REFERENCE = attention_implementations()["reference"]
LENGTHS = (1, 17, 65)


class Fa3:
    """flash_attn_interface, the two functions and the arguments that are used. `metadata`: numbers of calls."""

    def __init__(self) -> None:
        self.scheduled = 0
        self.metadata_given: list[int | None] = []

    def get_scheduler_metadata(
        self, batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, *, page_size,
        causal, num_splits,
    ):  # fmt: skip
        assert (batch_size, max_seqlen_q, num_heads_q, num_heads_kv, headdim) == (len(cache_seqlens), 1, 4, 2, DIM)
        assert (page_size, causal, num_splits) == (PAGE, True, 0)
        assert max_seqlen_k >= int(cache_seqlens.max())
        self.scheduled += 1
        return torch.tensor([self.scheduled], dtype=torch.int32)

    def flash_attn_with_kvcache(
        self, q, k, v, *, cache_seqlens, page_table, causal, num_splits, cu_seqlens_q=None, max_seqlen_q=None,
        scheduler_metadata=None,
    ):  # fmt: skip
        assert (causal, num_splits) == (True, 0)
        self.metadata_given.append(None if scheduler_metadata is None else int(scheduler_metadata))
        if cu_seqlens_q is None:
            rows = list(q)
        else:
            rows = [q[a:b] for a, b in pairwise(cu_seqlens_q)]
            assert max_seqlen_q == max(len(x) for x in rows)
        outs = []
        for x, table, n in zip(rows, page_table, cache_seqlens.tolist(), strict=True):
            pages = table[: -(-n // PAGE)].long()
            outs.append(self._attend(x, *(c[pages].flatten(0, 1)[:n] for c in (k, v))))
        return torch.stack(outs) if cu_seqlens_q is None else torch.cat(outs)

    def flash_attn_varlen_func(self, q, k, v, starts_q, starts_k, most_q, most_k, *, causal, return_attn_probs):
        assert causal
        assert return_attn_probs
        assert most_q == most_k == int(starts_q.diff().max())
        cut = [slice(a, b) for a, b in pairwise(starts_q.tolist())]
        lse = torch.cat([self._lse(q[c], k[c]) for c in cut], 1)
        return torch.cat([self._attend(q[c], k[c], v[c]) for c in cut]), lse

    def _lse(self, q, k):
        """float32 [H, T], natural logarithm."""
        keys = k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = torch.einsum("thd,shd->hts", q.float(), keys) * q.shape[2] ** -0.5
        return scores.masked_fill(~torch.ones(len(q), len(k), dtype=torch.bool).tril(), -torch.inf).logsumexp(2)

    def _attend(self, q, k, v):
        """Causal at the lower right corner."""
        visible = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q, k, v = (x.transpose(0, 1).float() for x in (q, k, v))
        out = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=visible, enable_gqa=True)
        return out[0].transpose(0, 1).half()


@pytest.fixture
def fa3(monkeypatch) -> Fa3:
    played = Fa3()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", played)  # type: ignore[arg-type]
    return played


def ops(with_fa3: bool) -> CudaOps:
    choice = AttentionChoice(REFERENCE, REFERENCE, 0)
    if with_fa3:
        return PlainOps(CONTRACT, linear.linear_plain, lambda shape: choice, torch.device("cpu"), fa3=True)
    return CudaOps(CONTRACT, linear.linear_plain, lambda shape: choice, torch.device("cpu"))


def rows_of(attention: AttentionRows) -> CudaRows:
    return CudaRows(attention, None, np.array([]), np.array([]))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a.float() - b.float()).abs().max() < 5e-3)


@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 9, 65), (0, 1, 1)])
def test_flash_attention_reads_pages_as_our_kernels_do(fa3, counts) -> None:
    data = draw(list(LENGTHS), 4, 2, DIM, PAGE, 1.0, 0, "cpu", torch.float16)
    ends = np.cumsum(LENGTHS)
    q = torch.cat([data.q[e - c : e] for e, c in zip(ends, counts, strict=True)])
    rows = rows_of(AttentionRows.build(np.array(counts), np.array(LENGTHS), data.tables, "cpu"))
    pages = (data.k_pages, data.v_pages)
    found = ops(True).paged_attention(q, rows, pages)
    assert fa3.metadata_given == [1 if set(counts) == {1} else None]
    assert found.shape == q.shape
    assert close(found, ops(False).paged_attention(q, rows, pages))


def test_the_schedule_is_made_once_a_step_and_again_where_it_was(fa3) -> None:
    data = draw(list(LENGTHS), 4, 2, DIM, PAGE, 1.0, 0, "cpu", torch.float16)
    rows = rows_of(AttentionRows.build(np.ones(3, np.int64), np.array(LENGTHS), data.tables, "cpu"))
    q = data.q[np.cumsum(LENGTHS) - 1]
    for _ in range(3):
        ops(True).paged_attention(q, rows, (data.k_pages, data.v_pages))
    (plan,) = rows.attention.plans.values()
    place = plan.metadata.data_ptr()
    rows.attention.refresh()
    ops(True).paged_attention(q, rows, (data.k_pages, data.v_pages))
    assert fa3.metadata_given == [1, 1, 1, 2]
    assert plan.metadata.data_ptr() == place, "a captured graph reads the old place"


def test_packed_sequences_and_what_their_gradient_is_made_of(fa3, monkeypatch) -> None:
    data = draw(list(LENGTHS), 4, 2, DIM, PAGE, 1.0, 0, "cpu", torch.float16)
    rows, expected_lse = rows_of(data.packed()), torch.empty(4, len(data.q))
    REFERENCE.attend(data.q, data.k, data.v, rows.attention, torch.empty_like(data.q), expected_lse, np.arange(3))
    expected = ops(False).packed_attention(data.q, data.k, data.v, rows)

    def backward(d_out, q, k, v, out, lse, given_rows, *, deterministic):
        assert (given_rows, deterministic) == (rows.attention, False)
        assert all(torch.equal(a, b) for a, b in zip((q, k, v), (data.q, data.k, data.v), strict=True))
        assert close(out, expected)
        assert close(lse, expected_lse)
        return d_out, k * 2, v * 3

    monkeypatch.setattr(plain, "packed_backward", backward)
    inputs = [x.clone().requires_grad_() for x in (data.q, data.k, data.v)]
    found = ops(True).packed_attention(*inputs, rows)
    assert close(found, expected)
    found.backward(data.q)
    for x, gradient in zip(inputs, (data.q, data.k * 2, data.v * 3), strict=True):
        assert torch.equal(x.grad, gradient)


CONFIG = replace(
    read_config(find_model("tiny")), num_layers=1, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2,
    head_dim=DIM, vocab_size=80,
)  # fmt: skip


def test_engine_and_trainer_run_and_come_close_to_the_kernels_of_exactness(fa3) -> None:
    """Chunks beside decoding, then the trainer on the same tokens in both modes. numpy's product plays cuBLAS."""

    def product(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype, leaves: int = 1) -> torch.Tensor:
        return (x.float() @ w.float().T).to(out_dtype)

    def model(mode: CudaOps, *, trainable: bool) -> Qwen3:
        made = Qwen3(CONFIG, replace(mode, product=product), torch.float16, trainable=trainable)
        load_weights(made, random_weights(CONFIG, 0, embed=0.3), "random weights")
        return made

    requests = [
        Request(f"r{n}", tuple(range(n)), SamplingParams(3, 1.0, ()), noise_key(0, "test", 0, 0, f"r{n}", 0))
        for n in (3, 67)
    ]
    engine = Engine(model(ops(True), trainable=False), max_concurrent=2, kv_tokens=320, chunk_tokens=40)
    completions = engine.generate(requests)
    assert {None, 1} <= set(fa3.metadata_given), "mixed batches and decode batches"
    scored = {
        with_fa3: Trainer(model(ops(with_fa3), trainable=True), get_algorithm("grpo"), lr=1e-3).score(
            to_samples(requests, completions)
        )
        for with_fa3 in (True, False)
    }
    for with_fa3, found in scored.items():
        for a, c in zip(found, completions, strict=True):
            assert np.abs(a - c.logprobs).max() < 0.02, with_fa3
    assert min(np.abs(np.concatenate(scored[False])).tolist()) > 0.01, "a model that is sure shows nothing"


def test_a_head_dimension_that_flash_attention_does_not_know_goes_to_our_kernels(fa3) -> None:
    data = draw([5], 4, 2, 16, PAGE, 1.0, 0, "cpu", torch.float16)
    rows = rows_of(data.packed())
    found, expected = (ops(x).packed_attention(data.q, data.k, data.v, rows) for x in (True, False))
    assert torch.equal(found, expected)


def test_decode_steps_are_captured_wherever_attention_finds_its_work_on_the_device(fa3) -> None:
    """The choice that both have here walks splits in order, which needs the host's lengths."""
    known, unknown = HeadShape(4, 2, 64), HeadShape(4, 2, 16)
    assert [ops(True).decodes_in_graphs(s) for s in (known, unknown)] == [True, False]
    assert not ops(False).decodes_in_graphs(known)


@pytest.mark.parametrize(
    ("name", "counts", "keys", "ours"),
    [
        ("cuda-decode:x", (1, 1, 1), 20000, True),
        ("cuda-decode:x", (1,), 16384, True),
        ("cuda-decode:x", (1,), 16385, False),  # one long sequence alone
        ("cuda-decode:x", (1, 2, 1), 100, False),
        ("triton-split:x", (1, 1, 1), 100, False),
        ("cuda-decode:wide", (1, 1, 1), 100, False),  # more grouped heads than the kernel holds
    ],
)
def test_decode_steps_go_to_our_compiled_kernels_where_they_are_faster(fa3, name, counts, keys, ours) -> None:
    called = []

    def attend(q, k, v, rows, out, lse, sequences):
        called.append(name)

    split = replace(REFERENCE, name=name, kind="split", attend=attend)
    choice = AttentionChoice(split, split, 1 if name.endswith("wide") else 8)
    mode = PlainOps(CONTRACT, linear.linear_plain, lambda shape: choice, torch.device("cpu"), fa3=True)
    data = draw([5] * len(counts), 4, 2, DIM, PAGE, 1.0, 0, "cpu", torch.float16)
    bounds = np.full(len(counts), keys)
    lengths = np.full(len(counts), 5)
    rows = rows_of(AttentionRows.build(np.array(counts), lengths, data.tables, "cpu", most_keys=bounds))
    mode.paged_attention(data.q[: sum(counts)], rows, (data.k_pages, data.v_pages))
    assert (called == [name], bool(fa3.metadata_given)) == (ours, not ours)


def test_our_kernels_are_taken_fastest_first() -> None:
    """The one for few splits and many before those for either, compiled ones before Triton's; what does not serve is
    left out."""
    offered = attention_implementations()
    names = ("cuda-split", "cuda-stream", "cuda-decode", "hopper")
    more = {n: SimpleNamespace(name=n, serves=lambda s: s.dim == 128, most_rows=8) for n in names}
    every = {**offered, **more}
    found = our_attention(AttentionShape(32, 8, 128, 64), every)  # type: ignore[arg-type]
    assert (found.split.name, found.in_order.name, found.split_rows) == ("cuda-decode", "hopper", 8)
    found = our_attention(AttentionShape(32, 8, 64, 64), every)  # type: ignore[arg-type]
    kinds = (found.split.name.split(":")[0], found.in_order.name.split(":")[0])
    assert kinds == ("triton-split", "triton-in-order")
    packed = our_attention(AttentionShape(32, 8, 64), every)  # type: ignore[arg-type]
    assert (packed.split_rows, packed.split) == (0, packed.in_order)


def test_library_sums_are_as_torch_has_them_and_only_during_the_call(monkeypatch) -> None:
    settings, seen = torch.backends.cuda.matmul, []

    def product(x, w, out_dtype):
        seen.append(settings.allow_bf16_reduced_precision_reduction)
        if x is None:
            raise ValueError("broken")
        return x

    monkeypatch.setattr(linear, "cublas", product)
    before = settings.allow_bf16_reduced_precision_reduction
    try:
        for setting in (False, True):
            settings.allow_bf16_reduced_precision_reduction = setting
            linear.linear_plain(torch.zeros(1), torch.zeros(1), torch.float32, 4)
            with pytest.raises(ValueError, match="broken"):
                linear.linear_plain(None, torch.zeros(1), torch.float32)  # type: ignore[arg-type]
            assert settings.allow_bf16_reduced_precision_reduction == setting
    finally:
        settings.allow_bf16_reduced_precision_reduction = before
    assert [bool(x) for x in seen] == [True] * 4


def test_what_is_not_overridden_is_the_exact_modes() -> None:
    """A method of CudaOps that reads linears or attention in a new way has to be thought of here."""
    own = {name for name in vars(PlainOps) if callable(getattr(PlainOps, name)) and not name.startswith("__")}
    assert own == {"paged_attention", "packed_attention", "decodes_in_graphs", "_fa3_serves", "_ours_is_faster"}
    assert {f.name for f in fields(PlainOps)} - {f.name for f in fields(CudaOps)} == {"fa3"}
    assert not PlainOps.exact
    assert CudaOps.exact


def test_without_a_gpu_the_device_is_refused_not_the_mode() -> None:
    with pytest.raises(ExactRLError, match="device cuda needs a GPU"):
        make_ops("cuda", CONTRACT, False, "bfloat16", read_config(find_model("tiny")))
