"""One self-contained HTML page from a run folder: no network, no script, no external file."""

from exactrl.report.html import write_report

__all__ = ["write_report"]
