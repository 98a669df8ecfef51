from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactrl.errors import DataError, EnvironmentProblem, ExactRLError
from exactrl.tasks import store
from exactrl.tasks.chat import ChatTemplate
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


def test_D_22_negative_slice(write):
    path = write("".join(f'{{"n": {i}}}\n\n' for i in range(50)))
    assert [r.value["n"] for r in read_rows(f"{path}@[-10:]")] == list(range(40, 50))
    assert [r.value["n"] for r in read_rows(f"{path}@[-10:-8]")] == [40, 41]
    assert read_rows(f"{path}@[-10:]")[0].where == f"{path}, line 81"


def test_lines_outside_a_slice_are_not_parsed(write):
    path = write(GOOD * 3 + "{oops\n")
    assert len(read_rows(f"{path}@[1:3]")) == 2
    with pytest.raises(DataError, match="line 4: invalid JSON"):
        read_rows(f"{path}@[1:]")


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
    "chat messages": (
        '{"prompt": [{"role": "user"}], "label": "2"}',
        "line 1, key 'prompt': .*set data.apply_chat_template = true",
    ),
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


def rows_of(*lengths: int) -> str:
    return "".join(json.dumps({"prompt": "1" * n, "label": str(i)}) + "\n" for i, n in enumerate(lengths))


def test_D_17_limit_is_in_tokens_not_characters(tokenizer, write):
    text = "<|im_start|>" * 700  # 8,400 characters, 700 tokens
    path = write(json.dumps({"prompt": text, "label": "1"}))
    (prompt,) = load_prompts(path, tokenizer, max_prompt_tokens=1024).prompts
    assert (len(prompt.token_ids), prompt.text) == (700, text)
    with pytest.raises(DataError, match=r"the prompt has 700 tokens, more than data\.max_prompt_tokens = 699"):
        load_prompts(path, tokenizer, max_prompt_tokens=699)


def test_D_18_one_overlong_prompt_is_found_before_training(tokenizer, write):
    path = write(rows_of(*[10] * 600, 9000, *[10] * 399))
    with pytest.raises(DataError, match=r"line 601, key 'prompt': the prompt has 9000 tokens, .* = 4096"):
        load_prompts(path, tokenizer, max_prompt_tokens=4096)
    loaded = load_prompts(path, tokenizer, max_prompt_tokens=4096, overlong_prompts="filter")
    assert (loaded.num_rows, len(loaded.prompts), loaded.num_filtered, loaded.num_unique) == (1000, 999, 1, 2)
    assert "600" not in {p.id for p in loaded.prompts}


def test_D_21_filtering_keeps_file_order(tokenizer, write):
    path = write(rows_of(3, 9, 1, 2, 3, 9, 4, 1, 2, 1))
    loaded = load_prompts(path, tokenizer, max_prompt_tokens=8, overlong_prompts="filter")
    assert [p.id for p in loaded.prompts] == ["0", "2", "3", "4", "6", "7", "8", "9"]
    assert [len(p.token_ids) for p in loaded.prompts] == [3, 1, 2, 3, 4, 1, 2, 1]
    assert loaded.num_filtered == 2


def test_D_24_pattern_refuses_what_cannot_be_an_aime_answer(tokenizer, write):
    """Answers of the AIME are the integers 0 to 999."""
    row = '{"prompt": "%s", "label": %s}\n'
    pattern = {"label_pattern": "^0*([0-9]{1,3})$"}
    path = write(row % ("a", 385) + row % ("b", '"007"') + row % ("c", "0") + row % ("d", "33.0"))
    assert [p.label for p in load_prompts(path, tokenizer, **pattern).prompts] == ["385", "7", "0", "33"]
    for label in ("1000", "-1", "12.5", '"385."', '"385 "', '""', '"\u0663"'):
        with pytest.raises(DataError, match=r"line 1, key 'label': data\.label_pattern .* finds nothing in"):
            load_prompts(write(row % ("a", label)), tokenizer, **pattern)


