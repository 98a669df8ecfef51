"""The oracle: every rule of docs/numerics.md, "The check that cannot be fooled"."""

from __future__ import annotations

import numpy as np
import pytest

from exactrl.errors import NonFiniteError, ParityError
from exactrl.parity.oracle import Oracle
from exactrl.types import Sample


def sample(index: int, values: list[float], *, advantage: float = 1.0, version: int = 4) -> Sample:
    ids = list(range(10, 10 + len(values)))
    logprobs = np.array(values, np.float32)
    return Sample("p", index, (1, 2, 3), ids, logprobs, "stop", version, 1.0, advantage=advantage)


def oracle(samples: list[Sample], *, strict: bool = True) -> Oracle:
    judge = Oracle(strict=strict, bisect_command="exactrl check model")
    judge.begin(samples)
    return judge


def pair() -> list[Sample]:
    return [sample(0, [-1.5, -0.25]), sample(1, [-3.0, -0.0, -2.0], advantage=0.0)]


def copies(samples: list[Sample]) -> list[np.ndarray]:
    return [s.logprobs.copy() for s in samples]


@pytest.mark.parametrize("kind", ["train", "rescore"])
def test_equal_bits_pass(kind):
    samples = pair()
    judge = oracle(samples)
    judge.observe(kind, 4, samples, copies(samples))
    expected = {
        "train/logprob_compared_tokens": 5,  # tokens of zero advantage count
        "train/logprob_uncompared_tokens": 0,
        "train/logprob_mismatch_tokens": 0,
        "train/train_rollout_logprob_abs_diff": 0.0,
        "train/logprob_abs_diff_max": 0.0,
    }
    assert judge.metrics() == expected | ({"train/rescore_mismatch_tokens": 0} if kind == "rescore" else {})


@pytest.mark.parametrize("kind", ["train", "rescore"])
def test_one_ulp_is_caught_and_described(kind):
    samples = pair()
    values = copies(samples)
    values[1][2] = np.nextafter(values[1][2], np.float32(0))
    with pytest.raises(ParityError) as caught:
        oracle(samples).observe(kind, 4, samples, values)
    message = str(caught.value)
    assert caught.value.exit_code == 3
    for part in (
        "1 of 3 tokens", "sample p#1", "weight version 4", "response token 2 (id 12, position 5)",
        f"{kind} -1.99999988", "0xbfffffff", "rollout -2 (0xc0000000)", "exactrl check model",
    ):  # fmt: skip
        assert part in message, part


def test_the_sign_of_zero_is_a_bit():
    samples = pair()
    values = copies(samples)
    values[1][1] = 0.0
    with pytest.raises(ParityError, match=r"rollout -0 \(0x80000000\), train 0 \(0x00000000\)"):
        oracle(samples).observe("train", 4, samples, values)
    judge = oracle(samples, strict=False)
    judge.observe("train", 4, samples, values)
    metrics = judge.metrics()
    assert metrics["train/logprob_mismatch_tokens"] == 1
    assert metrics["train/logprob_abs_diff_max"] == 0


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_never_passes(strict, value):
    samples = pair()
    values = copies(samples)
    values[0][1] = value
    with pytest.raises(NonFiniteError, match=r"sample p#0: train logprob of response token 1 .* is -?(nan|inf)"):
        oracle(samples, strict=strict).observe("train", 4, samples, values)
    samples[1].logprobs[0] = value
    with pytest.raises(NonFiniteError, match="sample p#1: rollout logprob of response token 0"):
        oracle(samples, strict=strict)


def test_equal_nans_never_pass():
    samples = [sample(0, [np.nan])]
    with pytest.raises(NonFiniteError):
        oracle(samples)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "logprobs",
    [np.zeros(1, np.float32), np.zeros(3, np.float32), np.zeros(0, np.float32), np.zeros(2), np.zeros(2, np.float16),
     np.zeros((2, 1), np.float32), None, [-1.5, -0.25]],
    ids=["short", "long", "empty", "float64", "float16", "column", "none", "list"],
)  # fmt: skip
def test_every_token_needs_its_logprob(strict, logprobs):
    samples = pair()
    samples[0].logprobs = logprobs
    with pytest.raises(ParityError, match="sample p#0: 2 tokens but"):
        oracle(samples, strict=strict)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("values", [np.zeros(1, np.float32), np.zeros(3, np.float32), np.zeros(2)], ids=str)
def test_a_forward_of_another_shape_or_type_is_refused(strict, values):
    samples = pair()
    with pytest.raises(ParityError, match="sample p#0: the train forward gave"):
        oracle(samples, strict=strict).observe("train", 4, samples[:1], [values])


@pytest.mark.parametrize("strict", [True, False])
def test_a_sample_is_observed_once_per_kind(strict):
    samples = pair()
    judge = oracle(samples, strict=strict)
    judge.observe("rescore", 4, samples, copies(samples))
    judge.observe("train", 4, samples[:1], copies(samples[:1]))
    judge.observe("train", 4, samples[1:], copies(samples[1:]))
    with pytest.raises(ParityError, match=r"p#0: .*twice"):
        judge.observe("train", 4, samples[:1], copies(samples[:1]))


