"""Rollout speed of the engine, exactness on and off, beside SGLang and the memory's bandwidth.

`python -m bench.rollout --part ours off sync table nano sglang` writes bench/results/rollout-h200.json, row by row:

ours, off   tokens per second, true on-policy and not: prompt 256, response 1024 at 256 and 32 sequences, 512 at 1; no
            token ends a response, temperature 1, logprobs recorded
nano        nano-vllm's workload: 256 prompts of 100 to 1024 tokens, responses of 100 to 1024, Qwen3-0.6B; on and off
rolling     512 prompts and responses of 100 to 512 tokens, 256 at a time: prompts come while others decode; on and off
sync        Engine.load_weights from tensors on the device
sleep       Engine.sleep, and how much longer the first tokens after it take
table       kernels of one decode step at 1, 32 and 256 sequences, context 768; off-table: with exactness off
scheduler   the scheduler's share of a step at 1,024 sequences
sglang      the workloads of `ours`, with `rolling` or `--rolling` that one, too, in SGLang, default and
            rl_on_policy_target=fsdp (bench/rollout_sglang.py)

Each part (each mode of a part) is a process of its own, so that none finds another's memory, flags or caches, and each
says how long it took from its start to its first token. Floor: one reading of weights and cached keys in each step at
4.3 TB/s. Kernels must be certified for the shape (bench.parity --make-model FOLDER, exactrl certify FOLDER).
`--shape tiny --device cpu --workload 2:8:4 1:8:4 --nano 4:3:9 --rolling 4:3:9 --context 12` tries all without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.common import RESULTS, write_result
from bench.parity import SHAPES, make_model_folder
from bench.rollout_points import (
    MANY,
    NANO,
    ROLLING,
    STANDARD,
    Row,
    Setup,
    Workload,
    floor_tokens_per_sec,
    scheduling,
    sleeping,
    started,
    throughput,
    weight_sync,
)
from bench.rollout_sglang import MODES, end_with_parent
from bench.rollout_table import as_text, kernel_table
from exactrl.rl.environment import git_revision

PARTS = ("ours", "off", "rolling", "sync", "sleep", "table", "off-table", "scheduler", "nano", "sglang")
CONTEXT = 768


def jobs_of(part: str, modes: Sequence[str] = tuple(MODES)) -> list[str]:
    """The processes of a part; `modes` of SGLang."""
    if part == "sglang":
        return [f"sglang {mode}" for mode in modes]
    return [f"{part} on", f"{part} off"] if part in ("nano", "rolling") else [part]


def setup_of(job: str, arguments: argparse.Namespace) -> Setup:
    nano = job.startswith("nano") and arguments.shape == "4B" and not arguments.model
    return Setup(
        "0.6B" if nano else arguments.shape, arguments.model, arguments.device, "off" not in job,
        arguments.chunk_tokens, dict(arguments.engine),
    )  # fmt: skip


def work_of(job: str, arguments: argparse.Namespace) -> Sequence[Workload]:
    standard = [Workload.equal(*w) for w in arguments.workload] or STANDARD
    if "table" in job:  # the new tokens are an upper bound of what a table's windows take
        return [Workload.equal(len(w.prompts), arguments.context, 128) for w in standard]
    if job == "scheduler":
        return standard[:1] if arguments.workload else [MANY]
    if job.startswith("nano"):
        return [Workload.mixed(*arguments.nano) if arguments.nano else NANO]
    rolling = [Workload.rolling(*arguments.rolling) if arguments.rolling else ROLLING]
    if job.startswith("rolling"):
        return rolling
    if job == "sleep":
        return standard[:1]
    if job.startswith("sglang") and ("rolling" in arguments.part or arguments.rolling):
        return [*standard, *rolling]
    return standard


def measured(part: str, setup: Setup, work: Sequence[Workload], repeats: int, began: float) -> Iterator[Row]:
    """Rows of one part, as they come."""
    engine, start = started(setup, work, began)
    yield start
    if part in ("sync", "sleep"):
        yield weight_sync(engine) if part == "sync" else sleeping(engine, work[0])
        return
    for w in work:
        if part == "table":
            yield kernel_table(engine, len(w.prompts), w.prompts[0])
        elif part == "scheduler":
            yield scheduling(engine, w)
        else:
            yield throughput(engine, w, repeats, setup.chunk_tokens)


def run_here(job: str, arguments: argparse.Namespace) -> None:
    """One job in this process; rows go to standard output as they come."""
    end_with_parent()
    setup, part = setup_of(job, arguments), job.split()[0].removeprefix("off-")
    for row in measured(part, setup, work_of(job, arguments), arguments.repeats, arguments.began):
        print("ROW " + json.dumps(row), flush=True)


def command_of(job: str, arguments: argparse.Namespace, given: Sequence[str], folder: Path) -> list[str]:
    if not job.startswith("sglang"):
        return [sys.executable, "-m", "bench.rollout", *given, "--job", job, "--began", repr(time.time())]
    setup, model = setup_of(job, arguments), arguments.model or folder / "model"
    if not arguments.model:
        make_model_folder(model, arguments.shape)
    vocab = setup.config().vocab_size
    work = [
        {"name": w.name, "new": w.new, "repeats": [w.prompt_ids(r, vocab) for r in range(arguments.repeats + 1)]}
        for w in work_of(job, arguments)
    ]
    path = folder / "work.json"
    path.write_text(json.dumps(work))
    script = Path(__file__).with_name("rollout_sglang.py")
    return [arguments.sglang_python, str(script), job.split()[1], str(model), str(path)]


def rows_of(command: Sequence[str], environment: dict[str, str], seconds: float) -> Iterator[Row]:
    """Rows of a job's process, as it prints them. A process that fails or takes longer than `seconds` gives one last
    row that says so. Its whole process group is ended with it."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    late = threading.Timer(seconds, _end, [process])
    late.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ROW "):
                yield json.loads(line[4:])
            else:
                print(line, end="", flush=True)
        if process.wait():
            why = f"longer than {seconds:g} s" if late.finished.is_set() else f"exit code {process.returncode}"
            yield {"what": "failure", "why": why}
    finally:
        late.cancel()
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _medians(rows: Sequence[Row], job: str) -> dict[str, float]:
    """Tokens per second by workload."""
    return {r["workload"]: r["tokens_per_sec"] for r in rows if r["job"] == job and r["what"] == "throughput"}


