"""Sampling in Triton's interpreter: the CPU's uniform numbers, the definition's token, the loss's logprob."""

from __future__ import annotations

from tests.ops.cuda import interpreter  # isort: skip  # noqa: F401 - sets up Triton before it is imported

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from exactrl.ops.cuda import triton_logprob as kernels
from exactrl.ops.cuda.sampling import sample_exact
from exactrl.ops.cuda.triton_noise import gumbel_bound, uniform_rows
from exactrl.ops.head import gumbel_uniforms
from exactrl.ops.transfer import key_bits
from tests.ops.cuda import head_definition as definition
from tests.ops.cuda.test_triton_head import logits_of, run, same, temperatures_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
KEYS = np.array([0, 1, 2**32, 2**63 + 12345, 2**64 - 1], np.uint64)
POSITIONS = torch.tensor([0, 1, 511, 40000, 2**31 - 1])


@pytest.mark.parametrize("vocab", [1, 6, 1024, 4099])
def test_uniform_numbers_are_the_cpu_s(vocab: int) -> None:
    u = uniform_rows(key_bits(KEYS), POSITIONS, vocab)
    for row, key, position in zip(u, KEYS, POSITIONS, strict=True):
        assert same(row, gumbel_uniforms(int(key), int(position), vocab))


@triton.jit
def _bounds(out, COUNT: tl.constexpr):
    words = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    bound = gumbel_bound(words.to(tl.uint32))
    tl.store(out + words, tl.zeros((COUNT,), tl.float32) + bound)  # the interpreter took it for a constant


def test_the_bound_of_every_number_of_noise() -> None:
    """All 2^23 of them; the logarithms of a GPU are off by less than the margin asked for here."""
    out = torch.empty(1 << 23)
    _bounds[(8,)](out, 1 << 20)
    u = (np.arange(1 << 23) + 0.5) * 2.0**-23
    slack = out.double().numpy() + np.log(-np.log(u))
    assert slack.min() > 3e-5
    assert slack[u > 0.9].max() < 0.11, "as good as none"


