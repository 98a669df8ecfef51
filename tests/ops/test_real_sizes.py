"""Ops at the sizes of real models, where libraries and other frameworks changed bits with the batch (docs/cases.md).

Group B cases. All comparisons are of bit patterns; inputs are such that the order of a sum matters.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from exactrl.ops import head, linear, norm, swiglu
from exactrl.ops.cpu import logprob as logprob_kernels
from exactrl.ops.cpu.jit import flat
from exactrl.ops.qkv import HeadShape
from exactrl.ops.weight import Weight

from .helpers import CONTRACT, DTYPES, make_weight, same_bits
from .test_invariance import Pool, qkv_rows
from .test_sampling import sample

F32, BF16 = DTYPES


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def wide(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal values with a few a thousand times larger: sums of them depend on their order."""
    x = torch.randn(shape, generator=generator(seed))
    x[..., :: max(1, shape[-1] // 7)] *= 1000
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1024, 2560, 4096])
def test_B_01_rms_norm_crosses_256_rows(hidden, dtype):
    """A row alone and inside 4, 255, 256, 257 and 4096 rows, with the residual add and without it."""
    weight = make_weight((hidden,), dtype, generator(1), packed=False)
    h, x = wide((4096, hidden), dtype), wide((4096, hidden), dtype, 2)
    plain, (residual, added) = norm.rms_norm_exact(h, weight, 1e-6), norm.add_rms_norm_exact(h, x, weight, 1e-6)
    for rows in (1, 4, 255, 256, 257):
        for first in {0, 4096 - rows}:
            part = slice(first, first + rows)
            assert same_bits(norm.rms_norm_exact(h[part], weight, 1e-6), plain[part]), f"{rows} rows"
            got = norm.add_rms_norm_exact(h[part], x[part], weight, 1e-6)
            assert same_bits(got[0], residual[part]), f"{rows} rows"
            assert same_bits(got[1], added[part]), f"{rows} rows"
    order = norm.rms_norm_exact(h[:64].flip(1), replaced(weight, weight.rows().flip(0)), 1e-6).flip(1)
    assert dtype == BF16 or not same_bits(order, plain[:64])  # in fp32 the order of the sum shows


def replaced(weight: Weight, value: torch.Tensor) -> Weight:
    other = Weight(weight.shape, weight.dtype, trainable=False, packed=weight.packed)
    other.assign(value)
    return other


