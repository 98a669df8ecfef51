"""The parity ladder: from single ops to a whole training trajectory, each rung a set of bit-for-bit comparisons."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from exactrl.errors import ConfigError, ExactRLError
from exactrl.parity import engine_rungs, op_rungs, oracle_rung, trainer_rungs
from exactrl.parity.compare import Tally
from exactrl.parity.subject import Subject


@dataclass(frozen=True, slots=True)
class RungResult:
    """What a rung found. status "pass", "fail" or "skip"; compared, mismatched count values; seconds of wall time."""

    name: str
    dtype: str
    status: str
    compared: int
    mismatched: int
    detail: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


RUNGS: dict[str, Callable[[Subject, Tally], None]] = {
    "op/linear": op_rungs.linear,
    "op/rms_norm": op_rungs.rms_norm,
    "op/qkv": op_rungs.qkv,
    "op/attention": op_rungs.attention,
    "op/swiglu": op_rungs.swiglu,
    "op/logprob": op_rungs.logprob,
    "op/sample": op_rungs.sample,
    "layer": op_rungs.layers,
    "batch_composition": engine_rungs.batch_composition,
    "chunk_sizes": engine_rungs.chunk_sizes,
    "prefix_cache": engine_rungs.prefix_cache,
    "preemption": engine_rungs.preemption,
    "paging_order": engine_rungs.paging_order,
    "nan_cache": engine_rungs.nan_cache,
    "overlap": engine_rungs.overlap,
    "threads": engine_rungs.threads,
    "cuda_graphs": engine_rungs.cuda_graphs,
    "reference_kernels": engine_rungs.reference_kernels,
    "microbatch_split": trainer_rungs.microbatch_split,
    "engine_vs_trainer_ops": trainer_rungs.engine_vs_trainer_ops,
    "engine_vs_trainer": trainer_rungs.engine_vs_trainer,
    "gradient_vs_scoring": trainer_rungs.gradient_vs_scoring,
    "oracle": oracle_rung.oracle,
    "after_update": trainer_rungs.after_update,
    "trajectory_twice": trainer_rungs.trajectory_twice,
}
ON_ONE_BACKEND = {"threads": "cpu", "cuda_graphs": "cuda", "reference_kernels": "cuda"}
"""Rungs about what one backend has: no part of the ladder on the other."""


def rungs_on(backend: str) -> list[str]:
    return [name for name in RUNGS if ON_ONE_BACKEND.get(name, backend) == backend]


def check(
    subjects: Sequence[Subject], rungs: Sequence[str] | None, on_rung: Callable[[RungResult], None]
) -> list[RungResult]:
    """Runs the ladder on every subject (one per dtype). Raises ConfigError for an unknown rung."""
    unknown = [name for name in rungs or () if name not in RUNGS]
    if unknown:
        raise ConfigError(f"unknown rung {unknown[0]!r}; the rungs are {', '.join(RUNGS)}")
    results = []
    for subject in subjects:
        for name in rungs or rungs_on(subject.rollout_model.ops.backend):
            results.append(_run(name, subject))
            on_rung(results[-1])
    return results


def _run(name: str, subject: Subject) -> RungResult:
    tally, begin = Tally(), time.perf_counter()
    status, detail = "pass", ""
    try:
        RUNGS[name](subject, tally)
    except ExactRLError as error:  # a mismatch that stops a trainer, a NaN, a request that cannot be served
        tally.problems.append(f"{type(error).__name__}: {error}")
    if tally.skipped and not tally.mismatched and not tally.problems:
        status, detail = "skip", tally.skipped
    elif tally.mismatched or tally.problems:
        status = "fail"
        detail = "; ".join(filter(None, [tally.first, *tally.problems]))
    else:
        detail = ", ".join(tally.notes)
    return RungResult(
        name, subject.dtype_name, status, tally.compared, tally.mismatched, detail, time.perf_counter() - begin
    )
