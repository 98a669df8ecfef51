"""Global options, help, exit codes and messages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from exactrl import __version__
from exactrl.errors import EnvironmentProblem, Interrupted, NonFiniteError, ParityError, UsageError

ROOT = Path(__file__).parent.parent.parent
COMMANDS = ["train", "sft", "plan", "check", "generate", "report"]


def shell(*args: str, **kwargs):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True, check=False, **kwargs
    )


def test_version(run):
    assert run("--version").out == f"exactrl {__version__}\n"


@pytest.mark.parametrize("args", [["--help"], [], *[[command, "--help"] for command in COMMANDS]])
def test_help_has_an_example(run, args):
    outcome = run(*args)
    assert outcome.code == 0
    assert "Example: exactrl" in outcome.out


def test_only_commands_that_exist_are_listed(run):
    for missing in ("bisect",):
        assert missing not in run("--help").out
        assert run(missing).code == 2


def test_train_help_lists_every_setting(run):
    out = run("train", "--help").out
    assert "--rollout.max_new_tokens" in out
    assert "--run.audit_every" in out


def test_help_and_usage_errors_load_nothing_heavy():
    code = (
        "import sys; from exactrl.cli import main\n"
        "codes = main(['--help']), main(['train', 'nope']), main(['train', 'tiny', '--x.y', '1']), main(['chek'])\n"
        "heavy = [m for m in ('torch', 'numba', 'rich.progress', 'safetensors') if m in sys.modules]\n"
        "sys.exit(repr((codes, heavy)) if heavy or codes != (0, 2, 2, 2) else 0)"
    )
    done = shell("-c", code)
    assert done.returncode == 0, done.stderr


def test_module_entry_point_returns_the_exit_code():
    assert shell("-m", "exactrl", "train", "tiny", "--run.stepz", "1").returncode == 2


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UsageError("bad"), 2, "error: bad\n"),
        (ParityError("token 3 differs\nrun bisect"), 3, "error: token 3 differs\n       run bisect\n"),
        (NonFiniteError("nan"), 3, "error: nan\n"),
        (EnvironmentProblem("no GPU"), 4, "error: no GPU\n"),
        (MemoryError("3 GB"), 4, "error: out of memory: 3 GB\n"),
        (Interrupted("stopped after step 3"), 130, "error: stopped after step 3\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (ZeroDivisionError("oops"), 1, "error: unexpected ZeroDivisionError: oops; add -v for the traceback\n"),
        (ModuleNotFoundError("x", name="numba"), 1, "error: unexpected ModuleNotFoundError"),
    ],
)
def test_exit_codes(run, launch, error, code, text):
    def plan(config):
        raise error

    launch.plan = plan
    outcome = run("plan", "tiny")
    assert outcome.code == code
    assert outcome.err.startswith(text)
    assert "Traceback" not in outcome.err
    assert outcome.out == ""


@pytest.mark.parametrize("args", [["-v", "plan", "tiny"], ["plan", "tiny", "-v"], ["plan", "--verbose", "tiny"]])
def test_verbose_shows_the_traceback_on_either_side_of_the_command(run, launch, args):
    launch.plan = lambda config: 1 / 0
    outcome = run(*args)
    assert outcome.code == 1
    assert "Traceback" in outcome.err
    assert outcome.err.endswith("error: unexpected ZeroDivisionError: division by zero\n")


def test_missing_package_is_an_environment_problem(run, monkeypatch):
    from exactrl.cli import options

    def missing(name):
        raise ModuleNotFoundError("No module named 'numba'", name="numba")

    monkeypatch.setattr(options.importlib, "import_module", missing)
    outcome = run("plan", "tiny")
    assert outcome.code == 4
    assert "'numba' is missing" in outcome.err


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["chek", "tiny"], "'check'"),
        (["check", "tiny", "--devise", "cpu"], "--device"),
        (["check", "tiny", "--device", "tpu"], "cuda"),
        (["train"], "RECIPE"),
        (["train", "tiny", "extra"], "extra"),
        (["train", "tiny", "--temperature", "0.5"], "--rollout.temperature"),
        (["train", "tiny", "--mod", "normal"], "--mode"),
        (["train", "tiny", "--run.steps"], "--run.steps needs a value (an integer, at least 1)"),
        (["train", "tiny", "--run.steps", "--out", "x"], "--run.steps needs a value"),
        (["train", "tiny", "--run.step", "3"], "did you mean run.steps?"),
        (["train", "tiny", "--no-run.steps"], "--no-run.steps does not exist"),
        (["train", "tinny"], "bundled recipes: tiny"),
        (["train", "tiny", "--train-backend", "megatron"], "not built yet"),
        (["train", "tiny", "--rollout-backend", "sglang"], "not built yet"),
    ],
)
def test_usage_errors_name_what_was_meant(run, launch, args, expected):
    outcome = run(*args)
    assert outcome.code == 2
    assert outcome.err.startswith("error: ")
    assert expected in outcome.err
    assert outcome.out == ""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_files_never_get_the_number_of_a_closed_stream(tmp_path, closed):
    """What a library prints would land in them."""
    code = (
        "import os, sys, types; fake = types.ModuleType('exactrl.launch'); sys.modules['exactrl.launch'] = fake\n"
        "def plan(config):\n"
        f"    with open({str(tmp_path / 'file')!r}, 'w') as f: f.write(str(f.fileno()))\n"
        "    print('to stdout'); print('to stderr', file=sys.stderr); os.write(1, b'x'); os.write(2, b'x')\n"
        "    return {}\n"
        "fake.plan = plan\n"
        "from exactrl.cli import main; sys.exit(main(['plan', 'tiny']))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = ["sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, code]
    child = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert int((tmp_path / "file").read_text()) > 2


def test_closed_pipe_ends_quietly():
    code = (
        "import sys, types; fake = types.ModuleType('exactrl.launch'); sys.modules['exactrl.launch'] = fake\n"
        "fake.plan = lambda config: {'big': {str(i): 'x' * 100 for i in range(20000)}}\n"
        "from exactrl.cli import main; sys.exit(main(['plan', 'tiny']))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait(10) == 1
