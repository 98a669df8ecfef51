"""Text to token ids and back, from a model folder's tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from exactrl.errors import ModelError


class Tokenizer:
    """A `tokenizers.Tokenizer` with the model's stop tokens. Adds no special tokens when encoding."""

    def __init__(self, backend: tokenizers.Tokenizer, eos_ids: tuple[int, ...] = ()) -> None:
        self.backend = backend
        self.eos_ids = eos_ids

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens spelled out in it (`<|im_end|>`) become their ids."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode`, for many texts on all cores."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of all ids, special tokens spelled out.

        An id beyond the tokenizer has no text and contributes none: models often pad their vocabulary (Qwen3's has
        151,936 entries for 151,669 tokens), and such an id can be sampled. The ids themselves stay what is trained on.
        """
        return self.backend.decode(list(token_ids), skip_special_tokens=False)

    def decode_response(self, token_ids: Sequence[int], stop_token_ids: Sequence[int] = ()) -> str:
        """As `decode`, without the stop token at the end if there is one. Special tokens elsewhere stay visible, so a
        reward function sees what the model really wrote."""
        if token_ids and token_ids[-1] in (stop_token_ids or self.eos_ids):
            token_ids = token_ids[:-1]
        return self.decode(token_ids)


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer of a model folder, or None where it has no tokenizer.json (ids are then all there is).

    Raises ModelError for an unreadable tokenizer.json or a malformed eos_token_id.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        return None
    backend = _read_backend(path)
    # A tokenizer.json may cut or pad every text; transformers switches both off, too.
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(backend, eos_ids(folder))


def eos_ids(folder: str | Path) -> tuple[int, ...]:
    """Stop tokens of a model folder: eos_token_id of generation_config.json, then that of config.json, without
    repeats; each is an int, a list of ints, or absent. Where neither names one, the eos_token of tokenizer_config.json;
    empty when that is absent, too. Raises ModelError for a malformed one."""
    found: dict[int, None] = {}
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        value = _read_object(path).get("eos_token_id") if path.is_file() else None
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise ModelError(f"{path}: eos_token_id must be a token id or a list of them, not {value!r}")
            found[token] = None
    return tuple(found) or _eos_of_tokenizer(Path(folder))


def _eos_of_tokenizer(folder: Path) -> tuple[int, ...]:
    """The id of tokenizer_config.json's eos_token: a text, or an object with it as "content". The same token may be the
    bos_token; nothing here adds one."""
    path = folder / "tokenizer_config.json"
    if not path.is_file() or not (folder / "tokenizer.json").is_file():
        return ()
    token = _read_object(path).get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if text is None:
        return ()
    found = _read_backend(folder / "tokenizer.json").token_to_id(text) if isinstance(text, str) else None
    if found is None:
        raise ModelError(f"{path}: eos_token {token!r} is not a token of tokenizer.json")
    return (found,)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        # The library raises bare Exception for every kind of fault in the file.
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelError(f"{path}: not a readable tokenizer: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value