def test_A_31_rms_norm_rounds_in_one_place_on_both_sides():
    """bf16 [1, 1024], weights around 1: the product with the weight is rounded, what it is made of is not."""
    x = wide((1, 1024), BF16)
    trained = make_weight((1024,), BF16, generator(1), packed=False)
    rolled_out = replaced(trained, trained.rows())
    ours = norm.rms_norm_exact(x, rolled_out, 1e-6)
    with_gradient = norm.rms_norm_exact(x.clone().requires_grad_(), trained, 1e-6)
    assert with_gradient.requires_grad
    assert same_bits(ours, with_gradient)
    wide_x, w = x.double(), trained.rows().double()
    normed = wide_x / (wide_x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert same_bits(ours, (normed * w).to(BF16))  # a sum in fp64: 1,024 roundings to bf16 agree with it
    assert not same_bits(ours, (normed.to(BF16).double() * w).to(BF16))  # the fault
    assert not same_bits(
        norm.rms_norm_exact(x * 1e-3, rolled_out, 1e-6), norm.rms_norm_exact(x * 1e-3, rolled_out, 1e-2)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_B_06_attention_without_grouped_heads(dtype):
    """16 heads of 128, n_kv = n_q; the decode row's keys lie in one split (500) and in two (700): alone, in 8."""
    shape = HeadShape(16, 16, 128)
    for length in (500, 700):
        data = qkv_rows(length, shape, dtype, 5.0)
        alone = Pool([length], shape, dtype, seed=1)
        prefill = alone.step([data], [(0, 0, length)])[0]
        decoded = alone.step([data], [(0, length - 1, 1)])[0]
        assert same_bits(decoded, prefill[-1:])
        lengths = [length, 40, 513, 1, 512, 17, 64, 300]
        everyone = [data, *(qkv_rows(n, shape, dtype) for n in lengths[1:])]
        pool = Pool(lengths, shape, dtype, seed=2)
        pool.step(everyone, [(i, 0, n - 1) for i, n in enumerate(lengths) if n > 1])
        together = pool.step(everyone, [(i, n - 1, 1) for i, n in enumerate(lengths)])[0]
        assert same_bits(together[:1], decoded), f"{length} keys"
    assert CONTRACT.kv_split == 512


def rows_do_not_depend_on_m(k: int, n: int, dtype: torch.dtype, counts: tuple[int, ...]) -> None:
    weight = make_weight((n, k), dtype, generator(k), trainable=False)
    x = torch.randn(max(counts), k, generator=generator(1)).to(dtype)
    whole = linear.linear_exact(x, weight)
    for m in counts:
        assert same_bits(linear.linear_exact(x[:m], weight), whole[:m]), f"{k} x {n}, M = {m}"


@pytest.mark.parametrize(("k", "n"), [(1024, 3072), (3072, 1024), (2560, 9728), (9728, 2560)])
def test_B_15_one_row_is_no_special_case_of_linear(k, n):
    rows_do_not_depend_on_m(k, n, BF16, (1, 2, 3, 8, 64))


def test_B_16_fp32_linear():
    rows_do_not_depend_on_m(4096, 4096, F32, (1, 3, 128))


def test_B_17_swiglu_is_one_implementation():
    """Rollout has no gradient, training has: the same bits, 64 rows of 2 x 3072, whole and row by row."""
    gate_up = (torch.randn(64, 6144, generator=generator()) * 8).to(BF16)
    trained = swiglu.swiglu_exact(gate_up.clone().requires_grad_())
    assert trained.requires_grad
    rolled_out = swiglu.swiglu_exact(gate_up)
    assert same_bits(rolled_out, trained)
    assert same_bits(torch.cat([swiglu.swiglu_exact(row) for row in gate_up.split(1)]), trained)
    gate, up = gate_up.double().chunk(2, -1)
    exact = gate / (1 + (-gate).exp()) * up
    assert ((rolled_out.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-30).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_B_18_sampler_and_loss_agree_at_a_real_vocabulary(dtype):
    """Logits [4, 151936]: the eight likeliest ids of each row hold nearly all its mass, so all of them get sampled."""
    vocab, g = 151936, generator(3)
    logits = torch.randn(4, vocab, generator=g)
    top = torch.stack([torch.randperm(vocab, generator=g)[:8] for _ in range(4)])
    logits.scatter_(1, top, 15 + torch.rand(4, 8, generator=g))
    weight = Weight((vocab, 4), dtype, trainable=False, packed=True)
    weight.assign(logits.T)
    seen: dict[tuple[int, int], float] = {}
    index = torch.arange(4).repeat(40)
    hidden, temperatures = torch.eye(4, dtype=dtype)[index], torch.full((160,), 1.0)
    ids, recorded = head.sample_exact(hidden, weight, temperatures, torch.arange(160), torch.arange(160), CONTRACT)
    scored, _ = head.logprobs_exact(hidden, weight, ids, temperatures, CONTRACT)
    assert same_bits(recorded, scored)
    for row, token, lp in zip(index.tolist(), ids.tolist(), recorded, strict=True):
        seen[row, token] = lp
    for row in range(4):
        assert {int(t) for t in top[row]} <= {t for r, t in seen if r == row}
        targets = top[row]
        alone, _ = head.logprobs_exact(hidden[row : row + 1].expand(8, 4).contiguous(), weight, targets, torch.ones(8),
                                       CONTRACT)  # fmt: skip
        assert same_bits(alone, torch.stack([seen[row, int(t)] for t in targets]))


def outliers(vocab: int) -> torch.Tensor:
    """Head weights [vocab, 4]: one row in 500 is six times larger. With much larger ones a single logit would be all
    of the sum, and any order would give the same bits."""
    w = torch.randn(vocab, 4, generator=generator(vocab))
    w[torch.rand(vocab, generator=generator(1)) < 0.002] *= 6
    return w


@pytest.mark.parametrize("vocab", [40960, 151936])
def test_B_30_log_softmax_with_outliers(vocab):
    """10 rows alone and inside 2048 rows in random order."""
    weight = Weight((vocab, 4), F32, trainable=False, packed=True)
    weight.assign(outliers(vocab))
    hidden = torch.randn(2048, 4, generator=generator(5))
    targets = torch.randint(0, vocab, (2048,), generator=generator(6))
    order = torch.randperm(2048, generator=generator(7))
    ones = torch.ones(2048)
    together = torch.empty(2048)
    together[order] = head.logprobs_exact(hidden[order], weight, targets[order], ones, CONTRACT)[0]
    assert same_bits(head.logprobs_exact(hidden[:10], weight, targets[:10], ones[:10], CONTRACT)[0], together[:10])
    for i in range(10):
        one = slice(i, i + 1)
        assert same_bits(head.logprobs_exact(hidden[one], weight, targets[one], ones[:1], CONTRACT)[0], together[one])
    flipped = Weight((vocab, 4), F32, trainable=False, packed=True)
    flipped.assign(outliers(vocab).flip(0))
    backwards = head.logprobs_exact(hidden[:64], flipped, vocab - 1 - targets[:64], ones[:64], CONTRACT)[0]
    assert not same_bits(backwards, together[:64])  # the order of the sum shows in these inputs
    assert (backwards - together[:64]).abs().max() < 1e-4


PHANTOM = [-20.0, -21.0, -22.0, -23.0, -20.0]


@pytest.mark.parametrize("block", [4, 128])
def test_A_42_entries_beyond_the_vocabulary_do_not_count(block):
    """5 logits in blocks of 4, and in one block of 128; the phantom zeros would make the log-sum 1.098612."""
    logits, one = torch.tensor(PHANTOM), np.ones(1, np.float32)
    logprob, lse, entropy = (np.empty(n, np.float32) for n in (1, 2, 1))
    guarded = np.concatenate([flat(logits), np.zeros(27, np.float32)])  # zeros where a kernel that overruns would read
    args = (guarded[:5], np.array([0]), one, logprob, lse, entropy, 5, block)
    logprob_kernels.logprob_range(0, 1, 1, *args)
    assert abs(float(lse.astype(np.float64).sum()) - -19.062730) < 2e-6
    assert abs(float(logprob[0]) - -0.937270) < 2e-6
    weight = make_weight((5, 1), F32, generator())
    weight.assign(logits[:, None])
    contract = replace(CONTRACT, vocab_block=block)
    scored, _ = head.logprobs_exact(torch.ones(5, 1), weight, torch.arange(5), torch.ones(5), contract)
    assert same_bits(scored[:1].detach(), torch.from_numpy(logprob))
    drawn = torch.arange(200)
    ids, recorded = head.sample_exact(torch.ones(200, 1), weight, torch.ones(200), drawn, drawn, contract)
    assert set(ids.tolist()) == set(range(5))
    assert same_bits(recorded, scored.detach()[ids])


def test_A_15_the_recorded_logprob_is_the_sampled_ids_own():
    """ln p is -0.25 at id 91 and -1.75 at id 4407; where 4407 is drawn, -1.75 is recorded."""
    vocab = 4500
    left = 1 - np.exp(-0.25) - np.exp(-1.75)
    logits = np.full(vocab, np.log(left / (vocab - 2)))
    logits[[91, 4407]] = -0.25, -1.75
    ids, recorded = sample(np.tile(logits, (50, 1)), torch.ones(50), np.arange(50), torch.arange(50))
    expected = torch.from_numpy(logits)[ids]
    assert {91, 4407} <= set(ids.tolist())
    assert (recorded.double() - expected).abs().max() < 1e-5
