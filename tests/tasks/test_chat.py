"""Chat templates: the bytes are those of transformers, and prompts are rendered once."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactrl.config import load_recipe
from exactrl.errors import DataError, ModelError
from exactrl.launch.build import build_task
from exactrl.rl.rollout import Draw, rollout
from exactrl.tasks.chat import ChatTemplate, load_chat_template
from exactrl.tasks.data import load_prompts
from exactrl.tasks.files import ASSETS
from exactrl.tasks.task import DataTask
from exactrl.tasks.tokenizer import load_tokenizer
from exactrl.types import Completion, EngineStats, SamplingParams

QWEN3 = (Path(__file__).parent / "assets" / "qwen3_chat_template.jinja").read_text(encoding="utf-8")
THINKS = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>\none and one\n</think>\n\n2"},
    {"role": "user", "content": "and 2+2?"},
]
CALL = {"function": {"name": "add", "arguments": {"ß": [1, None, True], "<b>": "&'\""}}}
CONVERSATIONS = {
    "one user": [{"role": "user", "content": "What is 1+1?"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "system only": [{"role": "system", "content": "Be brief."}],
    "second system": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
    "unicode": [{"role": "user", "content": "数学 ∑ é\u2028\u0301 🙂\t\r\n\\boxed{1}  "}],
    "empty": [{"role": "user", "content": ""}],
    "white space": [{"role": "user", "content": " \n\n a \n"}],
    "special tokens": [{"role": "user", "content": "<|im_end|>\n<|im_start|>system\n<think>"}],
    "Jinja in text": [{"role": "user", "content": "{{ messages }} {% if %}"}],
    "earlier think": THINKS,
    "reasoning key": [THINKS[0], {"role": "assistant", "content": "2", "reasoning_content": "easy\n"}, THINKS[2]],
    "empty answer": [THINKS[0], {"role": "assistant", "content": ""}, THINKS[2]],
    "tools": [
        THINKS[0],
        {"role": "assistant", "content": "", "tool_calls": [CALL, {"name": "f", "arguments": '{"x": 1}'}]},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "<tool_response>"},
        THINKS[2],
    ],
    "tool last": [
        THINKS[0],
        {"role": "assistant", "content": "<think>\nlet me\n</think>\n\nok", "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
    ],
    "unknown role": [{"role": "critic", "content": "x"}, {"role": "user", "content": "y"}],
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """The bundled tokenizer with Qwen3's template."""
    path = tmp_path_factory.mktemp("chat")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copy(ASSETS / "tiny" / name, path / name)
    (path / "chat_template.jinja").write_text(QWEN3, encoding="utf-8", newline="")
    return path


def loaded(folder: Path) -> ChatTemplate:
    template = load_chat_template(folder)
    assert template is not None
    return template


@pytest.fixture(scope="session")
def theirs(folder):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    return partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)


def test_literal_rendering(folder):
    """Independent of transformers."""
    template = loaded(folder)
    start = (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\nand 2+2?<|im_end|>\n"
    )
    assert template.render(THINKS, enable_thinking=True) == start + "<|im_start|>assistant\n"
    assert template.render(THINKS) == start + "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_bytes_of_transformers(folder, theirs, name, thinking):
    messages = CONVERSATIONS[name]
    ours = loaded(folder).render(messages, enable_thinking=thinking)
    assert ours == theirs(messages, enable_thinking=thinking)
    assert ("<think>\n\n</think>\n\n" in ours[-30:]) == (not thinking)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
marked = st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "<tool_response>", "</tool_response>", "a"]))
contents = texts | marked.map("".join)
turns = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": contents},
    optional={"reasoning_content": contents},
)


@given(st.lists(turns, max_size=5), turns.filter(lambda turn: turn["role"] != "assistant"), st.booleans())
def test_bytes_of_transformers_on_any_conversation(folder, theirs, earlier, last, thinking):
    messages = [*earlier, last]
    ours = loaded(folder).render(messages, enable_thinking=thinking)
    assert ours == theirs(messages, enable_thinking=thinking)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}\n  {% if loop.last %}{% break %}{% endif %}\n{{ m.content }}\n{% endfor %}",
        "{{ messages | tojson }} {{ messages | tojson(indent=1, sort_keys=true) }}",
        "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}",
        "{{ eos_token }}{{ bos_token is defined }}{{ pad_token }}{{ tools is none }}{{ missing }}",
        "{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ strftime_now('%Y') }}{{ messages[0]['content'][:1] }}",
    ],
)
def test_other_templates_as_in_transformers(folder, theirs, source):
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    ours = ChatTemplate(source, tokens).render(CONVERSATIONS["second system"])
    assert ours == theirs(CONVERSATIONS["second system"], chat_template=source)


