"""A weight as the ops read it: fp32 master (trainer only), compute copy, and packed panels for canonical products."""

from __future__ import annotations

import torch
from torch import nn

from exactrl.ops.cpu import gemm, jit


class Weight(nn.Module):
    """One parameter of the model.

    master   fp32 nn.Parameter that receives gradients, or None (rollout)
    compute  the weight in the compute dtype, row-major as in a Hugging Face file (for fp32 training: the master itself)
    panels   packed copy that canonical products read (matrices with `packed`), see ops/cpu/gemm.py

    A packed matrix that is neither trained nor `gathered` from (embedding) keeps only its panels.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        trainable: bool,
        packed: bool,
        gathered: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.shape: tuple[int, ...] = tuple(shape)
        self.dtype, self.device = dtype, torch.device(device)
        self.packed, self.gathered = packed, gathered
        self.keep_rows = gathered or trainable or not packed
        self.master: nn.Parameter | None = None
        if trainable:
            self.master = nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=device))
        self.compute: torch.Tensor | None = None
        self.panels: torch.Tensor | None = None

    def assign(self, value: torch.Tensor) -> None:
        """Sets the weight from a float tensor of its shape; the storage that kernels read is kept in place."""
        if tuple(value.shape) != self.shape:
            raise AssertionError(f"weight of shape {self.shape} assigned from {tuple(value.shape)}")
        if self.master is not None:
            with torch.no_grad():
                self.master.copy_(value)
            self.refresh()
        else:
            self._set(value.detach().to(self.device, self.dtype))

    def refresh(self) -> None:
        """Makes compute copy and panels from the master; call after every optimizer update."""
        if self.master is not None:
            self._set(self.master.detach().to(self.dtype))

    def _set(self, value: torch.Tensor) -> None:
        if self.keep_rows:
            if self.master is not None and self.dtype == torch.float32:
                self.compute = self.master.detach()
            elif self.compute is None:
                self.compute = value.clone()
            else:
                self.compute.copy_(value)
        if self.packed:
            n, k = self.shape
            if self.panels is None:
                self.panels = torch.empty(-(-n // gemm.PANEL) * k * gemm.PANEL, dtype=self.dtype)
            gemm.pack_rows(jit.flat(value.contiguous()), k, n, jit.flat(self.panels))

    def rows(self) -> torch.Tensor:
        assert self.compute is not None, "weight was never assigned or keeps only its panels"
        return self.compute

    def value(self) -> torch.Tensor:
        """The weight in the compute dtype, row-major; unpacked from the panels when only those are kept."""
        if self.compute is not None:
            return self.compute
        assert self.panels is not None, "weight was never assigned"
        n, k = self.shape
        return self.panels.view(-1, k, gemm.PANEL).transpose(1, 2).reshape(-1, k)[:n].contiguous()

    def read_by_kernels(self) -> list[torch.Tensor]:
        """The storage that the forward kernels read: what the compute digest is taken of."""
        kept = [self.panels] if self.panels is not None else []
        if self.compute is not None and (self.gathered or not self.packed):
            kept.append(self.compute)
        return kept


class UseCompute(torch.autograd.Function):
    """The compute copy in the forward, the gradient (in fp32) to the master: how plain torch ops read a Weight."""

    @staticmethod
    def forward(ctx, master, compute):
        return compute.view_as(compute)

    @staticmethod
    def backward(ctx, grad):
        return grad.float(), None


def plain(weight: Weight) -> torch.Tensor:
    """The weight for plain torch ops, connected to the master when there is one."""
    return weight.rows() if weight.master is None else UseCompute.apply(weight.master, weight.rows())
