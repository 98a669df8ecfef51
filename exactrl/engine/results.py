"""What a step sampled, where the next step reads it, and on its way to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

Sampled = tuple[NDArray[np.int64], NDArray[np.float32]]
IN_FLIGHT = 2  # steps whose results the host may not have read yet


@dataclass(frozen=True, slots=True)
class Computed:
    """A step that was launched. `wait` returns tokens int64 and logprobs fp32 of its samples, both [R], once the device
    has them; they are the caller's own."""

    wait: Callable[[], Sampled]


@dataclass(slots=True)
class Results:
    """Results of the step launched last, on the device: row 0 of `buffer` holds tokens, row 1 the bits of logprobs.

    At most IN_FLIGHT steps may be launched before the first of them is waited for.
    """

    max_rows: int
    device: torch.device
    buffer: torch.Tensor = field(init=False)
    _host: list[torch.Tensor] = field(init=False)
    _turn: int = 0

    def __post_init__(self) -> None:
        self.buffer = torch.zeros(2, self.max_rows, dtype=torch.int64, device=self.device)
        pinned = self.device.type == "cuda"
        self._host = [torch.zeros(2, self.max_rows, dtype=torch.int64, pin_memory=pinned) for _ in range(IN_FLIGHT)]

    @property
    def tokens(self) -> torch.Tensor:
        """int64 [max_rows]."""
        return self.buffer[0]

    def store(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """tokens int64 [R], logprobs fp32 [R] of a step, on the device."""
        self.buffer[0, : len(tokens)] = tokens
        self.buffer[1, : len(tokens)] = logprobs.view(torch.int32)

    def send(self, count: int) -> Computed:
        """Starts the first `count` results on their way to the host."""
        host = self._host[self._turn]
        self._turn = (self._turn + 1) % IN_FLIGHT
        event = None
        if self.device.type == "cpu":
            host[:, :count] = self.buffer[:, :count]
        else:  # both rows whole: a copy's start costs more than its bytes
            host.copy_(self.buffer, non_blocking=True)
            event = torch.cuda.Event()
            event.record()

        def wait() -> Sampled:
            if event is not None:
                event.synchronize()
            tokens, bits = host.numpy()[:, :count]
            return tokens.copy(), bits.astype(np.int32).view(np.float32)

        return Computed(wait)