@pytest.mark.parametrize("strict", [True, False])
def test_a_foreign_sample_is_refused(strict):
    samples = pair()
    judge = oracle(samples, strict=strict)
    twin = sample(0, [-1.5, -0.25])  # equal, but not the object that was rolled out
    with pytest.raises(ParityError, match="not of this step"):
        judge.observe("train", 4, [twin], copies([twin]))
    judge.begin(pair())
    with pytest.raises(ParityError, match="not of this step"):
        judge.observe("train", 4, samples, copies(samples))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("version", [3, 5])
def test_another_weight_version_is_refused(strict, version):
    samples = pair()
    with pytest.raises(ParityError, match=f"version 4, but the trainer is at {version}"):
        oracle(samples, strict=strict).observe("train", version, samples, copies(samples))


@pytest.mark.parametrize("strict", [True, False])
def test_a_value_is_never_compared_with_itself(strict):
    samples = pair()
    for values in (samples[0].logprobs, samples[0].logprobs[:], samples[0].logprobs.view()):
        with pytest.raises(ParityError, match="the rollout's own array"):
            oracle(samples, strict=strict).observe("train", 4, samples[:1], [values])


def test_one_array_for_both_forwards_is_refused():
    """A re-score that hands in the gradient forward's array would prove nothing."""
    samples = pair()
    judge = oracle(samples)
    values = copies(samples)
    judge.observe("rescore", 4, samples, values)
    with pytest.raises(ParityError, match="own array"):
        judge.observe("train", 4, samples, values)


def test_a_step_in_which_nothing_was_compared_fails():
    judge = oracle(pair())
    with pytest.raises(ParityError, match="none of the step's 5 sampled tokens was compared"):
        judge.metrics()
    with pytest.raises(ParityError, match="none of the step's 0"):
        oracle([]).metrics()
    relaxed = oracle(pair(), strict=False).metrics()
    assert relaxed == {
        "train/logprob_compared_tokens": 0,
        "train/logprob_uncompared_tokens": 5,
        "train/logprob_mismatch_tokens": 0,
    }  # a difference that was not measured is absent, not 0


def test_uncompared_tokens_are_counted():
    samples = [*pair(), sample(2, [])]
    judge = oracle(samples)
    judge.observe("train", 4, samples[1:], copies(samples[1:]))
    metrics = judge.metrics()
    assert (metrics["train/logprob_compared_tokens"], metrics["train/logprob_uncompared_tokens"]) == (3, 2)
    assert "train/rescore_mismatch_tokens" not in metrics


def test_tokens_compared_by_either_forward_count_once():
    samples = pair()
    judge = oracle(samples)
    judge.observe("rescore", 4, samples, copies(samples))
    judge.observe("train", 4, samples[:1], copies(samples[:1]))
    metrics = judge.metrics()
    assert (metrics["train/logprob_compared_tokens"], metrics["train/logprob_uncompared_tokens"]) == (5, 0)
    assert metrics["train/rescore_mismatch_tokens"] == 0


def test_without_strictness_differences_are_reported_exactly():
    samples = pair()
    values = copies(samples)
    values[0] += np.float32(0.5)
    values[1][0] -= np.float32(0.25)
    rescored = copies(samples)
    rescored[0][0] = -9
    judge = oracle(samples, strict=False)
    judge.observe("rescore", 4, samples, rescored)
    judge.observe("train", 4, samples, values)
    assert judge.metrics() == {
        "train/logprob_compared_tokens": 5,
        "train/logprob_uncompared_tokens": 0,
        "train/logprob_mismatch_tokens": 3,
        "train/train_rollout_logprob_abs_diff": 1.25 / 5,
        "train/logprob_abs_diff_max": 0.5,
        "train/rescore_mismatch_tokens": 1,
    }


def test_the_smallest_difference_is_not_rounded_away():
    samples = [sample(0, [-1.0] * 1000)]
    values = copies(samples)
    values[0][999] = np.nextafter(np.float32(-1), np.float32(0))
    judge = oracle(samples, strict=False)
    judge.observe("train", 4, samples, values)
    metrics = judge.metrics()
    assert metrics["train/train_rollout_logprob_abs_diff"] == 2.0**-24 / 1000
    assert metrics["train/logprob_abs_diff_max"] == 2.0**-24


def test_a_new_step_forgets_the_last():
    samples = pair()
    judge = oracle(samples)
    judge.observe("rescore", 4, samples, copies(samples))
    again = pair()
    judge.begin(again)
    with pytest.raises(ParityError, match="none of the step's"):
        judge.metrics()
    judge.observe("train", 4, again, copies(again))
    assert "train/rescore_mismatch_tokens" not in judge.metrics()


def test_a_sample_given_twice_is_refused():
    """It would be compared once and trained on twice."""
    (s, _) = pair()
    with pytest.raises(ParityError, match="p#0"):
        oracle([s, s])


def test_counts_of_samples_and_arrays_must_agree():
    samples = pair()
    with pytest.raises((ParityError, ValueError)):
        oracle(samples).observe("train", 4, samples, copies(samples)[:1])


@pytest.mark.parametrize("strict", [True, False])
def test_a_step_has_one_weight_version(strict):
    """Samples of another version could only be left uncompared, one by one."""
    samples = [sample(0, [-1.0]), sample(1, [-2.0], version=3)]
    with pytest.raises(ParityError, match=r"sample p#1 was rolled out at weight version 3, sample p#0 .* at 4"):
        oracle(samples, strict=strict)
