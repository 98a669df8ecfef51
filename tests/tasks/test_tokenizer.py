from __future__ import annotations

import json
import shutil
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactrl.errors import ModelError
from exactrl.tasks.files import ASSETS
from exactrl.tasks.tokenizer import eos_ids, load_tokenizer

TINY = ASSETS / "tiny"
SUPPORTED = "\n " + string.ascii_letters + string.digits + string.punctuation + "×÷±≤≥≠√π°·→"


@given(st.text(SUPPORTED))
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|pad|>", "a", " ", "\n"])))
def test_special_tokens_round_trip(tokenizer, pieces):
    ids = tokenizer.encode("".join(pieces))
    assert len(ids) == len(pieces)
    assert tokenizer.decode(ids) == "".join(pieces)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_unsupported_characters_are_never_dropped(tokenizer, text):
    expected = "".join(c if c in SUPPORTED else "<|unk|>" for c in text)
    assert tokenizer.decode(tokenizer.encode(text)) == expected


def test_every_id_of_the_model_has_a_text(tokenizer):
    config = json.loads((TINY / "config.json").read_text())
    assert config["vocab_size"] == tokenizer.backend.get_vocab_size()
    texts = [tokenizer.decode([i]) for i in range(config["vocab_size"])]
    assert len(set(texts)) == len(texts)
    assert [tokenizer.encode(t) for t in texts] == [[i] for i in range(len(texts))]


def test_A_41_id_beyond_the_tokenizer_has_no_text(tokenizer):
    """A sampled id of a padded vocabulary neither crashes decoding nor shows up in the text."""
    ids = tokenizer.encode("1+2")
    assert tokenizer.decode([*ids, 5000, *ids]) == "1+21+2"
    assert tokenizer.decode([5000]) == ""


def test_response_loses_only_its_own_stop_token(tokenizer):
    end = tokenizer.encode("<|im_end|>")
    assert tokenizer.eos_ids[0] == end[0]
    assert tokenizer.decode_response(tokenizer.encode("ok") + end) == "ok"
    assert tokenizer.decode_response(tokenizer.encode("ok") + end * 2) == "ok<|im_end|>"
    assert tokenizer.decode_response(tokenizer.encode("o<|pad|>k")) == "o<|pad|>k"
    assert tokenizer.decode_response([]) == ""


def test_folder_without_tokenizer(tmp_path):
    assert load_tokenizer(tmp_path) is None
    assert eos_ids(tmp_path) == ()


def test_broken_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a readable tokenizer"):
        load_tokenizer(tmp_path)


def test_batches_are_what_single_texts_are(tokenizer):
    texts = ["1+1", "<|im_end|>é", " a\n"] * 50
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_a_tokenizer_file_never_cuts_or_pads(tokenizer, tmp_path):
    content = json.loads((TINY / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|pad|>",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    assert loaded.encode_batch(["12345", "1"]) == [tokenizer.encode("12345"), tokenizer.encode("1")]


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 1]}, {"eos_token_id": 3}, (3, 1)),
        ({"eos_token_id": 7}, {"eos_token_id": 2}, (7, 2)),
        (None, {"eos_token_id": 2}, (2,)),
        ({}, {"eos_token_id": None}, ()),
    ],
)
def test_eos_ids(tmp_path: Path, generation, config, expected):
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        if value is not None:
            (tmp_path / name).write_text(json.dumps(value))
    assert eos_ids(tmp_path) == expected


@pytest.mark.parametrize("value", ["3", [True], -1, {}])
def test_malformed_eos_ids(tmp_path, value):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match=r"config\.json: eos_token_id must be"):
        eos_ids(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_unreadable_config(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        eos_ids(tmp_path)


def test_transformers_reads_the_folder_alike(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(TINY / name, tmp_path / name)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    text = "Add the numbers column by column.\n38+57+94\n 1 , don't<|im_end|>é"
    assert theirs(text).input_ids == tokenizer.encode(text)
    assert theirs.decode(theirs(text).input_ids) == tokenizer.decode(tokenizer.encode(text))
    assert theirs.eos_token_id == tokenizer.eos_ids[0]