def summary_of(rows: Sequence[Row], floor: dict[str, float]) -> dict[str, Any]:
    """What was not measured is absent. `tax` is the largest over workloads of off speed / on speed."""
    on, off = ({**_medians(rows, a), **_medians(rows, b)} for a, b in (("ours", "rolling on"), ("off", "rolling off")))
    sglang = _medians(rows, "sglang default")
    found: dict[str, Any] = {
        "tokens_per_sec": on, "off_tokens_per_sec": off, "sglang_default": sglang,
        "sglang_on_policy": _medians(rows, "sglang on-policy"), "floor": floor,
        "of_floor": {k: round(v / floor[k], 4) for k, v in on.items() if k in floor},
        "over_sglang_default": {k: round(on[k] / v, 4) for k, v in sglang.items() if k in on},
        "off_over_sglang_default": {k: round(off[k] / v, 4) for k, v in sglang.items() if k in off},
        "tax_by_workload": {k: round(off[k] / v, 4) for k, v in on.items() if k in off},
    }  # fmt: skip
    if found["tax_by_workload"]:
        found["tax"] = max(found["tax_by_workload"].values())
    for mode in ("on", "off"):
        found[f"nano_{mode}_tokens_per_sec"] = next(iter(_medians(rows, f"nano {mode}").values()), None)
    starts = [r["seconds"]["first_token"] for r in rows if r["what"] == "start" and r["job"] == "ours"]
    found["start_seconds"] = statistics.median(starts) if starts else None
    for what in ("sync", "sleep"):
        found[f"{what}_ms"] = next((r["median_ms"] for r in rows if r["what"] == what), None)
    found["scheduler_share"] = next((r["share"] for r in rows if r["what"] == "scheduler"), None)
    failed = [f"{r['job']}: {r['why']}" for r in rows if r["what"] == "failure"]
    return {k: v for k, v in {**found, "failed": failed}.items() if v not in (None, {}, [])}


