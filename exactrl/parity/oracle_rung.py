"""The rung of the oracle itself: a check that cannot fail shows nothing, so its every alarm is set off on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from exactrl.errors import ExactRLError, NonFiniteError, ParityError
from exactrl.parity.compare import Tally
from exactrl.parity.oracle import Oracle
from exactrl.parity.subject import Subject
from exactrl.types import Sample


def oracle(subject: Subject, tally: Tally) -> None:
    """Real training steps on samples of which one logprob is one unit in the last place off, and made-up logprobs that
    must never pass. A trainer that hands back the rollout's own logprobs does not see the first."""
    samples = subject.samples
    changed = [_one_ulp_off(s) if i == len(samples) // 2 else s for i, s in enumerate(samples)]
    counting = Oracle(strict=False, bisect_command="")
    counting.begin(changed)
    subject.make_trainer().step(changed, audit=True, observe=counting.observe)
    found = counting.metrics()
    tally.compared += int(found["train/logprob_compared_tokens"])
    for name in ("train/logprob_mismatch_tokens", "train/rescore_mismatch_tokens"):
        tally.require(found[name] == 1, f"one logprob was one ulp off, but {name} is {found[name]:g}")
    tally.require(found["train/train_rollout_logprob_abs_diff"] > 0, "the mean difference hides one ulp")
    _strict(subject, tally, changed)
    _made_up(tally)


def _one_ulp_off(sample: Sample) -> Sample:
    logprobs = sample.logprobs.copy()
    logprobs.view(np.int32)[-1] += 1
    return replace(sample, logprobs=logprobs)


def _strict(subject: Subject, tally: Tally, changed: list[Sample]) -> None:
    trainer, strict = subject.make_trainer(), Oracle(strict=True, bisect_command="")
    before = trainer.master_digest()
    strict.begin(changed)
    _expect(tally, ParityError, "one ulp", lambda: trainer.step(changed, audit=False, observe=strict.observe))
    tally.require(trainer.master_digest() == before, "weights changed although parity was broken")


def _made_up(tally: Tally) -> None:
    """One sample with logprobs [-1.5, -0], and arrays that differ from them in one way each."""
    values = np.array([-1.5, -0.0], np.float32)
    sample = Sample("made-up", 0, (1,), [2, 3], values, "length", 4, 1.0)

    def observe(logprobs: NDArray, version: int = 4) -> Callable[[], object]:
        judge = Oracle(strict=True, bisect_command="")
        judge.begin([sample])
        return lambda: judge.observe("train", version, [sample], [logprobs])

    observe(values.copy())()  # equal bits pass
    _expect(tally, ParityError, "+0 for -0", observe(np.array([-1.5, 0.0], np.float32)))
    _expect(tally, NonFiniteError, "NaN", observe(np.array([-1.5, np.nan], np.float32)))
    _expect(tally, ParityError, "another weight version", observe(values.copy(), version=5))
    _expect(tally, ParityError, "the rollout's own array", observe(values))
    _expect(tally, ParityError, "a logprob too few", observe(values[:1].copy()))
    broken = replace(sample, logprobs=np.array([np.nan, 0.0], np.float32))
    _expect(
        tally, NonFiniteError, "a NaN of the rollout", lambda: Oracle(strict=True, bisect_command="").begin([broken])
    )


def _expect(tally: Tally, error: type[ExactRLError], what: str, act: Callable[[], object]) -> None:
    try:
        act()
    except error:
        return
    except ExactRLError as other:
        tally.problems.append(f"the oracle raised {type(other).__name__} for {what}")
        return
    tally.problems.append(f"the oracle let pass: {what}")
