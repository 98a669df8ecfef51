"""What a training run prints: one stable plain line per step, or a live view on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exactrl.cli.options import Settings, is_interactive

if TYPE_CHECKING:
    from rich.console import Console

Metrics = dict[str, Any]


def _number(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


def _difference(value: float) -> str:
    """`0` is reserved for exactly 0; anything else shows its magnitude."""
    return "0" if value == 0 else f"{value:.3g}"


def _unless_zero(value: float) -> str:
    """An empty text, and so no field, for 0: what should not happen is shown only when it does."""
    return f"{value:.0f}" if value else ""


# (name in a plain line, metric, format); a metric that is absent has no field.
Fields = list[tuple[str, str, Callable[[Any], str]]]
_FIELDS: Fields = [
    ("reward", "rollout/raw_reward", _number(4)),
    ("response_len", "rollout/response_len/mean", _number(1)),
    ("entropy", "train/entropy", _number(4)),
    ("logprob_diff", "train/train_rollout_logprob_abs_diff", _difference),
    ("compared", "train/logprob_compared_tokens", lambda value: f"{value:.0f}"),
    ("mismatches", "train/logprob_mismatch_tokens", lambda value: f"{value:.0f}"),
    ("uncompared", "train/logprob_uncompared_tokens", _unless_zero),
    ("kl", "train/kl", _difference),
    ("discarded_groups", "rollout/discarded_groups", _unless_zero),
    ("failed_rewards", "rollout/failed_rewards", _unless_zero),
    ("rescore_mismatches", "train/rescore_mismatch_tokens", lambda value: f"{value:.0f}"),
    ("tok_per_s", "perf/rollout_tokens_per_sec", _number(0)),
    ("step_time", "perf/step_time", _number(2)),
]
_HEADINGS = {
    "reward": "reward",
    "response_len": "length",
    "entropy": "entropy",
    "logprob_diff": "logprob diff",
    "compared": "compared",
    "mismatches": "mismatches",
    "tok_per_s": "tok/s",
    "step_time": "seconds",
}
_SFT_FIELDS: Fields = [
    ("epoch", "epoch", str),
    ("loss", "train/loss", _number(4)),
    ("tokens", "train/num_tokens", str),
    ("grad_norm", "train/grad_norm", lambda value: f"{value:.3g}"),
    ("lr", "train/lr", lambda value: f"{value:.3g}"),
    ("tok_per_s", "perf/train_tokens_per_sec", _number(0)),
    ("step_time", "perf/step_time", _number(2)),
]
_SFT_HEADINGS = {
    "epoch": "epoch",
    "loss": "loss",
    "tokens": "tokens",
    "grad_norm": "grad norm",
    "lr": "lr",
    "tok_per_s": "tok/s",
    "step_time": "seconds",
}


@dataclass(frozen=True)
class View:
    """What a kind of run shows of a step, under which headings, and whether it compares sampled tokens."""

    fields: Fields
    headings: dict[str, str]
    compares: bool


RL_VIEW = View(_FIELDS, _HEADINGS, compares=True)
SFT_VIEW = View(_SFT_FIELDS, _SFT_HEADINGS, compares=False)


def step_fields(metrics: Metrics, view: View = RL_VIEW) -> dict[str, str]:
    """The fields of a step's line. A logprob difference without compared tokens says nothing and is left out."""
    fields = {"step": str(metrics["step"])}
    for name, metric, form in view.fields:
        if metric in metrics and not (name == "logprob_diff" and not metrics.get("train/logprob_compared_tokens")):
            fields[name] = form(metrics[metric])
    fields = {name: text for name, text in fields.items() if text}
    for metric, value in metrics.items():
        name, _, what = metric.rpartition("/")
        if metric.startswith("eval/") and what in ("mean", "loss"):
            fields[name] = f"{value:.4f}"
    return fields


