"""Learning-rate schedules."""

from __future__ import annotations

import math


def learning_rate(
    step: int, *, peak: float, total_steps: int, schedule: str, warmup_steps: int = 0, min_ratio: float = 0.0
) -> float:
    """Learning rate of RL step 1, 2, ... total_steps; all minibatches of a step share it.

    Warm-up is linear: peak * step / (warmup_steps + 1), so step warmup_steps + 1 is the first with the full peak. Then
    "constant" stays there; "linear" and "cosine" (SGDR, arXiv:1608.03983, eq. 5, one period) fall to peak * min_ratio,
    which they would reach one step after the last: no step is made with rate 0. Later steps keep that minimum.
    """
    assert step >= 1, step
    assert schedule in ("constant", "linear", "cosine"), schedule
    if step <= warmup_steps:
        return peak * (step / (warmup_steps + 1))
    if schedule == "constant":
        return peak
    progress = min((step - 1 - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    left = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (min_ratio + (1 - min_ratio) * left)