def test_both_ways_to_the_best_entry_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its bound alone, and by all noise of its group where the bounds leave a rival."""
    gumbel, calls = kernels.gumbel, {"one": 0, "all": 0}

    def counted(words):
        calls["all" if len(words.shape) else "one"] += 1
        return gumbel(words)

    monkeypatch.setattr(kernels, "gumbel", counted)
    monkeypatch.setattr(kernels, "GROUP", 16)
    logits = torch.randn(300, 2048, generator=torch.Generator().manual_seed(5))
    keys, positions, (tokens, _, _) = draw(logits, torch.ones(300))
    assert calls["one"] == 300
    assert 5 < calls["all"] < 100
    u = np.stack([gumbel_uniforms(int(k), int(p), 2048) for k, p in zip(keys, positions, strict=True)])
    assert tokens.tolist() == definition.tokens(logits.numpy(), u).tolist()


def draw(logits: torch.Tensor, temperatures: torch.Tensor, seed: int = 0):
    keys = np.random.default_rng(seed).integers(0, 2**64, len(logits), dtype=np.uint64)
    positions = torch.arange(len(logits)) * 977
    return keys, positions, sample_exact(logits, temperatures, key_bits(keys), positions, digest=True)


@pytest.mark.parametrize("kind", ["flat", "peaked", "masked"])
@pytest.mark.parametrize("vocab", [3, 128, 2049, 5000])
def test_token_of_the_definition_and_logprob_of_the_loss(vocab: int, kind: str) -> None:
    logits, temperatures = logits_of(8, vocab, kind), temperatures_of(8)
    temperatures[::3] = 0
    keys, positions, (tokens, logprobs, digests) = draw(logits, temperatures)
    at_one = torch.where(temperatures == 0, 1.0, temperatures)
    x = definition.scaled(logits.numpy(), at_one.numpy())
    u = np.stack([gumbel_uniforms(int(k), int(p), vocab) for k, p in zip(keys, positions, strict=True)])
    expected = np.where(temperatures == 0, logits.argmax(1), definition.tokens(x, u))
    assert tokens.tolist() == expected.tolist()
    scored, lse, _ = run(logits, at_one, tokens)
    assert same(logprobs, scored)
    assert same(digests, kernels.logprob_digests(logits, at_one, lse))
    if vocab > 1000 and kind == "flat":
        assert (tokens != logits.argmax(1)).any(), "noise without effect"


@pytest.mark.parametrize("group", [1, 64])
def test_a_draw_ignores_its_neighbours_and_the_cut(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, temperatures = logits_of(6, 2500), temperatures_of(6)
    keys, positions, (tokens, logprobs, digests) = draw(logits, temperatures)
    monkeypatch.setattr(kernels, "GROUP", group)
    monkeypatch.setattr(kernels, "SPANS", ((3, 1), (1 << 31, 3)))
    for row in reversed(range(6)):
        cut = slice(row, row + 1)
        wide = torch.cat([logits[cut], torch.full((1, 7), torch.inf)], 1)[:, :2500]
        alone = sample_exact(wide, temperatures[cut], key_bits(keys[cut]), positions[cut], digest=True)
        for found, expected in zip(alone, (tokens, logprobs, digests), strict=True):
            assert same(found, expected[cut])


def test_every_part_of_the_key_and_the_position_count() -> None:
    logits, ones = torch.zeros(1, 4000), torch.ones(1)
    found = {
        int(sample_exact(logits, ones, key_bits(np.array([key], np.uint64)), torch.tensor([position]))[0])
        for key, position in [(0, 0), (1, 0), (2**32, 0), (2**63, 0), (0, 1), (0, 2**30)]
    }
    assert len(found) == 6


def one(values, temperature: float = 1.0, key: int = 0) -> tuple[int, float]:
    logits = torch.tensor(np.asarray(values, np.float32))[None]
    keys = key_bits(np.array([key], np.uint64))
    tokens, logprobs, digests = sample_exact(logits, torch.tensor([float(temperature)]), keys, torch.tensor([3]))
    assert digests is None
    return int(tokens[0]), float(logprobs[0])


def test_ties_take_the_lowest_index() -> None:
    assert one([0.0, 3.0, 1.0, 3.0, 3.0], temperature=0)[0] == 1
    assert one([-0.0, 0.0], temperature=0)[0] == 0
    for key in range(10):  # noise is lost beside 1e30: equal sums, in one group and in several
        assert one([0.0] * 20 + [1e30, 1e30] + [0.0] * 20 + [1e30], key=key)[0] == 20
        assert one([0.0] * 2100 + [1e30] + [0.0] * 3000 + [1e30], key=key)[0] == 2100


def test_greedy_reports_temperature_one() -> None:
    token, logprob = one([0.0, 2.0, 1.0], temperature=0)
    assert token == 1
    assert logprob == pytest.approx(-np.log(1 + np.exp(-1) + np.exp(-2)), abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("n", [3, 200, 2500])
def test_no_plausible_logprob_from_bad_logits(temperature: float, n: int) -> None:
    base = np.linspace(-1, 1, n)
    for at in (0, n - 1):
        for bad in (np.nan, np.inf):
            logits = base.copy()
            logits[at] = bad
            token, logprob = one(logits, temperature)
            assert np.isnan(logprob), f"{bad} at {at}"
            assert (token == at) == (bad == np.inf)
    for dead in (np.nan, -np.inf):
        token, logprob = one(np.full(n, dead), temperature)
        assert token == -1
        assert np.isnan(logprob)
    logits = base.copy()
    logits[1:] = -np.inf  # legal: never sampled
    assert one(logits, temperature) == (0, 0.0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.5])
def test_rows_of_padding_draw_no_token_behind_the_vocabulary(value: float) -> None:
    """Whatever is in them, temperatures below 0 included: the token is an index into the embedding."""
    temperatures = torch.tensor([-1.0, -np.inf, np.inf, np.nan, -0.0, 1e-45])
    _, _, (tokens, _, _) = draw(torch.full((6, 3000), value), temperatures)
    assert ((tokens >= -1) & (tokens < 3000)).all()


def test_no_rows() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    tokens, logprobs, digests = sample_exact(torch.empty(0, 50), torch.empty(0), empty, empty, digest=True)
    assert tokens.shape == logprobs.shape == digests.shape == (0,)
