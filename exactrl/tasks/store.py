"""Prompts of a data set without keeping them in memory: texts and token ids on disk, a few bytes per row in arrays."""

from __future__ import annotations

import pickle
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from exactrl.errors import EnvironmentProblem
from exactrl.types import Prompt

# Smaller data sets never touch the disk.
IN_MEMORY_BYTES = 32 << 20


class Spill:
    """Byte strings by number, appended to a temporary file that vanishes with this object."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES)  # noqa: SIM115 (lives as long as the prompts)
        self._ends = array("Q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, content: bytes) -> int:
        """Raises EnvironmentProblem, as `read` does, when the temporary file cannot be written."""
        with _disk_faults():
            self._file.seek(self._ends[-1])
            self._file.write(content)
        self._ends.append(self._ends[-1] + len(content))
        return len(self) - 1

    def read(self, number: int) -> bytes:
        with _disk_faults():
            self._file.seek(self._ends[number])
            return self._file.read(self._ends[number + 1] - self._ends[number])


@contextmanager
def _disk_faults() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(
            f"prompts are kept in a temporary file, which cannot be used: {error}; set TMPDIR to a folder with room"
        ) from error


@dataclass(frozen=True, slots=True)
class Texts:
    """Distinct prompt texts: `num_tokens[i]` is known without reading; text and ids are read from the spill."""

    spill: Spill
    num_tokens: array[int]

    def append(self, text: str, token_ids: Sequence[int]) -> None:
        self.spill.append(pickle.dumps((text, np.array(token_ids, np.uint32).tobytes())))
        self.num_tokens.append(len(token_ids))

    def __getitem__(self, number: int) -> tuple[str, tuple[int, ...]]:
        text, ids = pickle.loads(self.spill.read(number))
        return text, tuple(np.frombuffer(ids, np.uint32).tolist())


@dataclass(frozen=True, slots=True)
class Records:
    """What rows have besides their text: label, id (None: the row's number), other columns."""

    spill: Spill

    def append(self, label: str, row_id: str | None, metadata: dict[str, Any]) -> int:
        return self.spill.append(pickle.dumps((label, row_id, metadata)))

    def __getitem__(self, number: int) -> tuple[str, str | None, dict[str, Any]]:
        return pickle.loads(self.spill.read(number))


class PromptStore(Sequence[Prompt]):
    """Prompts in file order, made when they are asked for; not for several threads at once.

    rows, text_of, record_of: for each prompt the number of its row in the file, of its text, and of its record.
    """

    def __init__(
        self,
        texts: Texts,
        records: Records,
        rows: NDArray[np.int64],
        text_of: NDArray[np.uint32],
        record_of: NDArray[np.uint32],
    ) -> None:
        self._texts = texts
        self._records = records
        self._rows = rows
        self._text_of = text_of
        self._record_of = record_of

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> PromptStore: ...

    def __getitem__(self, index: int | slice) -> Prompt | PromptStore:
        if isinstance(index, slice):
            parts = (self._rows[index], self._text_of[index], self._record_of[index])
            return PromptStore(self._texts, self._records, *parts)
        text, token_ids = self._texts[int(self._text_of[index])]
        label, row_id, metadata = self._records[int(self._record_of[index])]
        name = str(self._rows[index]) if row_id is None else row_id
        return Prompt(name, text, token_ids, label, metadata)

    def __iter__(self) -> Iterator[Prompt]:
        return (self[i] for i in range(len(self)))

    def longest(self) -> Prompt:
        """The first prompt with the most tokens."""
        lengths = np.frombuffer(self._texts.num_tokens, np.uint32)[self._text_of]
        return self[int(lengths.argmax())]


def longest_prompt(prompts: Sequence[Prompt]) -> Prompt:
    """The first prompt with the most tokens, cheap for a PromptStore."""
    return prompts.longest() if isinstance(prompts, PromptStore) else max(prompts, key=lambda p: len(p.token_ids))
