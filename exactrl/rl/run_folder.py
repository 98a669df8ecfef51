"""The run folder: every file whole or absent, an earlier run never overwritten."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from exactrl.errors import CheckpointError, EnvironmentProblem, ExactRLError, Interrupted, NonFiniteError, UsageError
from exactrl.rl.resume import checkpoints, cut_after
from exactrl.types import Group, Sample


class RunFolder:
    """Writes OUT/ as documented in docs/architecture.md. A lock keeps two runs out of one folder; the system drops it
    when the process ends, however it ends.

    `go_on_after`: the folder's run is continued after that step, whatever lies beyond it is cut off, and `rows` are all
    metrics of the run so far; `seen` are its checkpoints as they were when go_on_after was chosen. Otherwise raises
    UsageError for a folder that holds a run; always for one that is in use, or was since `seen`. Raises
    EnvironmentProblem when the disk refuses, CheckpointError when rows up to go_on_after are missing.
    """

    def __init__(
        self, path: Path, *, go_on_after: int | None = None, seen: Sequence[tuple[int, Path]] | None = None
    ) -> None:
        self.path = path
        metrics = path / "metrics.jsonl"
        if go_on_after is None:
            _require_no_run(path)
        self._lock = lock_folder(path)
        try:
            # Once more, now that nobody else can change it: another run may have come and gone since.
            if go_on_after is None:
                _require_no_run(path)
            elif seen is not None and checkpoints(path) != list(seen):
                raise UsageError(f"{path} was changed by another run in the meantime; start again")
            self.rows = [] if go_on_after is None else cut_after(path, go_on_after)
            (path / "samples").mkdir(parents=True, exist_ok=True)
            self._metrics = metrics.open("a" if self.rows else "w", encoding="utf-8")
            (path / "failure.json").unlink(missing_ok=True)
        except OSError as error:
            self._lock.release()
            raise EnvironmentProblem(f"{path}: cannot be used as a run folder: {error}") from error
        except ExactRLError:
            self._lock.release()
            raise

    def write_text(self, name: str, text: str) -> None:
        """One file, written beside and renamed."""
        target = self.path / name
        temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
        try:
            with temporary.open("w", encoding="utf-8") as f:
                f.write(text)
                f.flush()
                os.fsync(f.fileno())
            temporary.replace(target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise EnvironmentProblem(f"{target}: cannot be written: {error}") from error

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        self.write_text(name, json.dumps(value, indent=2, sort_keys=False) + "\n")

    def write_environment(self, value: dict[str, Any], step: int) -> None:
        """environment.json: that of the first part of a run, and under "resumed" those of later ones."""
        path = self.path / "environment.json"
        if step and path.is_file():
            try:
                first = dict(json.loads(path.read_text(encoding="utf-8")))
            except (ValueError, TypeError, RecursionError) as error:
                raise CheckpointError(f"{path}: damaged ({error}); move it away, and the run goes on") from error
            value = {**first, "resumed": [*first.get("resumed", []), {"after_step": step, **value}]}
        self.write_json("environment.json", value)

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Raises NonFiniteError for a value that JSON has no number for: a metric is absent or a number, never NaN."""
        try:
            line = json.dumps(row, allow_nan=False)
        except ValueError as error:
            bad = [k for k, v in row.items() if isinstance(v, float) and not np.isfinite(v)]
            raise NonFiniteError(f"step {row.get('step')}: metric {', '.join(bad)} is not finite") from error
        try:
            self._metrics.write(line + "\n")
            self._metrics.flush()
        except OSError as error:
            raise EnvironmentProblem(f"{self.path / 'metrics.jsonl'}: cannot be written: {error}") from error
        self.rows.append(row)

    def write_samples(self, step: int, groups: Sequence[Group]) -> None:
        rows = [json.dumps(sample_row(g.prompt.text, s)) for g in groups for s in g.samples]
        self.write_text(f"samples/step_{step:06d}.jsonl", "\n".join(rows) + "\n")

    def write_failure(self, error: BaseException, after_step: int) -> None:
        """failure.json: why the run ended early. The report's verdict reads it."""
        value = {"type": type(error).__name__, "message": str(error), "after_step": after_step}
        self.write_json("failure.json", value)

    @contextmanager
    def recorded(
        self, steps: int, report: Callable[[Path], object] = lambda path: None, hint: str = ""
    ) -> Iterator[None]:
        """Around a run of `steps` steps: what ends it early is written to failure.json and `report` is called; Ctrl-C
        becomes Interrupted, whose message holds `hint`. Closes metrics.jsonl."""
        try:
            yield
        except BaseException as error:
            with suppress(ExactRLError):  # a full disk must not hide why the run ended
                self.write_failure(error, after_step=len(self.rows))
                report(self.path)
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted(
                    f"interrupted after step {len(self.rows)} of {steps}{hint}; see {self.path}"
                ) from error
            raise
        finally:
            self.close()

    def checkpoint_path(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step_{step:06d}"

    def prune_checkpoints(self, keep: int) -> list[str]:
        """Removes all but the newest `keep` checkpoints, by step number. Returns what could not be removed and why: a
        checkpoint that another process holds open must not end a run."""
        problems = []
        for _, path in checkpoints(self.path)[:-keep]:
            try:
                shutil.rmtree(path)
            except OSError as error:
                problems.append(f"old checkpoint {path.name} cannot be removed: {error}")
        return problems

    def sync_metrics(self) -> None:
        """Puts all rows on disk: a checkpoint must never be newer than they are."""
        try:
            os.fsync(self._metrics.fileno())
        except OSError as error:
            raise EnvironmentProblem(f"{self.path / 'metrics.jsonl'}: cannot be written: {error}") from error

    def close(self) -> None:
        """Raises EnvironmentProblem when rows that were still in memory do not fit on the disk."""
        try:
            self._metrics.close()
        except OSError as error:
            raise EnvironmentProblem(f"{self.path / 'metrics.jsonl'}: cannot be written: {error}") from error
        finally:
            self._lock.release()


def holds_run(path: Path) -> bool:
    """A run that ended before its first step holds nothing worth keeping; its folder can be used again."""
    metrics = path / "metrics.jsonl"
    return bool(metrics.is_file() and metrics.stat().st_size) or (path / "checkpoints").exists()


def _require_no_run(path: Path) -> None:
    if holds_run(path):
        raise UsageError(
            f"{path} already holds a run; choose another --out, move it away, or go on with --resume (nothing was "
            "changed)"
        )


def lock_folder(path: Path) -> FileLock:
    """Takes the lock of a run folder, which is made where it is missing. Raises UsageError when another process has it,
    EnvironmentProblem when the folder cannot be made."""
    lock = FileLock(path / ".lock", timeout=0)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise UsageError(f"{path} is in use by another run; wait for it, or choose another --out") from error
    except OSError as error:
        raise EnvironmentProblem(f"{path}: cannot be used as a run folder: {error}") from error
    return lock


def logprob_bits(logprobs: NDArray[np.float32]) -> list[str]:
    """Eight hex digits per value: the exact float32 bit patterns."""
    return [f"{b:08x}" for b in np.ascontiguousarray(logprobs).view(np.uint32).tolist()]


def sample_row(prompt: str, sample: Sample) -> dict[str, Any]:
    """A sample as JSON: the names of `exactrl generate`, and what training adds."""
    return {
        "id": sample.prompt_id,
        "sample": sample.sample_index,
        "prompt": prompt,
        "prompt_token_ids": list(sample.prompt_token_ids),
        "token_ids": sample.token_ids,
        "text": sample.text,
        "logprobs": [float(x) for x in sample.logprobs],
        "logprob_bits": logprob_bits(sample.logprobs),
        "finish_reason": sample.finish_reason,
        "label": sample.label,
        "reward": sample.reward,
        "reward_error": sample.reward_error or None,
        "reward_reason": sample.reward_reason or None,
        "advantage": sample.advantage,
        "in_loss": sample.in_loss,
        "weight_version": sample.weight_version,
    }
