from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactrl.errors import ConfigError, DataError, UsageError
from exactrl.tasks import arithmetic
from exactrl.tasks.rewards import resolve_reward
from exactrl.tasks.task import DataTask, epoch_order
from exactrl.types import Prompt, Sample, Scored

SAMPLE = Sample("p", 2, (), [], np.zeros(0, np.float32), "stop", 0, 1.0, text="Answer: 7", label="7")


def task(tokenizer, size: int, **options) -> DataTask:
    prompts = [Prompt(str(i), f"{i}", (1,), "7") for i in range(size)]
    return DataTask(prompts, {"held": prompts[:2]}, tokenizer, resolve_reward("arithmetic"), **options)


@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 2**40))
def test_every_epoch_holds_every_prompt_once(tokenizer, size, count, seed):
    one = task(tokenizer, size, seed=seed)
    drawn = [p for step in range(size) for p in one.train_prompts(step * count, count)]
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
    assert [p.id for p in one.train_prompts(3, 3)] == ["3", "4", "0"]
    assert [p.id for p in one.train_prompts(0, 7)] == ["0", "1", "2", "3", "4", "0@epoch1", "1@epoch1"]


def test_order_depends_on_seed_and_epoch():
    assert epoch_order(8, 0, 0) == (6, 5, 7, 4, 1, 0, 3, 2)  # fixed: a resumed run must see this order for ever
    assert len({epoch_order(50, seed, epoch) for seed in range(3) for epoch in range(3)}) == 9


def test_order_of_large_sets():
    """Fixed, too: numpy keeps the raw stream of its generators. Another definition than below BLAKE2_BELOW."""
    size = 2**16
    order = epoch_order(size, 0, 0)
    assert order[:6].tolist() == [57735, 60479, 50754, 35718, 4921, 25679]  # as above, for ever
    assert sorted(order.tolist()) == list(range(size))
    stream = np.random.Philox(key=int.from_bytes(hashlib.blake2b(bytes(16), digest_size=16).digest(), "little"))
    assert order[0] == int(np.argmin(stream.random_raw(size)))
    assert type(epoch_order(size - 1, 0, 0)) is tuple
    assert len({tuple(epoch_order(size, s, e)[:9].tolist()) for s in range(3) for e in range(3)}) == 9


def test_a_large_position_is_cheap_and_equals_a_walk(tokenizer):
    one = task(tokenizer, 7, seed=2)
    walked = [one.prompt_at(i).id for i in range(70)]
    assert [p.id.partition("@")[0] for step in range(10) for p in one.train_prompts(7 * step, 7)] == walked
    assert one.prompt_at(7 * 10**12).id == str(epoch_order(7, 2, 10**12)[0])


def test_rest_of_the_protocol(tokenizer):
    one = task(tokenizer, 3)
    assert [p.id for p in one.eval_prompts()["held"]] == ["0", "1"]
    long = [Prompt("a", "", (1, 2), ""), Prompt("b", "", (1, 2, 3), "")]
    assert DataTask(long[:1], {"held": long}, tokenizer, arithmetic.reward).longest_prompt() is long[1]
    assert one.decode(tokenizer.encode("Answer: 7<|im_end|>")) == "Answer: 7"
    assert one.rewards([(one.train_prompts(0, 1)[0], SAMPLE)]) == [Scored(1.0, "", None)]
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