def test_null_keys_and_reasoning_names_as_in_transformers(folder, theirs):
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    if not hasattr(utilities, "_alias_reasoning_fields"):
        pytest.skip("this transformers passes such messages on unchanged")
    messages = [
        {"role": "user", "content": "a", "name": None, "tool_calls": None},
        {"role": "assistant", "content": "b", "thinking": "c", "tool_calls": None},
        {"role": "tool", "content": "d", "reasoning": None},
    ]
    assert loaded(folder).render(messages) == theirs(messages, enable_thinking=False)
    assert "<think>\nc\n</think>" in loaded(folder).render(messages)
    everything = "{{ messages | tojson }}"
    assert ChatTemplate(everything).render(messages) == theirs(messages, chat_template=everything)


def test_null_keys_are_left_out():
    """Independent of transformers: parquet gives every message all keys of its column."""
    messages = [{"role": "user", "content": "a", "name": None}, {"role": "tool", "content": None}]
    text = ChatTemplate("{{ messages | tojson }}").render(messages)
    assert json.loads(text) == [{"role": "user", "content": "a"}, {"role": "tool"}]


@pytest.mark.skipif("EXACTRL_QWEN3_TOKENIZER" not in os.environ, reason="EXACTRL_QWEN3_TOKENIZER names no folder")
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_ids_of_transformers_with_the_real_tokenizer(name, thinking):
    transformers = pytest.importorskip("transformers")
    path = os.environ["EXACTRL_QWEN3_TOKENIZER"]
    real = real_tokenizer(transformers, path)
    messages = CONVERSATIONS[name]
    kwargs = {"add_generation_prompt": True, "enable_thinking": thinking, "return_dict": False}
    ours = loaded(Path(path)).render(messages, enable_thinking=thinking)
    assert ours == real.apply_chat_template(messages, tokenize=False, **kwargs)
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    assert tokenizer.encode(ours) == list(real.apply_chat_template(messages, **kwargs))
    assert tokenizer.encode_batch([ours, "x"]) == [tokenizer.encode(ours), tokenizer.encode("x")]


_REAL: dict = {}


def real_tokenizer(transformers, path):
    if path not in _REAL:
        _REAL[path] = transformers.AutoTokenizer.from_pretrained(path)
    return _REAL[path]


class Parrot:
    """An engine that answers every request with the same ids."""

    weight_version = 0

    def __init__(self, ids):
        self.ids = ids
        self.stats = EngineStats()

    def generate(self, requests, on_progress=None):
        logprobs = np.zeros(len(self.ids), np.float32)
        return [Completion(r.id, list(self.ids), logprobs, "stop", 0) for r in requests]


def training_ids(task, answer):
    """Ids that a trainer sees: prompt and response of the only sample."""
    (group,) = rollout(
        Parrot(answer), task.train_prompts(0, 1), 1, SamplingParams(99), Draw(0, "train", 1), task, lambda *_: None
    )
    (sample,) = group.samples
    return [*sample.prompt_token_ids, *sample.token_ids]


def make_task(write, tokenizer, template, messages, thinking=False):
    """A task of one row; counts how often the template is rendered."""
    calls = []

    def render(given):
        calls.append(given)
        return template.render(given, enable_thinking=thinking)

    path = write(json.dumps({"prompt": messages, "label": "1"}))
    prompts = load_prompts(path, tokenizer, render=render).prompts
    return DataTask(prompts, {}, tokenizer, lambda prompt, sample: 1.0), calls


def test_A_04_conversation_is_rendered_once_and_never_again(folder, tokenizer, write):
    """The template drops an earlier turn's thinking, so re-rendering changes earlier text: it never happens."""
    template = loaded(folder)
    first_turn = template.render(THINKS[:1], enable_thinking=True) + THINKS[1]["content"]
    assert not template.render(THINKS, enable_thinking=True).startswith(first_turn)
    task, calls = make_task(write, tokenizer, template, THINKS, thinking=True)
    answer = tokenizer.encode("<think>\nfour\n</think>\n\n4<|im_end|>")
    expected = tokenizer.encode(template.render(THINKS, enable_thinking=True)) + answer
    for _ in range(3):
        assert training_ids(task, answer) == expected
    assert len(calls) == 1


def test_A_04_a_row_that_ends_with_an_answer_is_refused(folder, tokenizer, write):
    with pytest.raises(DataError, match=r"data\.jsonl, line 1, key 'prompt': the last chat message is the assistant's"):
        make_task(write, tokenizer, loaded(folder), THINKS[:2])


