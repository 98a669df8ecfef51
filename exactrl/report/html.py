"""Puts the page together and writes it."""

from __future__ import annotations

import os
from pathlib import Path

from exactrl.errors import EnvironmentProblem
from exactrl.report.numbers import key_numbers, metrics_table
from exactrl.report.read import Run, read_run
from exactrl.report.sections import chart_sections
from exactrl.report.style import CSS
from exactrl.report.tables import samples_section
from exactrl.report.text import clean
from exactrl.report.verdict import Verdict, judge

SAMPLE_ROWS = 6
SIGNS = {"good": "✓", "bad": "✕", "warn": "!", "off": "–"}


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Writes the report of a run folder to `out` (RUN/report.html by default) and returns where it is.

    The page depends on the folder's content only: the same folder gives the same bytes. Nothing in the folder is
    changed. Raises DataError where there is nothing to show, EnvironmentProblem where `out` cannot be written.
    """
    run_dir = Path(run_dir)
    run = read_run(run_dir, SAMPLE_ROWS)
    target = Path(out) if out is not None else run_dir / "report.html"
    _write_atomically(target, render(run))
    return target


def render(run: Run) -> str:
    """The whole page. A content security policy forbids it to load anything or to run a script."""
    name = clean(run.path.resolve().name or "run")
    body = [
        _header(run, name),
        _verdict(judge(run)),
        _notes(run.notes),
        key_numbers(run),
        *chart_sections(run),
        samples_section(run, SAMPLE_ROWS),
        _details(run),
        f"<footer>Written by <code>exactrl report</code> from {len(run.rows):,} rows of metrics.jsonl. Point at a "
        "chart for the numbers of a step.</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name} – ExactRL report</title><style>{CSS}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def _header(run: Run, name: str) -> str:
    facts = [
        ("model", run.setting("model", "path")),
        ("contract", run.setting("contract", "name")),
        ("rollout", run.setting("rollout", "backend")),
        ("train", run.setting("train", "backend")),
    ]
    line = " · ".join(f"{key} {clean(str(value))}" for key, value in facts if value is not None)
    return f"<header><p>ExactRL run report</p><h1>{name}</h1><p>{line}</p></header>"


def _verdict(verdict: Verdict) -> str:
    detail = "".join(f"<li>{clean(line)}</li>" for line in verdict.detail)
    return (
        f'<section class="verdict {verdict.tone}" aria-label="Verdict"><p><span aria-hidden="true">'
        f"{SIGNS[verdict.tone]}</span> {clean(verdict.headline)}</p><ul>{detail}</ul></section>"
    )


def _notes(notes: list[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{clean(note)}</li>" for note in notes[:20])
    if len(notes) > 20:
        items += f"<li>{len(notes) - 20} more notes are not shown.</li>"
    return f'<section class="notes" aria-label="Notes"><b>What this page could not read</b><ul>{items}</ul></section>'


def _details(run: Run) -> str:
    parts = ['<h2 id="details">Behind the numbers</h2>', metrics_table(run.rows)]
    for name, text in run.texts.items():
        parts.append(f"<details><summary>{clean(name)}</summary><pre>{clean(text)}</pre></details>")
    return "".join(parts)


def _write_atomically(target: Path, text: str) -> None:
    """A reader of `target` sees the old page or the new one, never half of one."""
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        try:
            beside.write_text(text, encoding="utf-8", newline="\n")
            os.replace(beside, target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {target}: {error.strerror}; give another place with --out") from error
