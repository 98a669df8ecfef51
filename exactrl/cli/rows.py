"""Rows of `exactrl generate`: prompts read from a file, an argument or stdin; responses written as JSONL."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import numpy as np

from exactrl.errors import DataError, EnvironmentProblem, NonFiniteError, UsageError
from exactrl.rl.interrupt import SIGNALS, handling
from exactrl.rl.run_folder import logprob_bits
from exactrl.tasks.files import Row, read_rows

PromptRow = tuple[str, str | list[int]]


def read_prompts(argument: str | None, file: str | None) -> list[PromptRow]:
    """(id, text or token ids) of each prompt; ids are unique, by default the row's number from 0.

    Raises UsageError where there is no prompt or more than one source, DataError naming file, row and key.
    """
    if argument is not None and file is not None:
        raise UsageError("give a prompt or --prompts FILE, not both")
    if file is not None:
        return _from_rows(read_rows(file))
    if argument is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("no prompt: give one as an argument, with --prompts FILE, or on stdin")
        argument = _read_stdin()
    if not argument or not _is_unicode(argument):
        raise UsageError("the prompt is empty" if not argument else "the prompt is not valid UTF-8 text")
    return [("0", argument)]


def _is_unicode(text: str) -> bool:
    """False for a text with lone surrogates, which no tokenizer takes: `\\ud800` in JSON, or undecodable arguments."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise DataError(f"stdin: not UTF-8 text: {error.reason} at byte {error.start}") from error


def _from_rows(rows: list[Row]) -> list[PromptRow]:
    seen: dict[str, str] = {}
    prompts: list[PromptRow] = []
    for row in rows:
        name = _id(row)
        if name in seen:
            raise DataError(f"{row.where}, key 'id': {name!r} was already used at {seen[name]}")
        seen[name] = row.where
        prompts.append((name, _prompt(row)))
    return prompts


def _id(row: Row) -> str:
    value = row.value.get("id", row.index)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"{row.where}, key 'id': must be a text that is not empty or an integer, not {value!r}")
    if not _is_unicode(str(value)):
        raise DataError(f"{row.where}, key 'id': is not valid Unicode: {value!a:.80}")
    return str(value)


def _prompt(row: Row) -> str | list[int]:
    given = [key for key in ("prompt", "prompt_token_ids") if key in row.value]
    if len(given) != 1:
        found = "both" if given else "neither"
        raise DataError(f"{row.where}: needs one of the keys 'prompt' and 'prompt_token_ids', and has {found}")
    value = row.value[given[0]]
    if given[0] == "prompt":
        if not isinstance(value, str) or not value:
            raise DataError(f"{row.where}, key 'prompt': must be a text that is not empty, not {value!r:.80}")
        if not _is_unicode(value):
            raise DataError(f"{row.where}, key 'prompt': is not valid Unicode: {value!a:.80}")
        return value
    if not isinstance(value, list) or not value or any(type(token) is not int or token < 0 for token in value):
        raise DataError(
            f"{row.where}, key 'prompt_token_ids': must be a list, not empty, of integers of at least 0, "
            f"not {value!r:.80}"
        )
    return value


def row_line(row: dict[str, Any]) -> str:
    """One response as a line of JSON. `logprob_bits` are the float32 bit patterns, 8 hex digits each.

    Raises NonFiniteError for a logprob that is NaN or infinite.
    """
    logprobs = np.asarray(row["logprobs"], dtype=np.float32)
    if not np.isfinite(logprobs).all():
        position = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        raise NonFiniteError(
            f"prompt {row['id']!r}, sample {row['sample']}: logprob {position} is {logprobs[position]}"
        )
    return json.dumps(
        {
            "id": row["id"],
            "sample": int(row["sample"]),
            "token_ids": [int(token) for token in row["token_ids"]],
            "text": row["text"],
            "logprobs": [float(value) for value in logprobs],
            "logprob_bits": logprob_bits(logprobs),
            "finish_reason": row["finish_reason"],
        },
        ensure_ascii=False,
        allow_nan=False,
    )


def _write(line: str, stream: TextIO) -> None:
    """At once, and never without its end."""
    stream.write(line + "\n")
    stream.flush()


def _names_what_is_open(out: Path) -> bool:
    """/dev/stdout and the like: a shell's `>> file` behind them is added to, never replaced."""
    return out.parts[:2] == ("/", "proc") or out.parts[1:3] in {("dev", "stdout"), ("dev", "stderr"), ("dev", "fd")}


def _ended_in_order() -> AbstractContextManager[None]:
    """SIGTERM and a closed terminal end the process as an exception does, so that nothing half-written stays; ignored
    ones stay ignored, and what others handle stays theirs."""
    ending = (number for number in SIGNALS if number != signal.SIGINT)  # Ctrl-C raises by itself
    return handling([number for number in ending if signal.getsignal(number) == signal.SIG_DFL], _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def open_output(out: Path | None) -> Iterator[Callable[[str], object]]:
    """Gives a function that writes one line, to stdout or to a file that appears only when it is complete.

    The file is written beside its target and renamed; on any error, and on SIGTERM, the target keeps what it had.
    Raises UsageError or EnvironmentProblem, before any work, for a target that cannot be written.
    """
    if out is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # JSON is UTF-8 whatever the locale
        yield lambda line: _write(line, sys.stdout)
        return
    is_open = _names_what_is_open(out)
    target = out if is_open else Path(os.path.realpath(out))
    if target.is_dir():
        raise UsageError(f"--out {out} is a folder; give a file")
    whole = not is_open and (target.is_file() or not target.exists())  # a pipe or a device cannot be renamed over
    part = target.with_name(f".{target.name}.{os.getpid()}.part") if whole else target
    try:
        stream = part.open("w" if whole else "a", encoding="utf-8", newline="\n")
    except OSError as error:
        raise EnvironmentProblem(f"--out {out} cannot be written: {error.strerror}") from error
    try:
        with _ended_in_order(), stream:
            yield lambda line: stream.write(line + "\n") if whole else _write(line, stream)
            stream.flush()
        if whole:
            os.replace(part, target)
    except BaseException:
        if whole:
            part.unlink(missing_ok=True)
        raise
