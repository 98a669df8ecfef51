"""Noise and sampling: Philox against published vectors, the distribution, ties, greedy, NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exactrl.contract import noise_key
from exactrl.ops import head
from exactrl.ops.cpu import jit
from exactrl.ops.cpu import logprob as kernels
from exactrl.ops.transfer import key_bits

from . import definition
from .helpers import CONTRACT, DTYPES, make_weight, same_bits

philox = kernels.philox


@jit.kernel
def philox_words(key, c0, c1, out):
    r = philox(key, c0, c1)
    for i in range(4):
        out[i] = r[i]


def sample(logits, temperatures, keys, positions):
    """Rows of given logits: hidden states are unit vectors, the weight holds the logits."""
    logits, index = torch.as_tensor(logits, dtype=torch.float32).unique(dim=0, return_inverse=True)
    weight = make_weight(logits.shape[::-1], torch.float32, torch.Generator())
    weight.assign(logits.T)
    hidden = torch.eye(len(logits))[index]
    return head.sample_exact(hidden, weight, temperatures, key_bits(keys), positions, CONTRACT)


def one(logits, temperature=1.0, key=1):
    """Sampling straight from one row of logits."""
    tokens, logprobs = np.empty(1, np.int64), np.empty(1, np.float32)
    row, t, k, position = np.float32(logits), np.float32([temperature]), np.uint64([key]), np.int64([5])
    kernels.sample_range(0, 1, 1, row, t, k, position, tokens, logprobs, len(row), CONTRACT.vocab_block)
    return int(tokens[0]), logprobs[0]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_reference_philox_gives_the_published_vectors(counter, key, words):
    """Known answers of Random123 (kat_vectors, philox4x32 with 10 rounds)."""
    assert " ".join(f"{int(w):08x}" for w in definition.philox(counter, key)) == words


def test_philox_kernel():
    rng = np.random.default_rng(0)
    keys = [0, 2**64 - 1, *(int(x) for x in rng.integers(0, 2**64, 200, np.uint64))]
    for key in keys:
        for c0, c1 in ((0, 0), (2**32 - 1, 2**32 - 1), tuple(int(x) for x in rng.integers(0, 2**32, 2))):
            out = np.empty(4, np.uint64)
            philox_words(np.uint64(key), c0, c1, out)
            expected = definition.philox((c0, c1, 0, 0), (key & 0xFFFFFFFF, key >> 32))
            assert out.tolist() == [int(w) for w in expected]


def test_uniforms():
    for key, position, vocab in ((0, 0, 4), (1, 0, 5), (2**64 - 1, 2**31, 1001), (12345 << 40, 7, 130)):
        assert (head.gumbel_uniforms(key, position, vocab) == definition.uniforms(key, position, vocab)).all()
    u = head.gumbel_uniforms(99, 3, 1 << 20).astype(np.float64)
    assert u.min() > 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 5 * (1 / 12 / u.size) ** 0.5
    assert abs(u.var() - 1 / 12) < 5 * (1 / 180 / u.size) ** 0.5
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 5e-3
    extremes = (np.uint32([0, 2**32 - 1]) >> 9).astype(np.float32)
    ends = (extremes + np.float32(0.5)) * np.float32(2.0**-23)
    assert ends.tolist() == [2.0**-24, 1 - 2.0**-24]
    noise = -definition.log(-definition.log(ends))
    assert np.isfinite(noise).all()
    assert np.abs(noise - -np.log(-np.log(ends.astype(np.float64)))).max() < 2e-6


def test_keys_and_positions_give_other_noise():
    parts = (0, "train", 0, 0, "row", 0)
    others = [(1, *parts[1:]), (0, "eval", *parts[2:]), (0, "train", 1, 0, "row", 0), (0, "train", 0, 1, "row", 0),
              (0, "train", 0, 0, "row2", 0), (0, "train", 0, 0, "row", 1)]  # fmt: skip
    draws = [head.gumbel_uniforms(noise_key(*p), 0, 64) for p in (parts, *others)]
    draws += [head.gumbel_uniforms(noise_key(*parts), p, 64) for p in (1, 2)]
    for i, a in enumerate(draws):
        assert all((a != b).mean() > 0.9 for b in draws[:i])


@pytest.mark.parametrize("by", ["key", "position"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_distribution(by, temperature):
    n = 20000
    logits = np.float32([1.0, 0.0, -1.0, 0.5, -2.0, 0.0, -4.0])
    p = np.exp(logits / temperature, dtype=np.float64)
    p /= p.sum()
    keys = np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) if by == "key" else np.full(n, 7, np.uint64)
    positions = torch.arange(n) if by == "position" else torch.zeros(n, dtype=torch.int64)
    tokens, logprobs = sample(np.tile(logits, (n, 1)), torch.full((n,), temperature), keys, positions)
    counts = np.bincount(tokens, minlength=len(p))
    chi_square = ((counts - n * p) ** 2 / (n * p)).sum()
    assert chi_square < 27.9, f"{counts} for {n * p}"  # 6 degrees of freedom: 1 in 10,000
    assert np.abs(np.exp(logprobs.double().numpy()) - p[tokens]).max() < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_sampler_and_loss_report_one_logprob(dtype):
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(65, 40, generator=g).to(dtype), make_weight((300, 40), dtype, g)
    temperatures = torch.rand(65, generator=g) + 0.3
    temperatures[:9] = 0
    tokens, logprobs = head.sample_exact(hidden, weight, temperatures, torch.arange(65), torch.arange(65), CONTRACT)
    at_one = torch.where(temperatures == 0, 1.0, temperatures)
    assert same_bits(logprobs, head.logprobs_exact(hidden, weight, tokens, at_one, CONTRACT)[0])
    logits = hidden[:9].double() @ weight.rows().double().T
    assert (tokens[:9] == logits.argmax(1)).all()


def test_plain_sampler_has_the_same_noise():
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(200, 40, generator=g), make_weight((97, 40), torch.float32, g)
    args = (hidden, weight, torch.arange(200) % 3 * 0.5, torch.arange(200), torch.arange(200))
    exact, plain = head.sample_exact(*args, CONTRACT), head.sample_plain(*args)
    assert (exact[0] == plain[0]).float().mean() > 0.98
    assert (exact[1] - plain[1])[exact[0] == plain[0]].abs().max() < 1e-4


def test_ties_take_the_lowest_index():
    assert one([0.0, 3.0, 1.0, 3.0, 3.0], temperature=0)[0] == 1
    assert one([-0.0, 0.0], temperature=0)[0] == 0
    for key in range(50):  # noise is lost beside 1e30: equal sums
        assert one([0.0] * 20 + [1e30, 1e30] + [0.0] * 20 + [1e30], key=key)[0] == 20


def test_greedy_reports_temperature_one():
    token, logprob = one([0.0, 2.0, 1.0], temperature=0)
    assert token == 1
    assert logprob == pytest.approx(-np.log(1 + np.exp(-1) + np.exp(-2)), abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("n", [3, 200])
def test_no_plausible_logprob_from_bad_logits(temperature, n):
    base = np.linspace(-1, 1, n)
    for at in (0, 1, n - 1):
        for bad in (np.nan, np.inf):
            logits = base.copy()
            logits[at] = bad
            assert np.isnan(one(logits, temperature)[1]), f"{bad} at {at}"
    for dead in (np.nan, -np.inf):
        token, logprob = one(np.full(n, dead), temperature)
        assert token == -1
        assert np.isnan(logprob)
    logits = base.copy()
    logits[1] = -np.inf  # a legal logit: never sampled, the others keep their logprobs
    token, logprob = one(logits, temperature)
    assert token != 1
    assert np.isfinite(logprob)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_loss_side_keeps_nan(bad):
    weight = make_weight((200, 1), torch.float32, torch.Generator())
    values = torch.linspace(-1, 1, 200)[:, None].clone()
    values[150] = bad
    weight.assign(values)
    ones = torch.ones(2, 1)
    logprobs, _ = head.logprobs_exact(ones, weight, torch.tensor([3, 150]), torch.ones(2), CONTRACT)
    if bad == -np.inf:
        assert bool(logprobs[0].isfinite())
        assert logprobs[1] == -np.inf
    else:
        assert bool(logprobs.isnan().all())
