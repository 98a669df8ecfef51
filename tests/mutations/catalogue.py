"""All faults, and the seeded choice of them that every test run makes."""

from __future__ import annotations

import random

from exactrl.ops.cpu import jit
from tests.mutations import judge_faults, one_ulp, op_faults, rollout_faults, trainer_faults
from tests.mutations.fault import Fault

ONE_ULP = one_ulp.FAULTS
WHOLE = [*rollout_faults.FAULTS, *trainer_faults.FAULTS, *op_faults.FAULTS, *judge_faults.FAULTS]

# What this machine cannot show, by id, and why.
LEFT_OUT: dict[str, str] = {}
if jit.max_threads() < 2:
    LEFT_OUT["threads/last-bit"] = "this machine offers one thread only"
    WHOLE = [f for f in WHOLE if f.id not in LEFT_OUT]

ALL = [*WHOLE, *ONE_ULP]


def sample(seed: int) -> list[Fault]:
    """Every variant of every whole kind, and of each op one one-ulp fault per side: layer, dtype and element by lot."""
    dice = random.Random(seed)
    chosen = []
    for kind in dict.fromkeys(f.kind for f in ONE_ULP):
        for side in one_ulp.SIDES:
            chosen.append(dice.choice([f for f in ONE_ULP if f.kind == kind and f"-{side}-" in f.id]))
    return [*WHOLE, *chosen]