def test_label_of_gsm8k(tokenizer, write):
    rows = [
        {"question": "How many?", "answer": "He has 2*3=<<2*3=6>>6.\n#### 6"},
        {"question": "How far?", "answer": "So 1,000.\n#### 1,000"},
    ]
    keys = {"prompt_key": "question", "label_key": "answer", "label_pattern": "#### (.+)"}
    path = write("\n".join(map(json.dumps, rows)))
    assert [p.label for p in load_prompts(path, tokenizer, **keys).prompts] == ["6", "1,000"]
    path = write(json.dumps({"question": "Why?", "answer": "Because."}))
    with pytest.raises(DataError, match=r"line 1, key 'answer': data.label_pattern '#### \(.\+\)' finds nothing in"):
        load_prompts(path, tokenizer, **keys)


def test_D_27_two_objects_on_a_line_and_cut_lines(tokenizer, write):
    good = "\n".join(GOOD.replace("1+1", f"{i}").strip() for i in range(3))
    path = write(GOOD + '{"prompt": "a", "label": "1"}{"prompt": "b", "label": "2"}\n' + GOOD)
    with pytest.raises(DataError, match=r"data\.jsonl, line 2: invalid JSON: Extra data"):
        load_prompts(path, tokenizer)
    with pytest.raises(DataError, match="line 7: invalid JSON"):
        load_prompts(write(good + "\n\n" + good[:-5]), tokenizer)
    assert len(load_prompts(write(good + "\n\n" + good), tokenizer).prompts) == 6