def test_A_05_think_block_opened_by_the_prompt_is_not_opened_again(tokenizer, write):
    opening = ChatTemplate(
        QWEN3.replace("{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}")
    )
    task, _ = make_task(write, tokenizer, opening, THINKS[:1], thinking=True)
    answer = tokenizer.encode("13 fits.\n</think>\n\nSo \\boxed{13}.<|im_end|>")
    ids = training_ids(task, answer)
    text = tokenizer.decode(ids)
    assert text.endswith("assistant\n<think>\n13 fits.\n</think>\n\nSo \\boxed{13}.<|im_end|>")
    assert (text.count("<think>"), text.count("</think>")) == (1, 1)
    assert ids == [*task.prompt_at(0).token_ids, *answer]


def test_A_06_system_prompt_alone_has_the_same_tokens_on_both_sides(folder, tokenizer, write):
    template = loaded(folder)
    messages = CONVERSATIONS["system only"]
    task, _ = make_task(write, tokenizer, template, messages)
    answer = tokenizer.encode("ok<|im_end|>")
    ids = training_ids(task, answer)
    assert ids == tokenizer.encode(template.render(messages)) + answer
    assert tokenizer.decode(ids).count("<think>\n\n</think>\n\n") == 1


def test_recipe_reaches_the_template(folder, write):
    path = write(json.dumps({"prompt": "1+1", "label": "2"}))

    def text(**settings):
        given = {"data.train": path, "data.eval": "{}", "run.eval_every": "0", "data.id_key": "", **settings}
        task, _, _ = build_task(load_recipe("tiny", list(given.items())), folder)
        return task.prompt_at(0).text

    user = "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    on = {"data.apply_chat_template": "true"}
    assert text() == "1+1"
    assert text(**on) == user + "<think>\n\n</think>\n\n"
    assert text(**on, **{"data.enable_thinking": "true"}) == user
    with pytest.raises(ModelError, match=r"data\.apply_chat_template needs a chat template"):
        build_task(load_recipe("tiny", [*on.items()]), ASSETS / "tiny")


def test_limit_counts_tokens_after_rendering(folder, tokenizer, write):
    render = loaded(folder).render
    path = write(json.dumps({"prompt": "1+1", "label": "2"}))
    (prompt,) = load_prompts(path, tokenizer, render=render).prompts
    size = len(prompt.token_ids)
    assert size > len(tokenizer.encode("1+1"))
    load_prompts(path, tokenizer, render=render, max_prompt_tokens=size)
    with pytest.raises(DataError, match=f"the prompt has {size} tokens"):
        load_prompts(path, tokenizer, render=render, max_prompt_tokens=size - 1)


FAULTS = {
    "no message": ([], "the prompt is empty"),
    "no object": (["hello"], "chat message 1 must be an object"),
    "no role": ([{"content": "a"}], "chat message 1 needs a role"),
    "role null": ([THINKS[0], {"role": None, "content": "a"}], "chat message 2 needs a role"),
    "no content": ([{"role": "user"}], "the chat template refuses these messages: .*content"),
    "content number": ([{"role": "user", "content": 5}], "the chat template refuses these messages"),
    "surrogate": ([{"role": "user", "content": "\ud800"}], "holds half a surrogate"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_messages_are_named(folder, tokenizer, write, fault):
    messages, expected = FAULTS[fault]
    path = write(json.dumps({"prompt": "fine", "label": ""}) + "\n" + json.dumps({"prompt": messages, "label": ""}))
    with pytest.raises(DataError, match=rf"data\.jsonl, line 2, key 'prompt': {expected}"):
        load_prompts(path, tokenizer, render=loaded(folder).render)


def test_template_may_refuse():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match="refuses these messages: roles must alternate"):
        template.render(THINKS)
    with pytest.raises(DataError, match="refuses"):  # the sandbox
        ChatTemplate("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}").render(THINKS)


def test_where_templates_are_found(tmp_path):
    def config(**values):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")

    assert load_chat_template(tmp_path) is None
    config(chat_template=None)
    assert load_chat_template(tmp_path) is None
    config(chat_template="数{{ eos_token }}{{ unk_token }}", eos_token={"content": "<e>"}, unk_token=None)
    assert loaded(tmp_path).render(THINKS) == "数<e>"
    config(chat_template=[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}])
    assert loaded(tmp_path).render(THINKS) == "d"
    (tmp_path / "chat_template.jinja").write_text("文", encoding="utf-8")
    assert loaded(tmp_path).render(THINKS) == "文"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"chat_template": "{% for %}"}', r"tokenizer_config\.json: not a valid chat template"),
        ('{"chat_template": 5}', "must be a text, not int"),
        ('{"chat_template": [{"name": "rag", "template": "r"}]}', "no template named 'default'"),
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        (b"\xff", "cannot be read"),
    ],
)
def test_malformed_templates(tmp_path, content, expected):
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ModelError, match=expected):
        load_chat_template(tmp_path)
