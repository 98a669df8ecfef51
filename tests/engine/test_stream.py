"""Completions as they finish, and what is left when nobody wants the rest."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from exactrl.engine.results import Computed
from exactrl.errors import NonFiniteError, RequestError
from exactrl.model.weights import named_weights
from tests.train.helpers import VOCAB, make_engine, request, tokens, trajectories, workload


@pytest.mark.parametrize("overlap", [False, True])
def test_each_completion_comes_once_with_its_number_and_the_same_bits(overlap):
    requests = workload()
    engine = make_engine(max_concurrent=3, overlap=overlap)
    found = dict(engine.stream(requests))
    assert sorted(found) == list(range(len(requests)))
    assert [found[i].id for i in range(len(requests))] == [r.id for r in requests]
    assert trajectories(found.values()) == trajectories(make_engine().generate(requests))


def test_the_first_to_finish_comes_first():
    engine = make_engine(overlap=True)
    lengths = [9, 3, 6]
    order = [i for i, _ in engine.stream([request(f"r{i}", tokens(4, i), n) for i, n in enumerate(lengths)])]
    assert order == [1, 2, 0]


@pytest.mark.parametrize("overlap", [False, True])
def test_closed_early_the_engine_is_empty_and_usable(overlap):
    engine = make_engine(overlap=overlap, max_concurrent=4)
    completions = engine.stream(workload())
    next(completions)
    assert engine.scheduler.has_work
    completions.close()
    assert not engine.scheduler.has_work
    assert engine.allocator.num_free == engine.allocator.num_blocks
    assert trajectories(engine.generate(workload())) == trajectories(make_engine().generate(workload()))


def test_garbage_is_collected_while_the_caller_works():
    completions = make_engine().stream(workload())
    next(completions)
    assert gc.isenabled()
    completions.close()


def test_a_request_that_can_never_be_served_stops_all_before_any_work():
    engine = make_engine()
    with pytest.raises(RequestError, match="'bad'"):
        next(engine.stream([*workload(), request("bad", (), 4)]))
    assert not engine.scheduler.has_work
    assert engine.stats.steps == 0


def test_a_logit_that_is_not_finite_is_named_one_step_late_too():
    engine = make_engine(overlap=True)
    weight = engine.model.norm
    value = weight.value().clone()
    weight.assign(torch.full_like(value, float("nan")))
    with pytest.raises(NonFiniteError, match=r"request 'r0'.*position 4"):
        engine.generate([request("r0", tokens(4, 0), 5)])
    weight.assign(value)
    assert trajectories(engine.generate(workload())) == trajectories(make_engine().generate(workload()))


@pytest.mark.parametrize("overlap", [False, True])
def test_one_call_at_a_time(overlap):
    """A second one is refused, and the first one loses nothing."""
    engine, requests = make_engine(overlap=overlap, max_concurrent=3), workload()
    first = engine.stream(requests)
    found = dict([next(first)])
    others = [request("other", tokens(4, 1), 3)]
    for second in (lambda: engine.generate(others), lambda: next(engine.stream(others))):
        with pytest.raises(RequestError, match="one call at a time"):
            second()
    with pytest.raises(RequestError, match="probe cannot change"):
        engine.see = lambda name, x: x
    found.update(first)
    assert trajectories(found.values()) == trajectories(make_engine().generate(requests))


def test_a_step_without_work_does_nothing():
    assert make_engine(overlap=True).step() == []


def test_progress_that_raises_leaves_the_engine_usable():
    engine = make_engine(overlap=True)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(workload(), stop)
    assert engine.allocator.num_free == engine.allocator.num_blocks
    assert trajectories(engine.generate(workload())) == trajectories(make_engine().generate(workload()))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stop", [(), tuple(range(VOCAB))])
def test_a_stream_that_gave_everything_is_over(overlap, stop):
    """Whoever counted, and takes no more, may go on; what is left of the stream touches nothing."""
    engine = make_engine(overlap=overlap)
    first = engine.stream([request("a", tokens(4, 0), 5, stop=stop)])
    assert next(first)[1].weight_version == 0
    second = engine.stream(workload())
    found = dict([next(second)])
    first.close()
    found.update(second)
    assert trajectories(found.values()) == trajectories(make_engine().generate(workload()))


def test_completions_carry_the_version_that_made_them():
    engine = make_engine(overlap=True)
    weights = [(name, tensor.clone()) for name, tensor in named_weights(engine.model)]
    versions = []
    for _, completion in engine.stream([request(f"r{i}", tokens(4, i), 5) for i in range(3)]):
        versions.append(completion.weight_version)
        if len(versions) == 1:
            engine.load_weights(weights, 7)
    assert versions == [0, 0, 0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("x", (5.5,), 3), "token id 5.5 at position 0 is not an integer"),
        (request("x", (1, True), 3), "token id True at position 1"),
        (request("x", (1,), 2.5), "max_new_tokens 2.5 must be an integer"),
        (replace(request("x", (1,), 2), noise_key=2**64), "noise_key 18446744073709551616"),
    ],
)
def test_values_that_are_none_are_refused_before_any_work(bad, message):
    engine = make_engine()
    with pytest.raises(RequestError, match=message):
        engine.generate([*workload(), bad])
    assert engine.stats.steps == 0


def test_an_interrupt_while_the_last_step_is_computed_in_vain_leaves_the_engine_usable(monkeypatch):
    """Everything has ended by a stop token, and the step behind it is only waited for."""
    engine, launched = make_engine(overlap=True), []
    launch = type(engine.runner).launch

    def interrupted():
        raise KeyboardInterrupt

    def second_is_interrupted(runner, step):
        launched.append(launch(runner, step))
        return Computed(interrupted) if len(launched) == 2 else launched[-1]

    monkeypatch.setattr(type(engine.runner), "launch", second_is_interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([request("a", tokens(4, 0), 5, stop=tuple(range(VOCAB)))])
    assert len(launched) == 2, "the second step was computed in vain"
    assert engine.allocator.num_free == engine.allocator.num_blocks
    assert trajectories(engine.generate(workload())) == trajectories(make_engine().generate(workload()))


@pytest.mark.parametrize("operation", ["allocate", "acquire", "release"])
def test_an_interrupt_in_the_middle_of_the_books_leaves_the_engine_usable(monkeypatch, operation):
    """Done by the allocator, not yet known to its caller: a block that is lost, or released twice and then evicted
    while it is read."""
    engine, expected = make_engine(overlap=True, max_concurrent=3), trajectories(make_engine().generate(workload()))
    engine.generate(workload())
    real, calls = getattr(engine.allocator, operation), []

    def interrupted(*arguments):
        calls.append(real(*arguments))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return calls[-1]

    with monkeypatch.context() as patch:
        patch.setattr(engine.allocator, operation, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(workload())
    engine.scheduler.check_invariants()
    assert engine.allocator.num_free == engine.allocator.num_blocks
    assert trajectories(engine.generate(workload())) == expected


def test_a_closed_stream_and_a_refused_request_keep_the_prefix_cache():
    engine = make_engine()
    engine.generate(workload())
    completions = engine.stream(workload())
    next(completions)
    completions.close()
    with pytest.raises(RequestError):
        engine.generate([*workload(), request("bad", (), 4)])
    assert engine.allocator.match_prefix(workload()[0].token_ids)
