"""Rows of prompt and response for supervised fine-tuning, and which of them make each batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exactrl.errors import DataError
from exactrl.tasks.fields import Fields, text_of
from exactrl.tasks.files import Row, read_rows
from exactrl.tasks.task import epoch_order
from exactrl.tasks.tokenizer import Tokenizer
from exactrl.types import Sample

NO_VERSION = -1  # of the weights: no policy of ours wrote these responses
NO_LOGPROBS = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class LoadedExamples:
    """Examples in file order, and how many longer ones were filtered out (0 with the "error" policy)."""

    examples: list[Sample]
    num_filtered: int = 0


def load_examples(
    spec: str,
    tokenizer: Tokenizer,
    *,
    prompt_key: str = "prompt",
    response_key: str = "response",
    id_key: str = "",
    append_eos: bool = True,
    max_tokens: int | None = None,
    overlong_rows: str = "error",
) -> LoadedExamples:
    """Reads `spec` (files.read_rows) into samples without logprobs.

    Prompt and response are tokenised apart and their ids put one behind the other: a rollout continues prompt ids, so
    no token of its may cross the border either. With append_eos the response ends with the model's first end token;
    a response whose last token is any of its end tokens stays as it is. A row of more than max_tokens (prompt, response
    and end token) is an error or is filtered, never cut.

    Raises DataError naming file, row and key: missing key, wrong type, empty text, repeated id, overlong row; also for
    a file whose rows were all filtered, and for append_eos with a model that names no end token.
    """
    assert overlong_rows in ("error", "filter"), overlong_rows
    if append_eos and not tokenizer.eos_ids:
        raise DataError(
            "the model names no end token (eos_token_id in generation_config.json or config.json); name one there, or "
            "set data.append_eos = false"
        )
    fields = Fields(prompt_key, "", id_key)
    seen: dict[str, str] = {}
    examples: list[Sample] = []
    num_filtered = 0
    for row in read_rows(spec):
        example = _example(row, tokenizer, fields, response_key, append_eos)
        name = example.prompt_id
        if name in seen:
            raise DataError(f"{row.where}, key {id_key!r}: id {name!r} was already used at {seen[name]}")
        seen[name] = row.where
        size = len(example.prompt_token_ids) + len(example.token_ids)
        if max_tokens is None or size <= max_tokens:
            examples.append(example)
        elif overlong_rows == "filter":
            num_filtered += 1
        else:
            raise DataError(
                f"{row.where}, keys {prompt_key!r} and {response_key!r}: {size} tokens together, more than "
                f"data.max_tokens = {max_tokens}; raise it, or set data.overlong_rows = 'filter'"
            )
    if not examples:
        raise DataError(f"{spec}: all {num_filtered} rows are longer than data.max_tokens = {max_tokens}")
    return LoadedExamples(examples, num_filtered)


def _example(row: Row, tokenizer: Tokenizer, fields: Fields, response_key: str, append_eos: bool) -> Sample:
    response = text_of(row, response_key, "response")
    prompt_ids = _ids(row, fields.prompt_key, fields.prompt(row), tokenizer)
    response_ids = _ids(row, response_key, response, tokenizer)
    if append_eos and response_ids[-1] not in tokenizer.eos_ids:
        response_ids.append(tokenizer.eos_ids[0])
    return Sample(
        prompt_id=fields.id(row) or str(row.index),
        sample_index=0,
        prompt_token_ids=tuple(prompt_ids),
        token_ids=response_ids,
        logprobs=NO_LOGPROBS,
        finish_reason="stop",
        weight_version=NO_VERSION,
        temperature=1.0,
        text=response,
    )


def _ids(row: Row, key: str, text: str, tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode(text)
    if not ids:
        raise DataError(f"{row.where}, key {key!r}: the text has no tokens")
    return ids


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of an endless sequence of epochs; a pure function of seed and step.

    Each epoch is its own permutation of the rows (task.epoch_order; file order without shuffle) cut into batches of
    batch_size. The last batch of an epoch has the rows that are left: no batch holds rows of two epochs.
    """

    examples: Sequence[Sample]
    batch_size: int
    seed: int
    shuffle: bool

    @property
    def per_epoch(self) -> int:
        return -(-len(self.examples) // self.batch_size)

    def batch(self, step: int) -> tuple[int, list[Sample]]:
        """(number of the epoch, examples) of step 1, 2, ...; epochs count from 1, too."""
        epoch, position = divmod(step - 1, self.per_epoch)
        size = len(self.examples)
        order = epoch_order(size, self.seed, epoch) if self.shuffle else range(size)
        chosen = order[position * self.batch_size : (position + 1) * self.batch_size]
        return epoch + 1, [self.examples[i] for i in chosen]
