"""The head's Triton kernels in the interpreter: bits against the written definition, gradients against fp64."""

from __future__ import annotations

from tests.ops.cuda import interpreter  # isort: skip  # noqa: F401 - sets up Triton before it is imported

import numpy as np
import pytest
import torch

from exactrl.ops.cuda import triton_logprob as kernels
from exactrl.ops.cuda.head import chunk_rows, logprobs_exact
from exactrl.ops.cuda.triton_matmul import matmul
from exactrl.ops.head import logprobs_reference
from exactrl.parity.compare import differing
from tests.ops.cuda import head_definition as definition

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy names every inf - inf
VOCABULARIES = [1, 3, 127, 128, 129, 2048, 2049, 5000]
KINDS = ["flat", "peaked", "masked"]


def logits_of(rows: int, vocab: int, kind: str = "flat", seed: int = 0) -> torch.Tensor:
    """`masked`: most entries -inf, whole blocks and the first ones among them, but not the last entry."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vocab, generator=g)
    if kind == "peaked":
        x *= 30
    if kind == "masked":
        x[torch.rand(rows, vocab, generator=g) < 0.7] = -torch.inf
        x[:, : vocab - 140] = -torch.inf
        x[:, -1] = 0.25
    return x


def temperatures_of(rows: int) -> torch.Tensor:
    """Per row; 1 and others."""
    return torch.tensor([1.0, 0.7, 1.3, 0.05, 2.0]).repeat(rows // 5 + 1)[:rows].contiguous()


def run(logits, temperatures, targets, entropy=True):
    return kernels.merge(kernels.blocks(logits, temperatures, entropy=entropy), logits, temperatures, targets)


def same(a: torch.Tensor, b) -> bool:
    return not differing(a, torch.as_tensor(b)).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_bits_are_those_of_the_definition(vocab: int, kind: str) -> None:
    logits, temperatures = logits_of(5, vocab, kind), temperatures_of(5)
    targets = torch.arange(5) * 7919 % vocab
    x = definition.scaled(logits.numpy(), temperatures.numpy())
    parts = kernels.blocks(logits, temperatures, entropy=True)
    for found, expected in zip(parts.sums, definition.sums(x), strict=True):
        assert same(found, expected)
    logprobs, lse, entropy = kernels.merge(parts, logits, temperatures, targets)
    top, ln, h = definition.lse(x)
    assert same(lse, np.stack([top, ln], 1))
    assert same(entropy, h)
    whole = definition.all_logprobs(x)
    assert same(logprobs, whole[np.arange(5), targets])
    assert same(kernels.all_logprobs(logits, temperatures, lse), whole)
    digests = kernels.logprob_digests(logits, temperatures, lse)
    assert digests.numpy().view(np.uint64).tolist() == [definition.digest(row) for row in whole]


def test_the_order_of_the_sums_shows_in_the_bits() -> None:
    """Else the test above would prove nothing about order."""
    logits, temperatures = logits_of(5, 5000), temperatures_of(5)
    x = definition.scaled(logits.numpy(), temperatures.numpy())
    m, s, _ = definition.sums(x)
    backwards = np.pad(x, ((0, 0), (0, 120)), constant_values=-np.inf)[:, ::-1]
    halves = backwards.reshape(5, -1, 2, 64).swapaxes(2, 3).reshape(5, -1)
    assert (definition.sums(halves)[1][:, ::-1] != s).any(), "pairs (i, i + 64) give the same bits"
    w = definition.exp(m - m.max(1)[:, None]) * s
    assert (definition.chain(w[:, ::-1]) != definition.chain(w)).any()


@pytest.mark.parametrize("group", [1, 4, 64])
def test_bits_do_not_depend_on_neighbours_stride_or_group(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, temperatures, targets = logits_of(7, 2049), temperatures_of(7), torch.arange(7) * 100
    expected = run(logits, temperatures, targets)
    monkeypatch.setattr(kernels, "GROUP", group)
    monkeypatch.setattr(kernels, "SPANS", ((3, 1), (1 << 31, 3)))
    padded = torch.full((7, 3000), torch.nan)
    padded[:, 10:2059] = logits
    for found, right in zip(run(padded[:, 10:2059], temperatures, targets), expected, strict=True):
        assert same(found, right)
    for row in range(7):
        cut = slice(row, row + 1)
        for found, right in zip(run(logits[cut], temperatures[cut], targets[cut]), expected, strict=True):
            assert same(found, right[cut])
    logprobs, lse, _ = run(logits, temperatures, targets, entropy=False)
    assert same(logprobs, expected[0])
    assert same(lse, expected[1])


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_right(kind: str) -> None:
    logits, temperatures, targets = logits_of(6, 3001, kind), temperatures_of(6), torch.full((6,), 3000)
    logprobs, _, entropy = run(logits, temperatures, targets)
    lp = torch.log_softmax(logits.double() / temperatures.double()[:, None], 1)
    assert torch.allclose(logprobs.double(), lp[:, -1], rtol=1e-6, atol=3e-6)
    assert torch.allclose(entropy.double(), -(lp.exp() * lp).nan_to_num().sum(1), rtol=1e-5, atol=1e-5)


def test_bad_logits_are_never_a_plausible_number() -> None:
    for bad in (torch.nan, torch.inf):
        for at in (0, 100, 299):
            logits = logits_of(2, 300)
            logits[0, at] = bad
            logprobs, _, entropy = run(logits, torch.ones(2), torch.tensor([5, 5]))
            assert logprobs.isnan().tolist() == entropy.isnan().tolist() == [True, False]
    logits = logits_of(4, 300)
    logits[0], logits[1, 7] = -torch.inf, -torch.inf
    logprobs, _, _ = run(logits, torch.ones(4), torch.tensor([5, 7, 300, -1]))
    assert logprobs.isnan().tolist() == [True, False, True, True], "no logit, -inf, two unknown targets"
    assert logprobs[1] == -torch.inf
    assert run(logits, torch.zeros(4), torch.tensor([5, 5, 5, 5]))[0].isnan().all(), "temperature 0"


def product(x, w, out_dtype, leaves):
    return matmul(x, w, out_dtype, leaves)


def plain_product(x, w, out_dtype, leaves):
    return (x.double() @ w.double().T).to(out_dtype)


def problem(rows: int, vocab: int, seed: int = 0, width: int = 24):
    g = torch.Generator().manual_seed(seed)
    hidden, w = torch.randn(rows, width, generator=g), torch.randn(vocab, width, generator=g) / 3
    return hidden, w, torch.randint(vocab, (rows,), generator=g), temperatures_of(rows)


def gradients(hidden, w, targets, temperatures, chunk_bytes=1 << 30, weights=(1.0, 0.3)):
    """(logprobs, entropy, d hidden, d w) of a weighted sum whose weights differ from row to row."""
    hidden, master = hidden.clone().requires_grad_(), w.clone().requires_grad_()
    exact = hidden.dtype == torch.float32
    if exact:
        lp, h = logprobs_exact(hidden, w, targets, temperatures, plain_product, master=master, chunk_bytes=chunk_bytes)
    else:
        lp, h = logprobs_reference(hidden, master, targets, temperatures)
    per_row = torch.linspace(-1, 2, len(targets), dtype=hidden.dtype)
    (weights[0] * (lp * per_row).sum() + weights[1] * (h * per_row.flip(0)).sum()).backward()
    return lp.detach(), h.detach(), hidden.grad, master.grad


@pytest.mark.parametrize("weights", [(1.0, 0.3), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 129), (9, 1000), (33, 257)])
def test_gradients_against_fp64(rows: int, vocab: int, weights: tuple[float, float]) -> None:
    args = problem(rows, vocab)
    right = gradients(*(t.double() if t.is_floating_point() else t for t in args), weights=weights)
    for found, expected in zip(gradients(*args, weights=weights), right, strict=True):
        assert found.dtype == torch.float32
        assert ((found.double() - expected).norm() / expected.norm()) < 3e-6


def test_chunks_change_no_forward_bit_and_gradients_repeat() -> None:
    args = problem(11, 300)
    whole, calls = gradients(*args), []
    for chunk in (1, 3 * 4 * 300, 4 * 4 * 300):
        first, second = gradients(*args, chunk_bytes=chunk), gradients(*args, chunk_bytes=chunk)
        calls.append(first)
        for a, b in zip(first, second, strict=True):
            assert same(a, b)
        for a, b in zip(first[:2], whole[:2], strict=True):
            assert same(a, b)
        for a, b in zip(first[2:], whole[2:], strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_no_product_is_larger_than_a_chunk() -> None:
    sizes = []

    def watched(x, w, out_dtype, leaves):
        sizes.append(len(x))
        return plain_product(x, w, out_dtype, leaves)

    hidden, w, targets, temperatures = problem(11, 300)
    hidden.requires_grad_()
    lp, _ = logprobs_exact(hidden, w, targets, temperatures, watched, chunk_bytes=4 * 4 * 300)
    lp.sum().backward()
    assert sizes == [4, 4, 3] * 2
    assert chunk_rows(151936, 1 << 30) == 1664
    assert chunk_rows(151936, 1 << 26) == 110
    assert chunk_rows(10**6, 1) == 1


def test_with_the_contract_s_product_rows_ignore_each_other() -> None:
    g = torch.Generator().manual_seed(3)
    hidden, w = torch.randn(6, 32, generator=g).half(), torch.randn(200, 32, generator=g).half()
    targets, temperatures = torch.arange(6), temperatures_of(6)
    logprobs, entropy = logprobs_exact(hidden, w, targets, temperatures, product)
    for row in range(6):
        cut = slice(row, row + 1)
        alone = logprobs_exact(hidden[cut], w, targets[cut], temperatures[cut], product)
        assert same(alone[0], logprobs[cut])
        assert same(alone[1], entropy[cut])


def test_no_rows() -> None:
    hidden, w, targets, temperatures = problem(0, 130)
    lp, h, dh, dw = gradients(hidden, w, targets, temperatures)
    assert lp.shape == h.shape == (0,)
    assert dh.shape == (0, 24)
    assert (dw == 0).all()
    assert dw.shape == w.shape


def test_a_gradient_is_rounded_once_and_ignores_masked_logits() -> None:
    logits, temperatures, targets = logits_of(5, 300, "masked"), temperatures_of(5), torch.full((5,), 299)
    _, lse, entropy = run(logits, temperatures, targets)
    args = (logits, temperatures, targets, lse, entropy, torch.linspace(-1, 1, 5), torch.linspace(1, 0, 5))
    d = kernels.logits_gradient(*args, torch.float32)
    assert d.isfinite().all()
    assert (d[logits == -torch.inf] == 0).all()
    assert d.sum(1).abs().max() < 1e-5, "softmax does not change with a constant"
    assert same(kernels.logits_gradient(*args, torch.float16), d.half())


def test_a_digest_sees_one_bit_and_the_place() -> None:
    logits = logits_of(1, 300).repeat(3, 1)
    logits[1, 200] = torch.nextafter(logits[1, 200], torch.tensor(torch.inf))
    logits[2, [3, 4]] = logits[2, [4, 3]]
    lse = torch.zeros(3, 2)  # the same for all rows, so that only the entry differs
    found = kernels.logprob_digests(logits, torch.ones(3), lse)
    assert len(set(found.tolist())) == 3


def test_the_target_is_found_wherever_it_is() -> None:
    """Only the program that holds it looks for it."""
    vocab, targets = 4200, torch.tensor([0, 1023, 1024, 2047, 2048, 4095, 4096, 4199, -1, 4200, 2**40])
    logits, ones = logits_of(len(targets), vocab), torch.ones(len(targets))
    _, lse, entropy = run(logits, ones, targets)
    d = kernels.logits_gradient(logits, ones, targets, lse, entropy, ones, torch.zeros(len(targets)), torch.float32)
    expected = -torch.softmax(logits.double(), 1)
    for row, target in enumerate(targets.tolist()[:8]):
        expected[row, target] += 1
    assert (d - expected).abs().max() < 1e-6