class PlainEvents:
    """Consumer of a run's events: `key=value` lines, and the totals for the end. Quiet prints the last line only."""

    def __init__(self, screen: Console, *, quiet: bool, steps: int, view: View = RL_VIEW) -> None:
        self.screen = screen
        self.view = view
        self.quiet = quiet
        self.steps = steps
        self.compared = 0
        self.mismatches = 0
        self.rescore_mismatches = 0

    def __enter__(self) -> PlainEvents:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def on_start(self, info: Metrics) -> None:
        if not self.quiet:
            scalars = {key: value for key, value in info.items() if isinstance(value, str | int | float)}
            self._line(" ".join(f"{key}={value}" for key, value in scalars.items()))
            for name, counts in info.get("data", {}).items():
                self._line(f"data {name}: " + " ".join(f"{key}={value}" for key, value in counts.items()))

    def on_progress(self, phase: str, done: int, total: int) -> None:
        pass

    def on_step(self, metrics: Metrics) -> None:
        self.compared += int(metrics.get("train/logprob_compared_tokens", 0))
        self.mismatches += int(metrics.get("train/logprob_mismatch_tokens", 0))
        self.rescore_mismatches += int(metrics.get("train/rescore_mismatch_tokens", 0))
        if not self.quiet:
            self.show_step(metrics)

    def on_end(self, summary: Metrics) -> None:
        pass

    def on_note(self, text: str) -> None:
        if not self.quiet:
            self._line(f"note: {text}")

    def show_step(self, metrics: Metrics) -> None:
        self._line(" ".join(f"{name}={value}" for name, value in step_fields(metrics, self.view).items()))

    def conclude(self, summary: Metrics) -> None:
        """The final line: where things are, and what the comparison found over the whole run."""
        if not self.view.compares:
            loss = f"last loss {summary['loss']:.4f}"
            self._line(
                f"done: {summary['steps']} steps; {loss}; run folder {summary['out']}; model {summary['checkpoint']}"
            )
            return
        rescored = f", {self.rescore_mismatches} when scored again" if self.rescore_mismatches else ""
        compared = summary.get("compared_tokens", self.compared)
        mismatches = summary.get("mismatch_tokens", self.mismatches)
        uncompared = summary.get("uncompared_tokens", 0)
        left = f" ({uncompared} more were not)" if uncompared else ""
        self._line(
            f"done: {summary.get('steps', self.steps)} steps; {compared} sampled tokens compared{left}, {mismatches} "
            f"mismatches{rescored}; run folder {summary['out']}; report {summary.get('report') or 'not written'}"
        )

    def _line(self, text: str) -> None:
        # Through rich, so that a live view moves out of the way; never wrapped, and flushed for readers of a pipe.
        self.screen.print(text, markup=False, soft_wrap=True)
        self.screen.file.flush()


class LiveEvents(PlainEvents):
    """The same on a terminal: a row per step above a bar with the time left and the phase of the current step."""

    def __init__(self, screen: Console, *, steps: int, evals: tuple[str, ...], view: View = RL_VIEW) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__(screen, quiet=False, steps=steps, view=view)
        self.columns = {"step": "step", **view.headings, **{f"eval/{name}": name for name in evals}}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        # Steps can take minutes; rich forgets speeds older than this many seconds.
        self.progress = Progress(*columns, console=screen, transient=True, speed_estimate_period=7200)
        self.run_bar = self.progress.add_task("steps", total=steps)
        self.phase_bar = self.progress.add_task("start", total=None)

    def __enter__(self) -> LiveEvents:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def on_start(self, info: Metrics) -> None:
        super().on_start(info)
        self.progress.update(self.run_bar, total=info.get("steps", self.steps))
        self.screen.print("  ".join(f"{title:>{self._width(title)}}" for title in self.columns.values()), style="bold")

    def on_progress(self, phase: str, done: int, total: int) -> None:
        self.progress.update(self.phase_bar, description=phase, completed=done, total=total)

    def show_step(self, metrics: Metrics) -> None:
        from rich.text import Text

        fields = step_fields(metrics, self.view)
        row = Text()
        for name, title in self.columns.items():
            bad = name in ("logprob_diff", "mismatches") and fields.get(name, "0") != "0"
            row.append(f"{fields.get(name, '-'):>{self._width(title)}}  ", style="bold red" if bad else "")
        self.screen.print(row, soft_wrap=True)
        if int(metrics.get("train/rescore_mismatch_tokens", 0)):
            self._line(f"      {fields['rescore_mismatches']} tokens differ when scored again")
        self.progress.update(self.run_bar, completed=metrics["step"])

    @staticmethod
    def _width(title: str) -> int:
        return max(7, len(title))


def train_events(
    screen: Console, settings: Settings, steps: int, evals: tuple[str, ...], view: View = RL_VIEW
) -> PlainEvents:
    """The consumer that fits: live on a terminal, plain lines elsewhere, the final line only when quiet."""
    if is_interactive(screen) and not settings.quiet:
        return LiveEvents(screen, steps=steps, evals=evals, view=view)
    return PlainEvents(screen, quiet=settings.quiet, steps=steps, view=view)
