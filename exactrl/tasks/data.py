"""Data files to prompts: rows, repeats, ids, tokenisation, and the limit on prompt length."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from exactrl.errors import DataError
from exactrl.tasks.fields import Fields, Render
from exactrl.tasks.files import Block, Row, read_blocks
from exactrl.tasks.store import PromptStore, Records, Spill, Texts
from exactrl.tasks.tokenizer import Tokenizer
from exactrl.types import Prompt

# Texts tokenised together: enough for every core. Rows that are Python values at the same time.
_BATCH = 1024
_PART = 8192
# Rows remembered so that equal ones are not looked at again.
_MAX_SEEN = 100_000


@dataclass(frozen=True, slots=True)
class LoadedPrompts:
    """Prompts in file order, and what became of the rows: len(prompts) + num_filtered + num_repeated = num_rows.

    num_unique counts different prompt texts among all rows; num_filtered rows were too long; num_repeated rows had the
    text of an earlier one and were left out (dedupe).
    """

    prompts: Sequence[Prompt]
    num_rows: int
    num_unique: int
    num_filtered: int = 0
    num_repeated: int = 0


def load_prompts(
    spec: str,
    tokenizer: Tokenizer,
    *,
    prompt_key: str = "prompt",
    label_key: str = "label",
    label_pattern: str = "",
    id_key: str = "",
    render: Render | None = None,
    max_prompt_tokens: int | None = None,
    overlong_prompts: str = "error",
    dedupe: bool = False,
) -> LoadedPrompts:
    """Reads `spec` (files.read_blocks) and tokenises each different prompt once.

    An empty label_key gives every row the label "". label_pattern is a regular expression whose group is taken out of
    the label. An empty id_key makes the id the row's number in the file, from 0 and counted before slicing, so slices
    of one file never share an id. Columns not named by a key become metadata. `render` makes text of chat messages.
    A prompt longer than max_prompt_tokens is an error or is filtered. dedupe keeps the first row of each prompt text.

    Raises DataError naming file, row and key: missing key, wrong type, empty prompt, repeated id (with dedupe: of
    another text), overlong prompt, with dedupe one text with two labels; and a file whose prompts were all filtered.
    """
    if overlong_prompts not in ("error", "filter"):
        raise DataError(f"data.overlong_prompts must be 'error' or 'filter', not {overlong_prompts!r}")
    fields = Fields(prompt_key, label_key, id_key, label_pattern, render)
    loader = _Loader(fields, tokenizer, max_prompt_tokens if overlong_prompts == "error" else None, dedupe)
    for block in read_blocks(spec):
        loader.add(block)
    loaded = loader.finish(max_prompt_tokens)
    if not loaded.prompts:
        raise DataError(
            f"{spec}: all {loaded.num_rows} prompts are longer than max_prompt_tokens = {max_prompt_tokens}"
        )
    return loaded


class _Loader:
    """Collects rows block by block. Texts, labels and ids are compared by 64- or 128-bit hashes, taken for equality."""

    def __init__(self, fields: Fields, tokenizer: Tokenizer, limit: int | None, dedupe: bool) -> None:
        self.fields = fields
        self.tokenizer = tokenizer
        self.limit = limit  # None: longer prompts are filtered at the end
        self.dedupe = dedupe
        self.texts = Texts(Spill(), array("I"))
        self.records = Records(Spill())
        self.pending: list[tuple[str, Row]] = []  # texts to tokenise, and the row that each was first seen in
        self.number_of: dict[bytes, int] = {}  # text hash -> number of the text
        self.seen: dict[bytes, int] = {}  # hash of a whole row -> number of its text
        self.label_of = array("Q")  # per text: hash of its label, and the place of its first row
        self.place_of = array("Q")
        self.ids: dict[bytes, tuple[int, int]] = {}  # id hash -> number of the text, place
        self.row_texts: list[NDArray[np.uint32]] = []  # per row
        self.entries: list[tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.uint32]]] = []  # row, text, record

    def add(self, block: Block) -> None:
        keys = self.fields.keys if self.dedupe else None
        positions, inverse = block.distinct(keys)
        if self.fields.id_key and not self.dedupe and len(positions) < len(block):
            _, counts = np.unique(inverse, return_counts=True)
            again = np.flatnonzero(inverse == int(counts.argmax()))[:2].tolist()
            first, second = block.rows(again)
            raise self._repeated_id(second, str(self.fields.id(second)), first.place, same_text=True)
        numbers = array("I")  # per distinct row: its text, and without dedupe its record
        records = array("I")
        for begin in range(0, len(positions), _PART):
            part = positions[begin : begin + _PART]
            num_known = len(self.number_of)
            rows = block.rows(part, keys)
            numbers.extend(map(self._number_again if self.dedupe else self._number, rows))
            if not self.dedupe:
                records.extend(map(self._record, rows))
            elif len(self.number_of) > num_known:
                self._keep_first(block, part, numbers[begin:], num_known)
        text_of = np.array(numbers, np.uint32)[inverse]
        self.row_texts.append(text_of)
        if not self.dedupe:
            record_of = np.array(records, np.uint32)[inverse]
            self.entries.append((block.start + np.arange(len(block)), text_of, record_of))

    def _keep_first(self, block: Block, positions: list[int], numbers: array[int], num_known: int) -> None:
        """Makes prompts of the rows that brought a text not seen before: texts are numbered as they come."""
        first: dict[int, int] = {}
        for position, number in zip(positions, numbers, strict=True):
            if number >= num_known:
                first.setdefault(number, position)
        rows = block.rows(list(first.values()))
        records = np.array([self._record(row) for row in rows], np.uint32)
        indices = np.array([row.index for row in rows], np.int64)
        self.entries.append((indices, np.array(list(first), np.uint32), records))

    def finish(self, max_prompt_tokens: int | None) -> LoadedPrompts:
        self._tokenise()
        lengths = np.array(self.texts.num_tokens, np.uint32)
        row_texts = np.concatenate(self.row_texts)
        rows, text_of, record_of = (np.concatenate(parts) for parts in zip(*self.entries, strict=True))
        num_filtered = 0
        if max_prompt_tokens is not None:
            fits = lengths <= max_prompt_tokens
            kept = fits[text_of]
            rows, text_of, record_of = rows[kept], text_of[kept], record_of[kept]
            num_filtered = int(np.count_nonzero(~fits[row_texts]))
        store = PromptStore(self.texts, self.records, rows, text_of, record_of)
        num_repeated = len(row_texts) - num_filtered - len(rows)
        assert num_repeated >= 0 if self.dedupe else num_repeated == 0, num_repeated
        return LoadedPrompts(store, len(row_texts), len(lengths), num_filtered, num_repeated)

    def _number_again(self, row: Row) -> int:
        """As `_number`, fast for a row that equals an earlier one: with dedupe it brings nothing new."""
        key = _digest(repr(row.value), 16)
        number = self.seen.get(key)
        if number is None:
            if len(self.seen) >= _MAX_SEEN:
                self.seen.clear()
            number = self.seen[key] = self._number(row)
        return number

    def _number(self, row: Row) -> int:
        """The number of the row's text; checks label and id against earlier rows."""
        text, label, row_id = self.fields.prompt(row), self.fields.label(row), self.fields.id(row)
        key = _digest(text, 16)
        number = self.number_of.setdefault(key, len(self.number_of))
        label_hash = int.from_bytes(_digest(label, 8), "little")
        if number == len(self.label_of):
            self.label_of.append(label_hash)
            self.place_of.append(row.place)
            self.pending.append((text, row))
            if len(self.pending) == _BATCH:
                self._tokenise()
        elif self.dedupe and self.label_of[number] != label_hash:
            raise DataError(
                f"{row.where}, key {self.fields.label_key!r}: the label is {label!r}, but the same prompt has another "
                f"label at {row.source} {self.place_of[number]}; correct the data (data.dedupe needs one label each)"
            )
        if row_id is not None:
            other, place = self.ids.setdefault(_digest(row_id, 16), (number, row.place))
            if place != row.place and not (self.dedupe and other == number):
                raise self._repeated_id(row, row_id, place, same_text=other == number)
        return number

    def _record(self, row: Row) -> int:
        return self.records.append(self.fields.label(row), self.fields.id(row), self.fields.metadata(row))

    def _tokenise(self) -> None:
        batch, self.pending = self.pending, []
        for (text, row), ids in zip(batch, self.tokenizer.encode_batch([text for text, _ in batch]), strict=True):
            where = f"{row.where}, key {self.fields.prompt_key!r}"
            if not ids:
                raise DataError(f"{where}: the prompt has no tokens")
            if self.limit is not None and len(ids) > self.limit:
                raise DataError(
                    f"{where}: the prompt has {len(ids)} tokens, more than data.max_prompt_tokens = {self.limit}; "
                    "raise it, or set data.overlong_prompts = 'filter'"
                )
            self.texts.append(text, ids)

    def _repeated_id(self, row: Row, row_id: str, place: int, same_text: bool) -> DataError:
        what = "with the same prompt; set data.dedupe = true to keep the first" if same_text else "with another prompt"
        return DataError(
            f"{row.where}, key {self.fields.id_key!r}: id {row_id!r} was already used at {row.source} {place}, {what}"
        )


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()
