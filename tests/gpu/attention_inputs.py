"""Sequences, pages filled with NaN, and which rows a batch asks for: shared by the GPU tests and the sweep."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from exactrl.ops.cuda.attention import AttentionImplementation, AttentionRows


@dataclass(frozen=True)
class Sequences:
    """q [T, H, D], k, v [T, HK, D] of whole sequences side by side, and the same keys in pages of a shuffled cache."""

    lengths: np.ndarray
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    tables: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def packed(self) -> AttentionRows:
        return AttentionRows.build(self.lengths, self.lengths, None, self.q.device)

    def last(self, counts: np.ndarray, lengths: np.ndarray, of: np.ndarray) -> tuple[np.ndarray, AttentionRows]:
        """The `counts[i]` rows that end at position lengths[i] of sequence of[i]: their numbers, and the batch."""
        first = self.starts[of] + lengths - counts
        number = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        return number, AttentionRows.build(counts, lengths, self.tables[of], self.q.device)


def draw(
    lengths: list[int], heads: int, kv_heads: int, dim: int, page_size: int, peak: float, seed: int,
    device: str = "cuda", dtype: torch.dtype = torch.bfloat16,
) -> Sequences:  # fmt: skip
    """`peak` scales queries and keys: 1 gives flat scores, 4 and more peaked ones. Unused slots hold NaN."""
    generator, total = torch.Generator(device).manual_seed(seed), sum(lengths)
    q, k, v = (torch.randn(total, h, dim, generator=generator, device=device) for h in (heads, kv_heads, kv_heads))
    q, k, v = (q * peak).to(dtype), (k * peak).to(dtype), v.to(dtype)
    used = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(used) + 7, generator=generator, device=device).cpu().numpy()
    tables = np.full((len(lengths), max(used)), np.iinfo(np.int32).max, np.int32)
    pages = [torch.full((len(order), page_size, kv_heads, dim), float("nan"), device=device, dtype=dtype) for _ in "kv"]
    at, row = 0, 0
    for s, (n, count) in enumerate(zip(lengths, used, strict=True)):
        tables[s, :count] = order[at : at + count]
        position = np.arange(n)
        slots = torch.from_numpy(tables[s, position // page_size].astype(np.int64) * page_size + position % page_size)
        for into, x in zip(pages, (k, v), strict=True):
            into.view(-1, kv_heads, dim)[slots.to(device)] = x[row : row + n]
        at, row = at + count, row + n
    return Sequences(np.array(lengths), q, k, v, *pages, tables)


def run(
    implementation: AttentionImplementation, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: AttentionRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of all sequences, both filled with NaN before."""
    out = torch.full_like(q, float("nan"))
    lse = torch.full((q.shape[1], q.shape[0]), float("nan"), device=q.device)
    implementation.attend(q, k, v, rows, out, lse, np.flatnonzero(rows.counts))
    return out, lse
