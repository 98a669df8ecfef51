"""Rewards by name: bundled ones, and users' own in every form that Python calls a function."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from exactrl.algo.algorithm import get_algorithm
from exactrl.algo.overlong import overlong_penalty
from exactrl.errors import ConfigError, DataError, UsageError
from exactrl.rl.shaping import Shaping, set_advantages
from exactrl.tasks.rewards import BUNDLED, resolve_reward, reward_many
from exactrl.tasks.task import DataTask
from exactrl.tasks.user_reward import MAX_CONCURRENT, RewardTimeout
from exactrl.types import Group, Prompt, Sample

SOURCE = """
import asyncio, functools, time
import numpy as np, torch
VALUES = {"bool": True, "int": 1, "numpy": np.float32(0.5), "tensor": torch.tensor(0.5), "flag": np.bool_(True),
          "dict": {"score": 1.0, "other": 2}, "text": "yes", "nothing": None, "nan": float("nan"), "empty": {},
          "two": np.array([1.0, 2.0]), "one": torch.tensor([1.0]), "complex": 1j, "nested": {"score": {"score": 1}},
          "tensor_in_dict": {"score": torch.tensor(0.25)}}
def value(sample): return VALUES[sample.text]
async def async_value(sample):
    await asyncio.sleep(0)
    return VALUES[sample.text]
def scaled(sample, scale): return scale * len(sample.text)
partial = functools.partial(scaled, scale=2)
async def async_scaled(sample, scale): return scale * len(sample.text)
async_partial = functools.partial(async_scaled, scale=2)
class Judge:
    def __call__(self, sample): return len(sample.text)
judge = Judge()
class AsyncJudge:
    async def __call__(self, sample): return len(sample.text)
async_judge = AsyncJudge()
def returns_awaitable(sample): return async_scaled(sample, 3)
running = most = 0
async def waits(sample):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.2)
    running -= 1
    return int(sample.text)
async def some_hang(sample):
    await asyncio.sleep(60 if sample.text == "hang" else 0)
    if sample.text == "bad": raise KeyError("x")
    if sample.text == "late": raise TimeoutError("its own")
    return 1
async def blocks(sample):
    time.sleep(5)
async def one_leaves(sample):
    if sample.text == "leave": raise SystemExit(3)
    if sample.text == "cancel": raise asyncio.CancelledError
    return 1
