"""kill -9 at any moment, resume: the run is the one that was never interrupted.

Children are started by a fork server that has imported everything once; each goes on in the folder of the one before
until a run is complete. Half of them are killed by a clock, the others from within, at one of the system calls that a
checkpoint is made of.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from exactrl import launch
from exactrl.config import load_recipe
from exactrl.train import checkpoint

KILLS = 20
STEPS = 5


def config(out: Path, exact: bool = True):
    settings = {
        "run.steps": STEPS, "run.eval_every": 2, "run.audit_every": 2, "run.checkpoint_every": 1, "run.out": str(out),
        "rollout.prompts_per_step": 3, "rollout.samples_per_prompt": 4, "rollout.max_new_tokens": 16,
        "rollout.kv_tokens": 256, "train.minibatches": 2, "train.dynamic_sampling": "true", "train.kl_coef": 0.1,
        "train.lr_schedule": "linear", "rollout.temperature": 1.5,
        "data.train": "bundled:arithmetic/train.jsonl@[0:40]",
        "data.eval.heldout": "bundled:arithmetic/heldout.jsonl@[0:8]", "reward.name": "tests.rl.test_kill:length",
    }  # fmt: skip
    return load_recipe("tiny", [(k, str(v)) for k, v in settings.items()])


def length(sample) -> float:
    """A reward whose groups often differ."""
    return float(sum(sample.token_ids) % 7)


CALLS = (
    (os, "fsync"),
    (Path, "rename"),
    (Path, "replace"),
    (Path, "unlink"),
    (Path, "mkdir"),
    (checkpoint, "save_file"),
)


def child(out: Path, call: int) -> None:
    """Resumes the run in `out`; with call > 0 it is killed at the call-th of CALLS."""
    torch.set_num_threads(1)
    if call:
        _count_calls(lambda n: os.kill(os.getpid(), signal.SIGKILL) if n == call else None)
    launch.train(config(out), resume=True)


def _count_calls(seen) -> None:
    numbers = itertools.count(1)
    for owner, name in CALLS:
        setattr(owner, name, _counted(getattr(owner, name), numbers, seen))


def _counted(function, numbers, seen):
    def wrapper(*args, **kwargs):
        seen(next(numbers))
        return function(*args, **kwargs)

    return wrapper


def what_counts(out: Path) -> tuple:
    """Rows without times and without what a scheduler may do differently, sample files, and the last state.json."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]
    samples = {p.name: p.read_bytes() for p in (out / "samples").iterdir()}
    state = json.loads((out / f"checkpoints/step_{STEPS:06d}/state.json").read_text())
    return rows, samples, state


def different(a, b, place: str = "") -> list[str]:
    """Where two nested values differ."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [line for key in a for line in different(a[key], b[key], f"{place}/{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [line for i, pair in enumerate(zip(a, b, strict=True)) for line in different(*pair, f"{place}/{i}")]
    return [] if a == b else [f"{place}: {str(a)[:200]} and {str(b)[:200]}"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What counts of a run in one piece, the seconds it took, and how many of CALLS it made."""
    out, numbers, begin = tmp_path_factory.mktemp("whole") / "run", [0], time.monotonic()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = [getattr(owner, name) for owner, name in CALLS]
    _count_calls(numbers.append)
    try:
        launch.train(config(out))
    finally:
        torch.set_num_threads(threads)
        for (owner, name), function in zip(CALLS, before, strict=True):
            setattr(owner, name, function)
    return what_counts(out), time.monotonic() - begin, max(numbers)


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path, uninterrupted):
    expected, seconds, calls = uninterrupted
    assert len(expected[0]) == STEPS
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["exactrl.launch", "tests.rl.test_kill"])
    rng = random.Random(0)
    number, kills, complete, moments = 0, [0, 0], 0, []
    while sum(kills) < KILLS or not complete:
        out = tmp_path / f"run{complete}"
        by_call = number % 2
        done = sum(kills) >= KILLS
        process = context.Process(target=child, args=(out, rng.randrange(1, calls) if by_call and not done else 0))
        process.start()
        process.join(timeout=120 if by_call or done else rng.uniform(0.3, 1.2 * seconds))
        if process.exitcode is None:
            process.kill()
            process.join()
        number += 1
        if process.exitcode == -signal.SIGKILL:
            kills[by_call] += 1
            half = bool(list(out.glob("checkpoints/.*.tmp-*")))
            moments.append((len(list(out.glob("checkpoints/step_*"))), half))
            continue
        assert process.exitcode == 0
        for mine, whole in zip(what_counts(out), expected, strict=True):
            assert different(mine, whole) == []
        assert not list(out.glob("**/.*.tmp-*"))
        complete += 1
    assert any(half for _, half in moments), "no kill came while a checkpoint was being written"
    assert len({count for count, _ in moments}) > 1
    print(f"{kills} kills (clock, call), {complete} runs completed; (checkpoints, one half-written): {moments}")