def test_D_31_files_are_utf8_whatever_the_locale(write):
    """The data file and the template hold Chinese; Python's own default encoding is ASCII here."""
    path = Path(write('{"prompt": "数学", "label": "三"}'))
    (path.parent / "chat_template.jinja").write_text("问{{ messages[0].content }}", encoding="utf-8")
    (path.parent / "tokenizer_config.json").write_text('{"eos_token": "终"}', encoding="utf-8")
    script = (
        "import sys, locale\n"
        "from exactrl.tasks.chat import load_chat_template\n"
        "from exactrl.tasks.files import read_rows\n"
        "(row,) = read_rows(sys.argv[1])\n"
        "message = [{'role': 'user', 'content': row.value['prompt']}]\n"
        "text = load_chat_template(sys.argv[2]).render(message)\n"
        "print(ascii(text), ascii(row.value['label']), locale.getpreferredencoding(False))"
    )
    variables = {**os.environ, "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", script, str(path), str(path.parent)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    text, label, encoding = done.stdout.split()
    assert (text, label) == (ascii("问数学"), ascii("三"))
    assert encoding.lower() not in ("utf-8", "utf8")


def test_D_32_labels_of_all_kinds_mean_the_same(tokenizer, write):
    path = write(
        "".join(f'{{"prompt": "{i}", "label": {v}}}\n' for i, v in enumerate(["33", "33.0", '["33"]', '"33"']))
    )
    assert [p.label for p in load_prompts(path, tokenizer).prompts] == ["33"] * 4
    for value, expected in {
        "[33.0]": "33",
        "1e3": "1000",
        "-0.0": "0",
        "0.1": "0.1",
        "12345678901234567890": None,
    }.items():
        (prompt,) = load_prompts(write(f'{{"prompt": "a", "label": {value}}}'), tokenizer).prompts
        assert prompt.label == (expected or value)
    for value in ('["33", "34"]', "[]", "[[33]]", "[null]", "{}"):
        with pytest.raises(DataError, match="line 1, key 'label': must be a string or a number"):
            load_prompts(write(f'{{"prompt": "a", "label": {value}}}'), tokenizer)


def test_dedupe_keeps_file_order_and_names_both_rows_of_two_labels(tokenizer, write):
    row = '{"prompt": "%s", "label": "%s"}\n'
    path = write(row % ("A", 1) + row % ("B", 2) + row % ("A", 1))
    loaded = load_prompts(path, tokenizer, dedupe=True)
    assert [(p.id, p.text) for p in loaded.prompts] == [("0", "A"), ("1", "B")]
    assert (loaded.num_rows, loaded.num_unique, loaded.num_repeated) == (3, 2, 1)
    with pytest.raises(DataError, match=r"line 3, key 'label': the label is '7', but the same prompt .* line 1;"):
        load_prompts(write(row % ("A", 1) + row % ("B", 2) + row % ("A", 7)), tokenizer, dedupe=True)


def test_prompts_are_a_sequence(tokenizer, write):
    prompts = load_prompts(write(rows_of(3, 1, 5, 5)), tokenizer).prompts
    assert [p.label for p in prompts] == [prompts[i].label for i in range(4)] == ["0", "1", "2", "3"]
    assert prompts[-1] == prompts[3]
    assert [p.label for p in prompts[1:3]] == ["1", "2"]
    assert store.longest_prompt(prompts).label == store.longest_prompt(list(prompts)).label == "2"
    with pytest.raises(IndexError):
        prompts[4]


def test_memory_of_distinct_jsonl_rows_is_bounded(tokenizer, write, monkeypatch):
    """Texts and ids go to disk: 10,000 different prompts of 2 kB."""
    monkeypatch.setattr(store, "IN_MEMORY_BYTES", 1 << 16)
    content = "".join(json.dumps({"prompt": f"{i} " + "<|pad|>" * 300, "label": str(i)}) + "\n" for i in range(10_000))
    path, size = write(content), len(content)
    del content
    tracemalloc.start()
    prompts = load_prompts(path, tokenizer).prompts
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(prompts) == 10_000
    assert peak < size / 2
    assert prompts[1_234].text == "1234 " + "<|pad|>" * 300
    assert prompts[1_234].token_ids == tuple(tokenizer.encode(prompts[1_234].text))


def test_a_temporary_file_that_cannot_be_written_is_named(tokenizer, write, monkeypatch, tmp_path):
    monkeypatch.setattr(store, "IN_MEMORY_BYTES", 10)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(EnvironmentProblem, match=r"temporary file, which cannot be used: .*set TMPDIR"):
        load_prompts(write(GOOD), tokenizer)


def prompts_or_fault(path, tokenizer, **options):
    """None for a fault that the user can understand: ours, and it names the file."""
    try:
        return load_prompts(str(path), tokenizer, **options)
    except ExactRLError as error:
        if str(path) not in str(error):
            raise
        return None


@given(
    st.lists(
        st.binary(max_size=30) | st.sampled_from([GOOD.encode(), b'{"prompt": "a", "label": ', b"[", b"\xff", b"\n"])
    ),
    st.sampled_from(["data.jsonl", "data.json", "data.parquet", "data"]),
)
def test_any_bytes_give_rows_or_our_own_error(tokenizer, tmp_path_factory, pieces, name):
    path = tmp_path_factory.mktemp("fuzz") / name
    path.write_bytes(b"".join(pieces))
    loaded = prompts_or_fault(path, tokenizer, dedupe=True)
    assert loaded is None or len(loaded.prompts) > 0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["\ud800", "1" * 5000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries({}, optional={"role": json_values | st.just("user"), "content": json_values | st.text()}),
    max_size=3,
)
json_rows = st.fixed_dictionaries(
    {},
    optional={"prompt": st.text() | json_values | messages, "label": json_values, "id": json_values, "x": json_values},
)


@given(
    st.lists(json_rows | json_values, max_size=4), st.booleans(), st.booleans(), st.sampled_from(["", "id", "x.y", "."])
)
def test_any_json_gives_prompts_or_our_own_error(tokenizer, tmp_path_factory, rows, dedupe, chat, id_key):
    path = tmp_path_factory.mktemp("fuzz") / "data.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    render = ChatTemplate("{% for m in messages %}{{ m.role + m.content }}{% endfor %}").render if chat else None
    loaded = prompts_or_fault(path, tokenizer, dedupe=dedupe, render=render, id_key=id_key)
    if loaded is None:
        return
    assert len({p.id for p in loaded.prompts}) == len(loaded.prompts) == loaded.num_rows - loaded.num_repeated
    assert all(p.text and p.token_ids for p in loaded.prompts)


@given(st.lists(json_rows, min_size=1, max_size=4), st.booleans())
def test_any_parquet_gives_prompts_or_our_own_error(tokenizer, tmp_path_factory, rows, dedupe):
    path = tmp_path_factory.mktemp("fuzz") / "data.parquet"
    try:
        pq.write_table(pa.Table.from_pylist(rows), path)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return  # no common type
    loaded = prompts_or_fault(path, tokenizer, dedupe=dedupe)
    assert loaded is None or len(loaded.prompts) == loaded.num_rows - loaded.num_repeated


@given(st.text(max_size=20), st.text(max_size=6), st.text(max_size=6))
def test_any_spec_gives_our_own_error(name, start, stop):
    for spec in (name, f"{name}@[{start}:{stop}]", f"bundled:{name}", f"{name}.parquet@[{start}]"):
        with pytest.raises(DataError):
            read_rows(spec)
