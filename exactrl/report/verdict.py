"""The headline: do rollout and trainer agree, as far as the metrics say so, and no further."""

from __future__ import annotations

import math
from dataclasses import dataclass

from exactrl.report.read import Row, Run, is_training_row, number
from exactrl.report.text import plain

COMPARED = "train/logprob_compared_tokens"
UNCOMPARED = "train/logprob_uncompared_tokens"
MISMATCH = "train/logprob_mismatch_tokens"
DIFF = "train/train_rollout_logprob_abs_diff"
DIFF_MAX = "train/logprob_abs_diff_max"
RESCORE = "train/rescore_mismatch_tokens"


@dataclass(frozen=True, slots=True)
class Verdict:
    """tone: "good" (equality shown), "bad" (a difference), "warn" (nothing or not all shown), "off" (not promised)."""

    tone: str
    headline: str
    detail: list[str]


def judge(run: Run) -> Verdict:
    """Equality is claimed only when every training row compared at least one token and every difference is zero."""
    rows = [row for row in run.rows if is_training_row(row)]
    failing = [row for row in rows if _differs(row)]
    silent = [row for row in rows if not _compares(row)]
    compared = _total(rows, COMPARED)
    detail = _coverage(run, rows, silent)
    if run.setting("contract", "true_on_policy") is False:
        mismatched = _total(rows, MISMATCH)
        counts = f"{plain(mismatched)} of {plain(compared)} compared tokens differ"
        known = compared > 0 and any(number(row, MISMATCH) is not None for row in rows)
        return Verdict("off", "True on-policy is off: " + (counts if known else "no token was compared"), detail)
    if run.failure and run.failure.get("type") in ("ParityError", "NonFiniteError"):
        return Verdict("bad", f"STOPPED by the parity check after step {run.failure.get('after_step')}", detail)
    if failing:
        first = failing[0]
        more = f"; {len(failing)} steps differ in all" if len(failing) > 1 else ""
        return Verdict("bad", f"MISMATCH at step {plain(first['step'])}: {_describe(first)}{more}", detail)
    if compared <= 0 or len(silent) == len(rows):
        return Verdict("warn", "No token was compared: nothing is claimed about agreement", detail)
    claim = f"0 of {plain(compared)} compared tokens differ"
    if silent:
        return Verdict("warn", f"{claim}, but {len(silent)} of {len(rows)} steps lack the comparison", detail)
    uncompared = _total(rows, UNCOMPARED)
    if uncompared:
        return Verdict("warn", f"{claim}; {plain(uncompared)} sampled tokens were not compared", detail)
    if run.lost:
        return Verdict("warn", f"{claim}, but {run.lost} lines of metrics.jsonl are unreadable", detail)
    return Verdict("good", claim, detail)


def _compares(row: Row) -> bool:
    compared = number(row, COMPARED)
    measured = number(row, MISMATCH) is not None and number(row, DIFF) is not None
    return measured and compared is not None and compared > 0 and math.isfinite(compared)


def _differs(row: Row) -> bool:
    # NaN != 0 is true, so a value that is not finite counts as a difference.
    values = (number(row, key) for key in (MISMATCH, DIFF, DIFF_MAX, RESCORE))
    return any(value is not None and value != 0 for value in values)


def _describe(row: Row) -> str:
    mismatch, compared = number(row, MISMATCH), number(row, COMPARED)
    if mismatch:
        of = f"{plain(compared)} compared tokens" if compared is not None else "an unknown number of compared tokens"
        parts = [f"{plain(mismatch)} of {of} differ"]
    else:
        parts = ["the differences are not zero"]
    names = {DIFF: "mean difference", DIFF_MAX: "largest difference", RESCORE: "tokens that differ when re-scored"}
    parts += [f"{name} {plain(value)}" for key, name in names.items() if (value := number(row, key))]
    return ", ".join(parts)


def _total(rows: list[Row], key: str) -> float:
    return math.fsum(value for row in rows if (value := number(row, key)) is not None and math.isfinite(value))


def _coverage(run: Run, rows: list[Row], silent: list[Row]) -> list[str]:
    """Sentences on what the headline covers: steps, uncompared tokens, audits, an unfinished run."""
    ended = [f"{run.failure.get('type')}: {run.failure.get('message')}"] if run.failure else []
    if not rows:
        return [*ended, "There are no training steps in metrics.jsonl."]
    first, last = min(row["step"] for row in rows), max(row["step"] for row in rows)
    lines = [*ended, f"Steps {plain(first)} to {plain(last)}." if first != last else f"Step {plain(first)} only."]
    planned = run.setting("run", "steps")
    if isinstance(planned, int) and last < planned:
        lines.append(f"The run has not reached its {plain(planned)} steps: it stopped or is still running.")
    if any(number(row, UNCOMPARED) is not None for row in rows):
        lines.append(f"{plain(_total(rows, UNCOMPARED))} sampled tokens were not compared.")
    audited = [row for row in rows if number(row, RESCORE) is not None]
    if audited:
        plural = "step" if len(audited) == 1 else "steps"
        lines.append(f"Re-scored on {len(audited)} audited {plural}: {plain(_total(audited, RESCORE))} tokens differ.")
    if silent and len(silent) < len(rows):
        names = ", ".join(plain(row["step"]) for row in silent[:8]) + (" …" if len(silent) > 8 else "")
        lines.append(f"No comparison at step {names}.")
    if run.setting("contract", "true_on_policy") is None:
        lines.append("Whether true on-policy was switched on is not known: config.toml does not say.")
    return lines
