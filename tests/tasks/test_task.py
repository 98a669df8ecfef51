from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactrl.errors import ConfigError, DataError, UsageError
from exactrl.tasks import arithmetic
from exactrl.tasks.rewards import resolve_reward
from exactrl.tasks.task import DataTask, epoch_order
from exactrl.types import Prompt, Sample

SAMPLE = Sample("p", 2, (), [], np.zeros(0, np.float32), "stop", 0, 1.0, text="Answer: 7", label="7")


def task(tokenizer, size: int, **options) -> DataTask:
    prompts = [Prompt(str(i), f"{i}", (1,), "7") for i in range(size)]
    return DataTask(prompts, {"held": prompts[:2]}, tokenizer, resolve_reward("arithmetic"), **options)


@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 2**40))
def test_every_epoch_holds_every_prompt_once(tokenizer, size, count, seed):
    one = task(tokenizer, size, seed=seed)
    drawn = [p for step in range(size) for p in one.train_prompts(step, count)]
    assert len(drawn) == size * count
    for epoch in range(count):
        texts = [p.text for p in drawn[epoch * size : (epoch + 1) * size]]
        assert texts == [str(i) for i in epoch_order(size, seed, epoch)]
        assert sorted(texts, key=int) == [str(i) for i in range(size)]


@given(st.integers(0, 50), st.integers(1, 30))
def test_steps_are_pure_and_ids_unique_within_one(tokenizer, step, count):
    one = task(tokenizer, 7, seed=5)
    ids = [p.id for p in one.train_prompts(step, count)]
    one.train_prompts(3, 4)
    assert ids == [p.id for p in one.train_prompts(step, count)]
    assert ids == [p.id for p in task(tokenizer, 7, seed=5).train_prompts(step, count)]
    assert len(set(ids)) == count


def test_file_order_without_shuffle(tokenizer):
    one = task(tokenizer, 5, shuffle=False)
    assert [p.id for p in one.train_prompts(1, 3)] == ["3", "4", "0"]
    assert [p.id for p in one.train_prompts(0, 7)] == ["0", "1", "2", "3", "4", "0@epoch1", "1@epoch1"]


def test_order_depends_on_seed_and_epoch():
    assert epoch_order(8, 0, 0) == (6, 5, 7, 4, 1, 0, 3, 2)  # fixed: a resumed run must see this order for ever
    assert len({epoch_order(50, seed, epoch) for seed in range(3) for epoch in range(3)}) == 9


def test_rest_of_the_protocol(tokenizer):
    one = task(tokenizer, 3)
    assert [p.id for p in one.eval_prompts()["held"]] == ["0", "1"]
    assert one.decode(tokenizer.encode("Answer: 7<|im_end|>")) == "Answer: 7"
    assert one.reward(one.train_prompts(0, 1)[0], SAMPLE) == 1.0
    with pytest.raises(DataError, match="no prompts"):
        DataTask([], {}, tokenizer, arithmetic.reward)


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "import numpy as np\n"
        "def length(sample): return len(sample.text)\n"
        "def small(sample): return np.float32(0.5)\n"
        "def nan(sample): return float('nan')\n"
        "def nothing(sample): pass\n"
        "def broken(sample): raise KeyError('x')\n"
        "number = 3\n"
    )
    (tmp_path / "my_broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))


PROMPT = Prompt("p", "", (1,), "7")


@pytest.mark.usefixtures("user_module")
def test_user_rewards():
    assert resolve_reward("arithmetic") is arithmetic.reward
    assert resolve_reward("my_rewards:length")(PROMPT, SAMPLE) == 9.0
    assert resolve_reward("my_rewards:small")(PROMPT, SAMPLE) == 0.5
    for name in ("nan", "nothing"):
        with pytest.raises(UsageError, match=rf"my_rewards:{name}.*returned .* sample p#2; it must be a finite number"):
            resolve_reward(f"my_rewards:{name}")(PROMPT, SAMPLE)
    with pytest.raises(KeyError):
        resolve_reward("my_rewards:broken")(PROMPT, SAMPLE)


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("arithmetics", "unknown; use 'math', 'dapo', 'arithmetic' or 'module:function'"),
        (":f", "unknown"),
        ("m:", "unknown"),
        ("no_such_module_x:f", "cannot be imported .*PYTHONPATH"),
        ("my_broken:f", "cannot be imported .ZeroDivisionError"),
        ("..:f", "cannot be imported"),
        ("my_rewards:absent", "has no 'absent'"),
        ("my_rewards:number", "is a int, not a function"),
    ],
)
def test_unusable_rewards(name, message):
    with pytest.raises(ConfigError, match=message):
        resolve_reward(name)
