from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactrl.errors import DataError
from exactrl.tasks.data import load_prompts
from exactrl.tasks.files import read_rows, split_slice

GOOD = '{"prompt": "1+1", "label": "2"}\n'


def test_rows_become_prompts(tokenizer, write):
    path = write('{"q": "1+1\\n", "a": 2, "name": "x", "level": {"n": 1}}\n\n{"q": "é", "a": "y", "name": 7}')
    first, second = load_prompts(path, tokenizer, prompt_key="q", label_key="a", id_key="name").prompts
    assert (first.id, first.text, first.label, first.metadata) == ("x", "1+1\n", "2", {"level": {"n": 1}})
    assert first.token_ids == tuple(tokenizer.encode("1+1\n"))
    assert (second.id, second.label, second.metadata) == ("7", "y", {})
    assert tokenizer.decode(second.token_ids) == "<|unk|>"


def test_json_array_and_dotted_key(tokenizer, write):
    path = write(json.dumps([{"prompt": "a", "reward_model": {"ground_truth": 1.5}}]), "data.json")
    (prompt,) = load_prompts(path, tokenizer, label_key="reward_model.ground_truth").prompts
    assert (prompt.id, prompt.label) == ("0", "1.5")


def test_line_separators_inside_strings_do_not_split_rows(tokenizer, write):
    path = write('{"prompt": "a\u2028b\u0085c", "label": "1"}\r\n' + GOOD)
    assert [p.text for p in load_prompts(path, tokenizer).prompts] == ["a\u2028b\u0085c", "1+1"]


@given(st.integers(1, 8), st.none() | st.integers(-9, 9), st.none() | st.integers(-9, 9))
def test_slices_follow_python(tmp_path_factory, size, start, stop):
    path = tmp_path_factory.mktemp("slices") / "data.jsonl"
    path.write_text("".join(f'{{"n": {i}}}\n' for i in range(size)))
    expected = list(range(size))[start:stop]
    spec = f"{path}@[{'' if start is None else start}:{'' if stop is None else stop}]"
    if expected:
        rows = read_rows(spec)
        assert [r.value["n"] for r in rows] == [r.index for r in rows] == expected
    else:
        with pytest.raises(DataError, match="holds no rows; the file has"):
            read_rows(spec)


def test_default_ids_count_before_slicing(tokenizer, write):
    path = write(GOOD * 4)
    assert [p.id for p in load_prompts(f"{path}@[-2:]", tokenizer).prompts] == ["2", "3"]


@pytest.mark.parametrize("part", ["1", "a:b", "0:10:2", "0.5:", ":" + "9" * 5000])
def test_malformed_slices(part):
    with pytest.raises(DataError, match="slice"):
        split_slice(f"data.jsonl@[{part}]")


FAULTS = {
    "bad JSON": (GOOD + "{oops}\n", r"data\.jsonl, line 2: invalid JSON"),
    "line numbers count empty lines": (GOOD + "\n\n{\n", "line 4: invalid JSON"),
    "NaN": ('{"prompt": "a", "label": NaN}', "line 1: invalid JSON: NaN is not a JSON number"),
    "Infinity": ('{"prompt": "a", "label": -Infinity}', "line 1: invalid JSON: -Infinity"),
    "number too large": ('{"prompt": "a", "label": 1e999}', "line 1: .*1e999 is too large"),
    "integer too long": ('{"prompt": "a", "label": ' + "9" * 5000 + "}", "line 1: invalid JSON"),
    "nested too deeply": ('{"prompt": ' + "[" * 200_000, "line 1: .*(nested too deeply|invalid JSON)"),
    "repeated key": ('{"prompt": "a", "prompt": "b"}', "line 1: .*'prompt' appears twice"),
    "not an object": (GOOD + '["a"]', "line 2: a row must be a JSON object, not list"),
    "missing prompt": (GOOD + '{"label": "2"}', "line 2, key 'prompt': missing; the row has: 'label'"),
    "missing label": ('{"prompt": "2"}', "line 1, key 'label': missing"),
    "prompt null": ('{"prompt": null, "label": "2"}', "line 1, key 'prompt': a prompt must be a string, not null"),
    "prompt number": ('{"prompt": 5, "label": "2"}', "line 1, key 'prompt': .*not int"),
    "prompt empty": ('{"prompt": "", "label": "2"}', "line 1, key 'prompt': the prompt is empty"),
    "chat messages": ('{"prompt": [{"role": "user"}], "label": "2"}', "key 'prompt': .*data.apply_chat_template"),
    "label bool": ('{"prompt": "a", "label": true}', "line 1, key 'label': must be a string or a number, not bool"),
    "label null": ('{"prompt": "a", "label": null}', "line 1, key 'label': .*not null"),
    "half a surrogate": ('{"prompt": "\\ud800", "label": "1"}', "line 1, key 'prompt': .*surrogate"),
    "invalid UTF-8": (GOOD.encode() + b'{"prompt": "\xff"}', "line 2: byte 0xff at offset .* is not valid UTF-8"),
    "empty file": ("", "holds no rows"),
    "only empty lines": ("\n \n\r\n", "holds no rows"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(tokenizer, write, fault):
    content, message = FAULTS[fault]
    with pytest.raises(DataError, match=message) as info:
        load_prompts(write(content), tokenizer)
    assert "data.jsonl" in str(info.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{}", "must hold an array"), ("[1]", "row 1: a row must be"), ("[{}, {", "invalid JSON"), ("", "holds no rows")],
)
def test_json_faults(write, content, message):
    with pytest.raises(DataError, match=message):
        read_rows(write(content, "data.json"))


def test_repeated_and_empty_ids(tokenizer, write):
    row = '{"prompt": "a", "label": "1", "id": %s}\n'
    with pytest.raises(DataError, match=r"line 3, key 'id': id '5' was already used at .*line 1"):
        load_prompts(write(row % '"5"' + row % "6" + row % "5"), tokenizer, id_key="id")
    with pytest.raises(DataError, match="line 1, key 'id': an id must not be empty"):
        load_prompts(write(row % '""'), tokenizer, id_key="id")


def test_missing_files(tokenizer, tmp_path):
    for spec, message in {
        str(tmp_path / "none.jsonl"): "no such file",
        str(tmp_path): "is not a file",
        "bundled:none.jsonl": "no such bundled file; there are: bundled:arithmetic/heldout.jsonl",
        "bundled:../config.py": "no such bundled file",
    }.items():
        with pytest.raises(DataError, match=message):
            load_prompts(spec, tokenizer)


def test_parquet_is_refused(write):
    with pytest.raises(DataError, match="parquet cannot be read yet"):
        read_rows(write("x", "data.parquet"))


def test_overlong_prompts(tokenizer, write):
    path = write(GOOD + '{"prompt": "1+1+1", "label": "3"}')
    with pytest.raises(DataError, match=r"line 2, key 'prompt': the prompt has 5 tokens, more than .* = 4"):
        load_prompts(path, tokenizer, max_prompt_tokens=4)
    loaded = load_prompts(path, tokenizer, max_prompt_tokens=4, overlong_prompts="filter")
    assert ([p.text for p in loaded.prompts], loaded.num_filtered) == (["1+1"], 1)
    with pytest.raises(DataError, match="all 2 prompts are longer"):
        load_prompts(path, tokenizer, max_prompt_tokens=1, overlong_prompts="filter")
    with pytest.raises(DataError, match="overlong_prompts"):
        load_prompts(path, tokenizer, overlong_prompts="cut")
