"""Checksums of weights, made on the GPU: the CPU's, whatever the size, and read together."""

from __future__ import annotations

import hashlib

import pytest
import torch

if not torch.cuda.is_available():  # before kernels are imported, which tests/ops/cuda wants to run interpreted
    pytest.skip("needs an H100 or H200", allow_module_level=True)
from exactrl.model.weights import compute_digest, unique_weights
from exactrl.ops.checksum import checksum, checksums
from tests.gpu.small_model import model_of, ops_of


@pytest.mark.parametrize("count", [0, 1, 3, 4, 8191, 8192, 8193, 5_000_001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpu_and_cpu_agree(count: int, dtype: torch.dtype) -> None:
    x = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = checksum(x.cuda())
    assert found == checksum(x)
    assert checksums([x.cuda(), x[1:].cuda(), x.cuda()]) == [found, checksum(x[1:]), found]


def test_a_models_digest_is_that_of_its_tensors() -> None:
    model = model_of(ops_of())
    h = hashlib.blake2b(digest_size=16)
    for i, weight in enumerate(unique_weights(model)):
        for tensor in weight.read_by_kernels():
            h.update(f"{i} {tensor.dtype} {tuple(tensor.shape)}".encode() + checksum(tensor.cpu()))
    assert compute_digest(model) == h.hexdigest()