def kept_rows(path: Path, jobs: Sequence[str]) -> list[Row]:
    """Rows of an earlier run whose jobs are not run now; each has its own date and revision."""
    if not path.exists():
        return []
    return [row for row in json.loads(path.read_text())["rows"] if row["job"] not in jobs]


def numbers(text: str) -> tuple[int, ...]:
    parts = tuple(int(x) for x in text.split(":"))
    if len(parts) != 3 or min(parts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not SEQUENCES:NUMBER:NUMBER, each at least 1")
    return parts


def option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE with a JSON value (true, 16, …)") from error


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument(
        "--part", nargs="+", choices=PARTS, default=["ours", "off", "sync", "table", "scheduler", "nano"]
    )
    found.add_argument("--shape", choices=SHAPES, default="4B", help="random weights of this shape (nano: 0.6B)")
    found.add_argument("--model", type=Path, help="a model folder instead")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--repeats", type=int, default=3)
    found.add_argument("--add", action="store_true", help="keep the file's rows of parts that are not run now")
    found.add_argument("--machine", default="h200", help="suffix of the result file")
    found.add_argument("--seconds", type=float, default=600, help="limit of one process")
    found.add_argument("--workload", type=numbers, nargs="+", default=[], metavar="SEQUENCES:PROMPT:NEW")
    for name in ("--nano", "--rolling"):
        found.add_argument(name, type=numbers, metavar="SEQUENCES:LEAST:MOST")
    found.add_argument("--context", type=int, default=CONTEXT, help="of the table's sequences, in tokens")
    found.add_argument("--chunk-tokens", type=int, default=16384)
    found.add_argument("--engine", type=option, nargs="+", default=[], metavar="NAME=VALUE", help="of Engine(...)")
    found.add_argument("--sglang-modes", nargs="+", choices=tuple(MODES), default=list(MODES))
    found.add_argument("--sglang-python", default=sys.executable)
    found.add_argument("--sglang-path", help="PYTHONPATH of SGLang's process")
    found.add_argument("--job", help=argparse.SUPPRESS)
    found.add_argument("--began", type=float, help=argparse.SUPPRESS)
    return found


def main() -> None:
    given = sys.argv[1:]
    arguments = parser().parse_args(given)
    if arguments.job:
        run_here(arguments.job, arguments)
        return
    jobs = [job for part in arguments.part for job in jobs_of(part, arguments.sglang_modes)]
    path = RESULTS / f"rollout-{arguments.machine}.json"
    rows, revision = kept_rows(path, jobs) if arguments.add else [], git_revision()
    config = setup_of("ours", arguments).config()
    floors = [*work_of("ours", arguments), *work_of("rolling on", arguments)]
    floor = {w.name: round(floor_tokens_per_sec(config, w), 1) for w in floors}
    with tempfile.TemporaryDirectory() as folder:
        for job in jobs:
            environment, shape = dict(os.environ), setup_of(job, arguments).shape
            if job.startswith("sglang") and arguments.sglang_path is not None:
                environment["PYTHONPATH"] = arguments.sglang_path
            command = command_of(job, arguments, given, Path(folder))
            for row in rows_of(command, environment, arguments.seconds):
                at = time.strftime("%Y-%m-%dT%H:%M:%S")
                where = {"job": job, "shape": str(arguments.model or shape), "at": at, "git_revision": revision}
                rows.append({**where, **row})
                print(job, as_text(row) if row["what"] == "table" else row, flush=True)
                write_result("rollout", rows, summary_of(rows, floor), arguments.machine)
    print(path, json.dumps(summary_of(rows, floor), indent=1), flush=True)


if __name__ == "__main__":
    main()