def leaves(sample): raise SystemExit(3)
def sleeps(sample): time.sleep(5)
"""
PROMPT = Prompt("p", "", (1,), "7")


def sample(text: str | None, index: int = 0, tokens: int = 0, **fields) -> Sample:
    ids = list(range(tokens))
    return Sample("p", index, (), ids, np.zeros(tokens, np.float32), "stop", 0, 1.0, text=text, **fields)


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    (tmp_path / "odd_rewards.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "odd_rewards", raising=False)


def named(function: str, timeout_s: float = 5.0, key: str = ""):
    return resolve_reward(f"odd_rewards:{function}", timeout_s, key)


@pytest.mark.parametrize("function", ["value", "async_value"])
@pytest.mark.parametrize(
    ("text", "expected"), [("bool", 1.0), ("int", 1.0), ("numpy", 0.5), ("tensor", 0.5), ("flag", 1.0)]
)
def test_D_09_numbers_of_every_kind_become_float(function, text, expected):
    value = named(function)(PROMPT, sample(text))
    assert type(value) is float
    assert value == expected


@pytest.mark.parametrize("function", ["value", "async_value"])
@pytest.mark.parametrize("text", ["text", "nothing", "nan", "two", "one", "complex"])
def test_D_09_anything_else_is_an_error_that_names_the_function(function, text):
    with pytest.raises(
        UsageError, match=rf"odd_rewards:{function}.*returned .* sample p#0; it must be a finite number"
    ):
        named(function)(PROMPT, sample(text))


@pytest.mark.parametrize("function", ["value", "async_value"])
def test_D_09_a_dict_only_with_the_configured_key(function):
    assert named(function, key="score")(PROMPT, sample("dict")) == 1.0
    assert named(function, key="score")(PROMPT, sample("tensor_in_dict")) == 0.25
    assert named(function, key="score")(PROMPT, sample("int")) == 1.0
    with pytest.raises(UsageError, match=r"odd_rewards:.*dict with 'score', 'other'.*name the entry.*reward\.key"):
        named(function)(PROMPT, sample("dict"))
    with pytest.raises(UsageError, match="it has no 'reward'"):
        named(function, key="reward")(PROMPT, sample("dict"))
    with pytest.raises(UsageError, match="dict with nothing"):
        named(function, key="score")(PROMPT, sample("empty"))
    with pytest.raises(UsageError, match="must be a finite number"):
        named(function, key="score")(PROMPT, sample("nested"))


@pytest.mark.parametrize(
    ("function", "expected"),
    [("partial", 8.0), ("async_partial", 8.0), ("judge", 4.0), ("async_judge", 4.0), ("returns_awaitable", 12.0)],
)
def test_D_43_partials_and_callable_objects_work_and_have_a_name(function, expected):
    reward = named(function)
    assert reward(PROMPT, sample("four")) == expected
    assert [scored.value for scored in reward_many(reward, [(PROMPT, sample("four"))] * 3)] == [expected] * 3
    assert reward.__name__ == f"odd_rewards:{function}"


def test_async_rewards_wait_together_in_order():
    reward = named("waits")
    begin = time.monotonic()
    scored = reward_many(reward, [(PROMPT, sample(str(i), i)) for i in range(100)])
    assert [one.value for one in scored] == list(range(100))
    assert time.monotonic() - begin < 100 * 0.2 / 4
    assert reward.function.__globals__["most"] == MAX_CONCURRENT


def test_async_failures_stay_with_their_sample():
    texts = ["ok", "hang", "bad", "late", "ok"]
    scored = reward_many(named("some_hang", 0.3), [(PROMPT, sample(text, i)) for i, text in enumerate(texts)])
    assert [one.value for one in scored] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert [one.reason for one in scored] == ["", "timeout", "", "", ""]
    assert [type(one.error) for one in scored] == [type(None), RewardTimeout, KeyError, TimeoutError, type(None)]
    assert "longer than 0.3 s for sample p#1" in str(scored[1].error)


@pytest.mark.parametrize("function", ["sleeps", "blocks"])
def test_a_reward_that_blocks_its_thread_ends_at_the_limit(function):
    begin = time.monotonic()
    with pytest.raises(RewardTimeout, match=rf"odd_rewards:{function}.*reward\.timeout_s"):
        named(function, 0.2)(PROMPT, sample(""))
    assert time.monotonic() - begin < 3


def test_async_rewards_work_where_an_event_loop_runs_already():
    async def inside():
        return named("async_partial")(PROMPT, sample("four"))

    assert asyncio.run(inside()) == 8.0


def test_a_reward_that_exits_does_not_end_the_run():
    with pytest.raises(UsageError, match="ended with SystemExit"):
        named("leaves")(PROMPT, sample(""))


def test_an_async_reward_that_exits_fails_for_its_own_sample_only(capfd):
    texts = ["ok", "leave", "cancel", "ok"]
    scored = reward_many(named("one_leaves"), [(PROMPT, sample(text, i)) for i, text in enumerate(texts)])
    assert [one.value for one in scored] == [1.0, 0.0, 0.0, 1.0]
    assert [one.reason for one in scored] == [""] * 4
    assert [str(one.error).split(" ended with ")[-1] for one in scored[1:3]] == [
        "SystemExit: 3 for p#1",
        "CancelledError:  for p#2",
    ]
    assert capfd.readouterr().err == ""


def test_math_and_dapo_by_name():
    math, dapo = resolve_reward("math"), resolve_reward("dapo")
    cases = [(r"\boxed{7.0}", 1.0, -1.0), ("Answer: 7", 0.0, 1.0), ("Answer: \\boxed{7}", 1.0, 1.0), ("7", 0.0, -1.0)]
    for text, by_math, by_dapo in cases:
        assert (math(PROMPT, sample(text)), dapo(PROMPT, sample(text))) == (by_math, by_dapo), text
    assert math(PROMPT, sample(None)) == 0.0
    pairs = [(PROMPT, sample(text)) for text, _, _ in cases]
    assert [one.value for one in reward_many(math, pairs)] == [by_math for _, by_math, _ in cases]
    assert [one.reason for one in reward_many(math, pairs)] == ["equal", "no_answer", "equal", "no_answer"]
    assert set(BUNDLED) == {"math", "dapo", "arithmetic"}


@pytest.mark.parametrize("name", ["math", "dapo"])
def test_an_empty_label_is_an_error_of_the_data(name):
    prompt = Prompt("q", "", (1,), " ")
    with pytest.raises(DataError, match=r"'q': the label is empty.*data\.label_key"):
        resolve_reward(name)(prompt, sample(r"\boxed{7} Answer: 7"))
    scored = reward_many(resolve_reward(name), [(PROMPT, sample("Answer: \\boxed{7}")), (prompt, sample("7"))])
    assert (scored[0].value, scored[0].error, type(scored[1].error)) == (1.0, None, DataError)


def test_a_timeout_of_the_grader_is_a_reason_and_no_error():
    prompt = Prompt("q", "", (1,), r"\pi")
    hang = sample(r"\boxed{\binom{20000000}{10000000}}")
    scored = reward_many(resolve_reward("math", 0.5), [(prompt, hang), (prompt, sample(r"\boxed{\pi}"))])
    assert [(one.value, one.reason, one.error) for one in scored] == [(0.0, "timeout", None), (1.0, "equal", None)]


def test_a_task_gives_rewards_in_one_batch(tokenizer):
    task = DataTask([PROMPT], {}, tokenizer, resolve_reward("math"))
    assert [one.value for one in task.rewards([(PROMPT, sample(r"\boxed{7}")), (PROMPT, sample(r"\boxed{8}"))])] == [
        1,
        0,
    ]
    plain = DataTask([PROMPT], {}, tokenizer, lambda prompt, sample: 1 / len(sample.text))
    scored = plain.rewards([(PROMPT, sample("ab")), (PROMPT, sample(""))])
    assert (scored[0].value, type(scored[1].error)) == (0.5, ZeroDivisionError)


def test_rewards_from_many_threads():
    reward, found = resolve_reward("math"), {}
    work = lambda i: found.update({i: reward(PROMPT, sample(rf"\boxed{{{i}+\sqrt{{4}}}}"))})  # noqa: E731
    threads = [threading.Thread(target=work, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: float(i == 5) for i in range(10)}


def test_D_45_lengths_are_counted_in_tokens_not_characters():
    """9 characters, 3 tokens, limit 4 with a cache of 1: no penalty, and nothing is filtered."""
    samples = [sample("123456789", i, tokens=3, reward=float(i)) for i in range(2)]
    set_advantages([Group(PROMPT, samples)], get_algorithm("dr_grpo"), Shaping(4, 1, overlong_filter=True))
    assert [one.advantage for one in samples] == [-0.5, 0.5]
    assert all(one.in_loss for one in samples)
    assert overlong_penalty(3, 4, 1) == 0
    assert overlong_penalty(9, 4, 1) == -1


def test_unknown_names_list_the_bundled_ones():
    with pytest.raises(ConfigError, match="use 'math', 'dapo', 'arithmetic' or 'module:function'"):
        resolve_reward("maths")
