"""Data files to prompts: keys, ids, tokenisation, and the limit on prompt length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exactrl.errors import DataError
from exactrl.tasks.fields import Fields
from exactrl.tasks.files import Row, read_rows
from exactrl.tasks.tokenizer import Tokenizer
from exactrl.types import Prompt


@dataclass(frozen=True, slots=True)
class LoadedPrompts:
    """Prompts in file order, and how many longer ones were filtered out (0 with the "error" policy)."""

    prompts: list[Prompt]
    num_filtered: int = 0


def load_prompts(
    spec: str,
    tokenizer: Tokenizer,
    *,
    prompt_key: str = "prompt",
    label_key: str = "label",
    id_key: str = "",
    max_prompt_tokens: int | None = None,
    overlong_prompts: str = "error",
) -> LoadedPrompts:
    """Reads `spec` (files.read_rows) and tokenises each prompt once.

    A key may be a dotted path into nested objects (`reward_model.ground_truth`). The label is a string or a number;
    an empty label_key gives every row the label "". An empty id_key makes the id the row's number in the file, from 0
    and counted before slicing, so slices of one file never share an id. Columns not named by a key become metadata.
    A prompt longer than max_prompt_tokens is an error or is filtered.

    Raises DataError naming file, row and key: missing key, wrong type, empty prompt, repeated id, overlong prompt, and
    a file whose prompts were all filtered.
    """
    if overlong_prompts not in ("error", "filter"):
        raise DataError(f"data.overlong_prompts must be 'error' or 'filter', not {overlong_prompts!r}")
    prompts: list[Prompt] = []
    fields = Fields(prompt_key, label_key, id_key)
    seen: dict[str, str] = {}
    num_filtered = 0
    for row in read_rows(spec):
        prompt = _prompt(row, tokenizer, fields)
        if prompt.id in seen:
            raise DataError(f"{row.where}, key {id_key!r}: id {prompt.id!r} was already used at {seen[prompt.id]}")
        seen[prompt.id] = row.where
        if max_prompt_tokens is None or len(prompt.token_ids) <= max_prompt_tokens:
            prompts.append(prompt)
        elif overlong_prompts == "filter":
            num_filtered += 1
        else:
            raise DataError(
                f"{row.where}, key {prompt_key!r}: the prompt has {len(prompt.token_ids)} tokens, more than "
                f"data.max_prompt_tokens = {max_prompt_tokens}; raise it, or set data.overlong_prompts = 'filter'"
            )
    if not prompts:
        raise DataError(f"{spec}: all {num_filtered} prompts are longer than max_prompt_tokens = {max_prompt_tokens}")
    return LoadedPrompts(prompts, num_filtered)


def _prompt(row: Row, tokenizer: Tokenizer, fields: Fields) -> Prompt:
    text, label = fields.prompt(row), fields.label(row)
    row_id = fields.id(row) or str(row.index)
    token_ids = tuple(tokenizer.encode(text))
    if not token_ids:
        raise DataError(f"{row.where}, key {fields.prompt_key!r}: the prompt has no tokens")
    return Prompt(id=row_id, text=text, token_ids=token_ids, label=label, metadata=fields.metadata(row))


def deduplicate(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first of each text, in file order. Raises DataError when the same text has two labels."""
    first: dict[str, Prompt] = {}
    for p in prompts:
        kept = first.setdefault(p.text, p)
        if kept.label != p.label:
            raise DataError(
                f"data.dedupe: prompts {kept.id!r} and {p.id!r} have the same text but labels {kept.label!r} and "
                f"{p.label!r}; correct the data"
            )
    return list(first.values())
