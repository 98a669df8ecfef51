"""Parquet: the same prompts as from JSONL, repeats, memory, faults."""

from __future__ import annotations

import datetime
import decimal
import json
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactrl.errors import DataError
from exactrl.tasks import parquet, store
from exactrl.tasks.chat import ChatTemplate
from exactrl.tasks.data import load_prompts
from exactrl.tasks.files import read_blocks, read_rows
from exactrl.tasks.task import DataTask

RENDER = ChatTemplate(
    "{%- for m in messages %}{{- m.role + '>' + m.content + '\\n' }}{% if m.weight %}!{% endif %}{%- endfor %}"
).render


@pytest.fixture
def write_parquet(tmp_path):
    """write_parquet(rows or table, row_group_size=None) -> path"""

    def write(rows, row_group_size=None):
        path = tmp_path / "data.parquet"
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
        pq.write_table(table, path, row_group_size=row_group_size)
        return str(path)

    return write


def dapo(number, text=None):
    """A row in the layout of the public dapo-math-17k parquet file."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": text or f"Problem {number}?", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(number), "style": "rule"},
        "extra_info": {"index": f"id-{number}"},
    }


DAPO = {"label_key": "reward_model.ground_truth", "render": RENDER}


def test_layouts_of_dapo_math_17k(tokenizer, write, write_parquet):
    """Messages in parquet, and plain prompt / label rows."""
    path = write_parquet([dapo(7), dapo(8)])
    first, second = load_prompts(path, tokenizer, id_key="extra_info.index", **DAPO).prompts
    assert (first.id, first.text, first.label) == ("id-7", "user>Problem 7?\n", "7")
    assert first.metadata == {key: dapo(7)[key] for key in ("data_source", "ability", "reward_model", "extra_info")}
    assert second.token_ids == tuple(tokenizer.encode("user>Problem 8?\n"))
    (prompt,) = load_prompts(write('{"prompt": "1+1", "label": "2"}'), tokenizer).prompts
    assert (prompt.text, prompt.label) == ("1+1", "2")


def test_D_23_rows_and_unique_prompts_are_reported(tokenizer, write_parquet):
    """aime-2024: 30 problems, 32 times each."""
    path = write_parquet([dapo(i) for i in range(30)] * 32)
    loaded = load_prompts(path, tokenizer, **DAPO)
    assert (loaded.num_rows, loaded.num_unique, len(loaded.prompts)) == (960, 30, 960)
    assert len({p.id for p in loaded.prompts}) == 960
    loaded = load_prompts(path, tokenizer, dedupe=True, id_key="extra_info.index", **DAPO)
    assert (loaded.num_rows, loaded.num_unique, loaded.num_repeated, loaded.num_filtered) == (960, 30, 930, 0)
    assert [p.id for p in loaded.prompts] == [f"id-{i}" for i in range(30)]


def test_dedupe_keeps_the_first_row_and_its_columns(tokenizer, write_parquet):
    rows = [dapo(1), dapo(2), dapo(1), dapo(3), dapo(2)]
    rows = [row | {"extra_info": {"index": str(i)}} for i, row in enumerate(rows)]
    path = write_parquet(rows, row_group_size=2)
    for id_key in ("", "extra_info.index"):
        loaded = load_prompts(path, tokenizer, dedupe=True, id_key=id_key, **DAPO)
        assert [(p.id, p.label, p.metadata["extra_info"]["index"]) for p in loaded.prompts] == [
            ("0", "1", "0"), ("1", "2", "1"), ("3", "3", "3"),
        ]  # fmt: skip


def test_dedupe_refuses_two_labels_and_names_both_rows(tokenizer, write_parquet):
    rows = [dapo(0), dapo(1, "same"), dapo(2), dapo(3, "same")]
    for size in (None, 1):
        with pytest.raises(DataError, match=r"row 4, key 'reward_model.ground_truth': the label is '3'.* row 2;"):
            load_prompts(write_parquet(rows, row_group_size=size), tokenizer, dedupe=True, **DAPO)
    assert len(load_prompts(write_parquet(rows), tokenizer, **DAPO).prompts) == 4


def test_dedupe_counts_filtered_rows_apart(tokenizer, write_parquet):
    rows = [dapo(1), dapo(2, "long" * 9), dapo(1), dapo(2, "long" * 9)]
    options = {"max_prompt_tokens": 20, "overlong_prompts": "filter", **DAPO}
    loaded = load_prompts(write_parquet(rows), tokenizer, dedupe=True, **options)
    assert (len(loaded.prompts), loaded.num_filtered, loaded.num_repeated, loaded.num_unique) == (1, 2, 1, 2)


@pytest.mark.parametrize("dedupe", [False, True])
def test_D_25_one_id_for_two_texts_names_both_rows(tokenizer, write_parquet, dedupe):
    rows = [{"id": i, "prompt": p, "label": "1"} for i, p in [("a", "x"), ("b", "y"), ("b", "z")]]
    with pytest.raises(DataError, match=r"row 3, key 'id': id 'b' was already used at .* row 2, with another prompt"):
        load_prompts(write_parquet(rows), tokenizer, id_key="id", dedupe=dedupe)


def test_D_25_one_id_for_equal_rows_needs_dedupe(tokenizer, write_parquet):
    rows = [{"id": i, "prompt": p, "label": "1"} for i, p in [("a", "x"), ("b", "y"), ("c", "z"), ("b", "y")]]
    path = write_parquet(rows)
    with pytest.raises(DataError, match=r"row 4, key 'id': id 'b' was already used at .* row 2, .*data\.dedupe = true"):
        load_prompts(path, tokenizer, id_key="id")
    assert [p.id for p in load_prompts(path, tokenizer, id_key="id", dedupe=True).prompts] == ["a", "b", "c"]


def test_D_29_same_prompts_as_from_jsonl(tokenizer, write, write_parquet):
    """List-of-struct messages with a bool column: plain Python values, so templates see what JSON gives them."""
    rows = [
        {"prompt": [{"role": "user", "content": "a", "weight": True}], "label": 1, "hard": True, "tags": ["x"]},
        {"prompt": [{"role": "user", "content": "b"}, {"role": "tool", "content": "c"}], "label": 2, "hard": None},
    ]
    as_json = load_prompts(write("\n".join(map(json.dumps, rows))), tokenizer, render=RENDER).prompts
    as_parquet = load_prompts(write_parquet(rows), tokenizer, render=RENDER).prompts
    assert [(p.text, p.token_ids, p.label) for p in as_json] == [(p.text, p.token_ids, p.label) for p in as_parquet]
    assert as_json[0].text == "user>a\n!"
    assert as_parquet[0].metadata == as_json[0].metadata == {"hard": True, "tags": ["x"]}
    assert type(as_parquet[0].metadata["hard"]) is bool
    assert type(as_parquet[0].metadata["tags"]) is list


def types(leaves):
    """Strategies of one Arrow type each: leaves, lists and structs of them, all with nulls."""
    inner = leaves.map(lambda values: st.none() | values)
    structs = inner.map(lambda values: st.fixed_dictionaries({"a": values}, optional={"b": st.integers(0, 1)}))
    return structs | inner.map(lambda values: st.lists(values, max_size=3))


LEAVES = st.sampled_from(
    [st.integers(0, 2), st.booleans(), st.sampled_from(["", "a", "ß"]), st.sampled_from([0.0, -0.0, 0.5]), st.none()]
)
one_type = st.recursive(LEAVES, types, max_leaves=3)
rows_of_types = st.tuples(one_type, one_type).flatmap(
    lambda pair: st.lists(st.fixed_dictionaries({"x": pair[0], "y": st.none() | pair[1]}), min_size=1, max_size=12)
)


@given(rows_of_types, st.integers(0, 5), st.integers(1, 12))
def test_distinct_rows_are_exact(rows, low, size):
    """Every row equals the one that stands for it, in a slice of a batch, too; rows that stand for others differ."""
    batch = pa.RecordBatch.from_pylist(rows).slice(low, size)
    values = [repr(row) for row in batch.to_pylist()]
    positions, inverse = parquet.ParquetBlock("f", 0, batch).distinct()
    assert [values[positions[i]] for i in inverse] == values
    assert positions == [values.index(value) for value in dict.fromkeys(values)]


def test_unusual_types_are_never_taken_for_equal():
    maps = pa.array([[("a", 1)], [("a", 2)], [("a", 1)]], pa.map_(pa.string(), pa.int64()))
    batch = pa.RecordBatch.from_arrays([maps, pa.array([[1] * 40, [1] * 40, [2] * 40])], ["m", "long"])
    positions, inverse = parquet.ParquetBlock("f", 0, batch).distinct()
    assert (positions, inverse.tolist()) == ([0, 1, 2], [0, 1, 2])


@given(
    st.integers(1, 9), st.integers(1, 4), st.none() | st.integers(-11, 11), st.none() | st.integers(-11, 11),
    st.integers(1, 1 << 8),
)  # fmt: skip
def test_slices_follow_python(tmp_path_factory, size, group, start, stop, block_bytes):
    path = tmp_path_factory.mktemp("slices") / "data.parquet"
    pq.write_table(pa.table({"n": list(range(size))}), path, row_group_size=group)
    expected = list(range(size))[start:stop]
    spec = f"{path}@[{'' if start is None else start}:{'' if stop is None else stop}]"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "BLOCK_BYTES", block_bytes)
        if expected:
            rows = read_rows(spec)
            assert [r.value["n"] for r in rows] == [r.index for r in rows] == expected
            assert rows[0].where == f"{path}, row {expected[0] + 1}"
            return
        with pytest.raises(DataError, match=f"holds no rows; the file has {size}"):
            read_rows(spec)


def test_memory_does_not_grow_with_the_file(tokenizer, write_parquet, monkeypatch):
    """60,000 rows of 1 kB: neither Arrow nor Python ever holds more than a small part, with and without dedupe."""
    monkeypatch.setattr(parquet, "BLOCK_BYTES", 3 << 20)
    monkeypatch.setattr(store, "IN_MEMORY_BYTES", 1 << 16)
    unique = pa.Table.from_pylist([dapo(i, f"{i} " + "word " * 200) for i in range(600)])
    path = write_parquet(pa.concat_tables([unique] * 100))
    size = 60_000 * 1000
    for dedupe, count in ((True, 600), (False, 60_000)):
        held = pa.total_allocated_bytes()
        arrow = 0
        tracemalloc.start()
        loaded = load_prompts(path, tokenizer, dedupe=dedupe, **DAPO)
        _, python = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        for block in read_blocks(path):
            block.distinct()
            arrow = max(arrow, pa.total_allocated_bytes() - held)
        assert len(loaded.prompts) == count
        assert python < size / 4
        assert arrow < size / 4
        task = DataTask(loaded.prompts, {}, tokenizer, lambda prompt, sample: 0.0, seed=3)
        drawn = task.train_prompts(1, 64)
        assert all(p.text == f"user>{p.label} " + "word " * 200 + "\n" for p in drawn)
        assert all(p.token_ids == tuple(tokenizer.encode(p.text)) for p in drawn[:4])
        assert all(int(p.id) % 600 == int(p.label) for p in drawn)
        assert len({p.id for p in drawn}) == 64


def test_labels_of_all_kinds(tokenizer, write_parquet):
    column = pa.array([1.0, 2.5], pa.float32())
    table = pa.table({"prompt": ["a", "b"], "label": column})
    assert [p.label for p in load_prompts(write_parquet(table), tokenizer).prompts] == ["1", "2.5"]
    for value, message in {
        float("nan"): "must be a finite number, not nan",
        decimal.Decimal("1.5"): "must be a string or a number, not Decimal",
        datetime.date(2024, 1, 1): "not date",
        None: "not null",
        b"1": "not bytes",
    }.items():
        path = write_parquet([{"prompt": "a", "label": value}])
        with pytest.raises(DataError, match=rf"data\.parquet, row 1, key 'label': .*{message}"):
            load_prompts(path, tokenizer)


def test_faulty_files(tokenizer, write, write_parquet):
    with pytest.raises(DataError, match=r"bad\.parquet: not a readable parquet file"):
        read_rows(write("PAR1 nonsense", "bad.parquet"))
    with pytest.raises(DataError, match="holds no rows"):
        read_rows(write_parquet(pa.table({"prompt": pa.array([], pa.string())})))
    with pytest.raises(DataError, match="row 1, key 'prompt': missing; the row has: 'text', 'label'"):
        load_prompts(write_parquet([{"text": "a", "label": "1"}]), tokenizer, dedupe=True)
    table = pa.table([["a"], ["b"], ["1"]], ["prompt", "prompt", "label"])
    with pytest.raises(DataError, match="column 'prompt' appears twice"):
        read_rows(write_parquet(table))
    broken = pa.Array.from_buffers(pa.string(), 2, [None, *pa.array([b"ok", b"\xff"]).buffers()[1:]])
    with pytest.raises(DataError, match="row 2, key 'prompt': not valid UTF-8"):
        load_prompts(write_parquet(pa.table({"prompt": broken, "label": ["1", "2"]})), tokenizer)


def test_a_damaged_page_is_named(tokenizer, write_parquet):
    path = write_parquet(pa.table({"prompt": [str(np.random.default_rng(0).bytes(900))], "label": ["1"]}))
    with open(path, "r+b") as file:
        file.seek(8)
        file.write(b"\xff" * 40)
    with pytest.raises(DataError, match=r"data\.parquet, .*cannot be read"):
        load_prompts(path, tokenizer)
