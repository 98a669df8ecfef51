"""The samples tables."""

from __future__ import annotations

from exactrl.report.read import Row, Run, SampleFile, number
from exactrl.report.text import clean, plain

MAX_CHARACTERS = 1200
COLUMNS = ("sample", "prompt", "response", "label", "reward", "advantage", "finish")
NUMERIC = ("reward", "advantage")


def samples_section(run: Run, limit: int) -> str:
    """Rows of the first, middle and last samples file, with what is not shown spelled out."""
    if not run.samples:
        return '<h2 id="samples">Samples</h2><p class="note">There are no samples to show.</p>'
    shown = len(run.samples)
    which = "all of them" if shown == run.sample_files else f"first, middle and last of {run.sample_files:,}"
    parts = [
        f'<h2 id="samples">Samples</h2><p class="note">{shown} sample file{"s" if shown > 1 else ""} ({which}).</p>'
    ]
    for file in run.samples:
        hidden = file.total - len(file.rows)
        rest = f"{hidden:,} more are not shown" if hidden else "that is all of them"
        parts.append(f"<h3>{clean(file.name)}</h3>")
        parts.append(f'<p class="note">The first {min(limit, len(file.rows))} of {file.total:,} rows; {rest}.</p>')
        parts.append(_table(file))
    return "".join(parts)


def _table(file: SampleFile) -> str:
    head = "".join(f'<th scope="col"{_class(name)}>{name}</th>' for name in COLUMNS)
    body = "".join(f"<tr>{''.join(_cells(row))}</tr>" for row in file.rows)
    return f'<div class="wide"><table class="cards"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _class(name: str) -> str:
    return ' class="num"' if name in NUMERIC else ""


def _cells(row: Row) -> list[str]:
    ident = " #".join(str(row[key]) for key in ("id", "sample") if row.get(key) is not None)
    values = {
        "sample": _short(ident) if ident else "–",
        "prompt": _text(row.get("prompt"), row.get("prompt_token_ids")),
        "response": _text(row.get("text"), row.get("token_ids")),
        "label": _short(str(row["label"])) if row.get("label") is not None else "–",
        "reward": plain(number(row, "reward")),
        "advantage": plain(number(row, "advantage")),
        "finish": _short(str(row.get("finish_reason") or "–")),
    }
    return [f'<td{_class(name)} data-label="{name}">{value}</td>' for name, value in values.items()]


def _text(text: object, token_ids: object) -> str:
    """The text, or the token ids where there is no text."""
    if isinstance(text, str):
        return f'<div class="text" dir="auto">{_short(text)}</div>' if text else '<span class="cut">empty</span>'
    if isinstance(token_ids, list):
        ids = " ".join(str(token) for token in token_ids)
        return f'<div class="text"><span class="cut">{len(token_ids):,} token ids:</span> {_short(ids)}</div>'
    return "–"


def _short(text: str) -> str:
    """At most MAX_CHARACTERS of it, escaped, with a note of how many are missing."""
    if len(text) <= MAX_CHARACTERS:
        return clean(text)
    hidden = len(text) - MAX_CHARACTERS
    return f'{clean(text[:MAX_CHARACTERS])} <span class="cut">… {hidden:,} more characters not shown</span>'
