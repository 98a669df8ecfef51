"""Rows of prompt and response: what the trainer gets, what is refused, and which rows make a batch."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from exactrl.errors import DataError
from exactrl.tasks.supervised import NO_VERSION, Batches, load_examples
from exactrl.tasks.task import epoch_order
from exactrl.tasks.tokenizer import Tokenizer

GOOD = '{"prompt": "1+1\\n", "response": "2"}\n'


def rows(*pairs: tuple[str, str]) -> str:
    return "".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in pairs)


def test_rows_become_samples(tokenizer, write):
    path = write('{"q": "1+1\\n", "a": {"text": "2"}, "name": "x"}\n{"q": "a", "a": {"text": "b"}, "name": 7}\n')
    first, second = load_examples(path, tokenizer, prompt_key="q", response_key="a.text", id_key="name").examples
    end = tokenizer.eos_ids[0]
    assert first.prompt_token_ids == tuple(tokenizer.encode("1+1\n"))
    assert first.token_ids == [*tokenizer.encode("2"), end]
    assert (first.prompt_id, second.prompt_id, first.text) == ("x", "7", "2")
    assert (first.temperature, first.weight_version, len(first.logprobs)) == (1.0, NO_VERSION, 0)


def test_the_end_token_is_appended_once(tokenizer, write):
    end, other = tokenizer.eos_ids
    texts = ["2", "2<|im_end|>", "2<|endoftext|>", "2<|im_end|><|im_end|>", "<|im_end|>2", "<|im_end|>"]
    path = write(rows(*(("1+1", t) for t in texts)))
    (two,) = tokenizer.encode("2")
    expected = [[two, end], [two, end], [two, other], [two, end, end], [end, two, end], [end]]
    assert [e.token_ids for e in load_examples(path, tokenizer).examples] == expected
    plain = [e.token_ids for e in load_examples(path, tokenizer, append_eos=False).examples]
    assert plain == [tokenizer.encode(t) for t in texts]


def test_a_model_without_an_end_token(tokenizer, write):
    bare = Tokenizer(tokenizer.backend)
    with pytest.raises(DataError, match=r"no end token.*data\.append_eos = false"):
        load_examples(write(GOOD), bare)
    (example,) = load_examples(write(GOOD), bare, append_eos=False).examples
    assert example.token_ids == tokenizer.encode("2")


def test_prompt_and_response_are_tokenised_apart(write):
    """A rollout continues the prompt's ids: it could never produce a token that begins in the prompt."""
    vocab = {"a": 0, "b": 1, "ab": 2, "<e>": 3}
    bpe = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("a", "b")])), (3,))
    assert bpe.encode("ab") == [2]
    (example,) = load_examples(write(rows(("a", "b"))), bpe).examples
    assert (example.prompt_token_ids, example.token_ids) == ((0,), [1, 3])


def test_longer_rows_are_an_error_or_filtered_and_counted_never_cut(tokenizer, write):
    path = write(rows(("1+1", "2"), ("1+1+1+1", "4"), ("1+1", "2222")))
    limit = 5  # the first row: 3 + 1 + end token
    with pytest.raises(
        DataError, match=r"line 2, keys 'prompt' and 'response': 9 tokens together.*data.max_tokens = 5"
    ):
        load_examples(path, tokenizer, max_tokens=limit)
    loaded = load_examples(path, tokenizer, max_tokens=limit, overlong_rows="filter")
    assert ([e.prompt_id for e in loaded.examples], loaded.num_filtered) == (["0"], 2)
    with pytest.raises(DataError, match="all 3 rows are longer"):
        load_examples(path, tokenizer, max_tokens=4, overlong_rows="filter")
    assert len(load_examples(path, tokenizer, max_tokens=9).examples) == 3


FAULTS = {
    "missing response": (GOOD + '{"prompt": "a", "answer": "b"}', "line 2, key 'response': missing; the row has"),
    "missing prompt": ('{"response": "a"}', "line 1, key 'prompt': missing"),
    "empty response": (GOOD + '\n{"prompt": "a", "response": ""}', "line 3, key 'response': the response is empty"),
    "empty prompt": ('{"prompt": "", "response": "a"}', "line 1, key 'prompt': the prompt is empty"),
    "response null": ('{"prompt": "a", "response": null}', "key 'response': a response must be a string, not null"),
    "response number": ('{"prompt": "a", "response": 4}', "key 'response': a response must be a string, not int"),
    "messages": ('{"prompt": "a", "response": [{}]}', "exactrl sft` cannot: render them before"),
    "surrogate": ('{"prompt": "a", "response": "\\udc00"}', "key 'response': holds half a surrogate"),
    "bad JSON": (GOOD + "{", "line 2: invalid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_name_file_row_and_key(name, tokenizer, write):
    content, message = FAULTS[name]
    with pytest.raises(DataError, match=message) as caught:
        load_examples(write(content), tokenizer)
    assert "data.jsonl" in str(caught.value)


def test_repeated_ids_are_refused(tokenizer, write):
    path = write('{"prompt": "a", "response": "b", "n": 1}\n{"prompt": "c", "response": "d", "n": 1}\n')
    with pytest.raises(DataError, match=r"line 2, key 'n': id '1' was already used at .*line 1"):
        load_examples(path, tokenizer, id_key="n")


@given(st.integers(1, 20), st.integers(1, 25), st.integers(0, 2**40))
def test_an_epoch_holds_every_row_once_and_no_batch_two_epochs(tokenizer, size, batch_size, seed):
    batches = Batches(list(range(size)), batch_size, seed, shuffle=True)  # type: ignore[arg-type]
    for epoch in range(3):
        drawn = []
        for i in range(batches.per_epoch):
            number, part = batches.batch(epoch * batches.per_epoch + i + 1)
            assert number == epoch + 1
            last = i == batches.per_epoch - 1
            assert len(part) == (size - (batches.per_epoch - 1) * batch_size if last else batch_size)
            drawn += part
        assert drawn == list(epoch_order(size, seed, epoch))


def test_file_order_without_shuffle():
    batches = Batches(list("abcde"), 2, 0, shuffle=False)  # type: ignore[arg-type]
    assert [batches.batch(step) for step in (1, 3, 4)] == [(1, ["a", "b"]), (1, ["e"]), (2, ["a", "b"])]
