"""Head and sampling on a GPU: bits against everything that may not change them, correctness against fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exactrl.ops.cuda.head import logprobs_exact
from exactrl.ops.cuda.sampling import sample_exact
from exactrl.parity.compare import differing

VOCABULARIES = [1000, 32000, 151936]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not differing(a, b).any()


def inputs(rows: int, vocab: int, width: int = 256, scale: float = 0.3):
    g = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(rows, width, generator=g, device="cuda").bfloat16()
    w = (torch.randn(vocab, width, generator=g, device="cuda") * scale).bfloat16()
    temperatures = torch.tensor([1.0, 0.7, 1.3, 0.1], device="cuda").repeat(rows // 4 + 1)[:rows].contiguous()
    return hidden, w, torch.randint(vocab, (rows,), generator=g, device="cuda"), temperatures


def product(x, w, out_dtype, leaves):
    from exactrl.ops.cuda.matmul import reference

    return reference(x, w, out_dtype, leaves)


def draws(rows: int):
    from exactrl.ops.transfer import key_bits

    keys = np.random.default_rng(0).integers(0, 2**64, rows, dtype=np.uint64)
    return keys, key_bits(keys).cuda(), torch.arange(rows, device="cuda") * 31


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_sampler_and_loss_report_one_logprob(vocab: int) -> None:
    hidden, w, _, temperatures = inputs(257, vocab)
    temperatures[::7] = 0
    _, keys, positions = draws(257)
    logits = product(hidden, w, torch.float32, 1)
    tokens, logprobs, digests = sample_exact(logits, temperatures, keys, positions, digest=True)
    at_one = torch.where(temperatures == 0, 1.0, temperatures)
    for chunk in (1, 100 * 4 * vocab, 1 << 30):
        assert same(logprobs, logprobs_exact(hidden, w, tokens, at_one, product, chunk_bytes=chunk)[0])
    for row in (0, 1, 100, 256):
        cut = slice(row, row + 1)
        one = product(hidden[cut], w, torch.float32, 1)
        alone = sample_exact(one, temperatures[cut], keys[cut], positions[cut], digest=True)
        assert all(same(a, b[cut]) for a, b in zip(alone, (tokens, logprobs, digests), strict=True))
    assert (tokens[::7] == logits[::7].argmax(1)).all()


@pytest.mark.parametrize("vocab", [1000, 151936])
def test_warps_and_groups_change_no_bit(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from exactrl.ops.cuda import triton_logprob as kernels

    logits = torch.randn(64, vocab, generator=torch.Generator("cuda").manual_seed(1), device="cuda") * 4
    temperatures, targets = inputs(64, vocab)[3], torch.arange(64, device="cuda")
    _, keys, positions = draws(64)

    def everything():
        found = kernels.merge(kernels.blocks(logits, temperatures, entropy=True), logits, temperatures, targets)
        return [*found, *sample_exact(logits, temperatures, keys, positions, digest=True)]

    expected = everything()
    for warps, group, span in ((1, 1, 2), (2, 4, 7), (4, 16, 1), (8, 32, 2)):
        monkeypatch.setitem(kernels.LAUNCH, "num_warps", warps)
        monkeypatch.setitem(kernels.ALONE, "num_warps", warps)
        monkeypatch.setattr(kernels, "GROUP", group)
        monkeypatch.setattr(kernels, "SPANS", ((1 << 31, span),))
        for _ in range(5):  # a missing barrier would show now and then
            assert all(same(a, b) for a, b in zip(everything(), expected, strict=True)), (warps, group)


def test_sums_of_blocks_are_one_ascending_chain() -> None:
    """Every block has the same maximum, so that its weight is exactly 1 and the host can add the chain itself."""
    from exactrl.ops.cuda import triton_logprob as kernels

    g = torch.Generator("cuda").manual_seed(2)
    logits = torch.randn(4, 151936, generator=g, device="cuda").clamp(max=3)
    logits[:, ::128] = 4.0
    ones, targets = torch.ones(4, device="cuda"), torch.arange(4, device="cuda")
    parts = kernels.blocks(logits, ones)
    chain = np.zeros(4, np.float32)
    for column in parts.sums[1].cpu().numpy().T:
        chain = chain + column
    # A row of one block whose sum is the chain: 128 entries cannot say it, so its logarithm is taken by the kernel.
    whole = kernels.Blocks(torch.stack([torch.full((4, 1), 4.0), torch.from_numpy(chain)[:, None]]).cuda())
    assert same(kernels.merge(parts, logits, ones, targets)[1], kernels.merge(whole, logits, ones, targets)[1])


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_logprobs_entropy_and_noise_are_right(vocab: int) -> None:
    from exactrl.ops.cuda.triton_noise import uniform_rows
    from exactrl.ops.head import gumbel_uniforms

    hidden, w, targets, temperatures = inputs(64, vocab)
    logprobs, entropy = logprobs_exact(hidden, w, targets, temperatures, product)
    x = product(hidden, w, torch.float32, 1).double() / temperatures.double()[:, None]
    lp = torch.log_softmax(x, 1)
    right = lp.gather(1, targets[:, None])[:, 0]
    assert ((logprobs - right).abs() < 4e-6 + 2**-22 * x.abs().amax(1)).all()  # x itself is rounded
    assert ((entropy + (lp.exp() * lp).sum(1)).abs() < 1e-4).all()
    keys, device_keys, positions = draws(3)
    for row, key, position in zip(uniform_rows(device_keys, positions, vocab).cpu(), keys, positions, strict=True):
        assert same(row, torch.from_numpy(gumbel_uniforms(int(key), int(position), vocab)))


@pytest.mark.parametrize("rows", [1, 257])
def test_gradients_are_deterministic_and_correct(rows: int) -> None:
    hidden, w, targets, temperatures = inputs(rows, 32000)
    runs = []
    for chunk in (1 << 30, 1 << 30, 100 * 4 * 32000):
        leaf, master = hidden.clone().requires_grad_(), w.float().requires_grad_()
        lp, h = logprobs_exact(leaf, w, targets, temperatures, product, master=master, chunk_bytes=chunk)
        (lp.sum() + 0.1 * h.sum()).backward()
        runs.append((leaf.grad, master.grad))
    assert all(same(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    exact_h, exact_w = hidden.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    lp = torch.log_softmax(exact_h @ exact_w.T / temperatures.double()[:, None], 1)
    (lp.gather(1, targets[:, None]).sum() - 0.1 * (lp.exp() * lp).sum()).backward()
    for dh, dw in runs:
        assert (dh.double() - exact_h.grad).norm() / exact_h.grad.norm() < 1e-2
        assert (dw.double() - exact_w.grad).norm() / exact_w.grad.norm() < 4e-3
