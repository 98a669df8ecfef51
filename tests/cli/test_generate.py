"""`exactrl generate`: prompts from three places, rows out, and input faults."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROMPTS = '{"prompt": "1+2", "id": "first", "note": 1}\n{"prompt_token_ids": [5, 6]}\n\n{"prompt": "é", "id": 9}\n'
LOGPROBS = np.array([-0.0, -0.1], np.float32)


@pytest.fixture
def calls(launch):
    """Fakes generation: `samples` rows per prompt; returns what it was asked."""
    asked = []

    def generate(model, prompts, *, samples, on_progress, **options):
        asked.append({"model": model, "prompts": prompts, "samples": samples, **options})
        on_progress("generate", 1, 2)
        for name, prompt in prompts:
            for sample in range(samples):
                yield {
                    "id": name,
                    "sample": sample,
                    "token_ids": np.array([3, 4]),
                    "text": prompt if isinstance(prompt, str) else None,
                    "logprobs": LOGPROBS,
                    "finish_reason": "stop",
                }

    launch.generate = generate
    return asked


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(PROMPTS, encoding="utf-8")
    return path


def test_rows_from_a_file_in_order(run, calls, file):
    outcome = run("generate", "tiny", "--prompts", str(file), "--samples", "2")
    assert outcome.code == 0
    assert calls[0]["prompts"] == [("first", "1+2"), ("1", [5, 6]), ("9", "é")]
    rows = [json.loads(line) for line in outcome.out.splitlines()]
    assert [(row["id"], row["sample"]) for row in rows] == [(n, s) for n in ("first", "1", "9") for s in (0, 1)]
    assert list(rows[0]) == ["id", "sample", "token_ids", "text", "logprobs", "logprob_bits", "finish_reason"]
    assert rows[0]["logprob_bits"] == ["80000000", "bdcccccd"]
    assert np.array_equal(np.array(rows[0]["logprobs"], np.float32).view(np.uint32), LOGPROBS.view(np.uint32))
    assert rows[2]["text"] is None


def test_defaults_and_options_reach_the_engine(run, calls):
    assert run("generate", "tiny", "hello").code == 0
    assert calls[0] == {
        "model": "tiny",
        "prompts": [("0", "hello")],
        "samples": 1,
        "seed": 0,
        "temperature": 1.0,
        "max_new_tokens": 128,
        "max_concurrent": 256,
        "kv_tokens": 0,
        "chunk_tokens": 2048,
        "dtype": "bfloat16",
        "true_on_policy": True,
        "device": "cpu",
    }
    options = (
        "--seed 3 --temperature 0 --max-new-tokens 4 --max-concurrent 5 --kv-tokens 64 --chunk-tokens 7 "
        "--dtype float32 --no-true-on-policy --device cuda"
    )
    assert run("generate", "tiny", "hello", *options.split()).code == 0
    assert list(calls[1].values())[3:] == [3, 0.0, 4, 5, 64, 7, "float32", False, "cuda"]


def test_stdin_is_one_prompt_as_it_is(run, calls, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert run("generate", "tiny").code == 0
    assert calls[0]["prompts"] == [("0", "two\nlines\n")]


def test_terminal_without_prompt_is_a_usage_error(run, calls, monkeypatch):
    stdin = io.StringIO("")
    monkeypatch.setattr("sys.stdin", stdin)
    assert "the prompt is empty" in run("generate", "tiny").err
    stdin.isatty = lambda: True
    outcome = run("generate", "tiny")
    assert outcome.code == 2
    assert "no prompt" in outcome.err


def test_two_sources_are_refused(run, calls, file):
    assert "not both" in run("generate", "tiny", "x", "--prompts", str(file)).err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "invalid JSON"),
        ("3", "must be a JSON object"),
        ("{}", "has neither"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "has both"),
        ('{"prompt": 3}', "key 'prompt'"),
        ('{"prompt": ""}', "key 'prompt'"),
        ('{"prompt": [{"role": "user", "content": "x"}]}', "key 'prompt'"),
        ('{"prompt_token_ids": []}', "key 'prompt_token_ids'"),
        ('{"prompt_token_ids": [1, true]}', "key 'prompt_token_ids'"),
        ('{"prompt_token_ids": [1.0]}', "key 'prompt_token_ids'"),
        ('{"prompt_token_ids": [-1]}', "key 'prompt_token_ids'"),
        ('{"prompt": "\\ud800"}', "not valid Unicode"),
        ('{"prompt": "x", "id": "\\udfff"}', "not valid Unicode"),
        ('{"prompt": "x", "id": true}', "key 'id'"),
        ('{"prompt": "x", "id": ""}', "key 'id'"),
        ('{"prompt": "x", "id": "first"}', "was already used at"),
        ('{"prompt": "x", "id": "1"}\n{"prompt": "y", "id": 1}', "was already used at"),
    ],
)
def test_input_faults_name_file_row_and_key(run, calls, tmp_path, line, expected):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "ok", "id": "first"}\n' + line + "\n")
    outcome = run("generate", "tiny", "--prompts", str(path))
    assert outcome.code == 2
    assert f"{path}, line " in outcome.err
    assert expected in outcome.err
    assert not calls


def test_missing_and_empty_files(run, calls, tmp_path):
    assert run("generate", "tiny", "--prompts", str(tmp_path / "no.jsonl")).code == 2
    (tmp_path / "empty.jsonl").write_text("")
    outcome = run("generate", "tiny", "--prompts", str(tmp_path / "empty.jsonl"))
    assert outcome.code == 2
    assert "holds no rows" in outcome.err


@pytest.mark.parametrize(
    "options",
    [
        ["--temperature", "-1"],
        ["--temperature", "nan"],
        ["--temperature", "inf"],
        ["--samples", "0"],
        ["--max-new-tokens", "0"],
        ["--max-concurrent", "0"],
        ["--kv-tokens", "-1"],
        ["--chunk-tokens", "0"],
        ["--seed", "-1"],
        ["--dtype", "float16"],
    ],
)
def test_ranges_are_checked(run, calls, options):
    outcome = run("generate", "tiny", "x", *options)
    assert outcome.code == 2
    assert options[0] in outcome.err
    assert not calls


def test_out_is_written_whole_and_leaves_nothing_beside(run, calls, file, tmp_path):
    out = tmp_path / "rows.jsonl"
    out.write_text("old")
    outcome = run("generate", "tiny", "--prompts", str(file), "--out", str(out))
    assert (outcome.code, outcome.out) == (0, "")
    assert len(out.read_text(encoding="utf-8").splitlines()) == 3
    assert sorted(os.listdir(tmp_path)) == ["prompts.jsonl", "rows.jsonl"]


def test_failed_generation_keeps_the_old_file(run, launch, tmp_path):
    def generate(model, prompts, **_):
        yield {
            "id": "0",
            "sample": 0,
            "token_ids": [1],
            "text": "x",
            "logprobs": np.array([np.nan], np.float32),
            "finish_reason": "stop",
        }

    launch.generate = generate
    out = tmp_path / "rows.jsonl"
    out.write_text("old")
    outcome = run("generate", "tiny", "x", "--out", str(out))
    assert outcome.code == 3
    assert "logprob 0 is nan" in outcome.err
    assert out.read_text() == "old"
    assert os.listdir(tmp_path) == ["rows.jsonl"]


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_keeps_the_old_file_and_leaves_nothing_beside(number, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("old\n")
    code = (
        "import sys, time; from pathlib import Path; from exactrl.cli.rows import open_output\n"
        "with open_output(Path(sys.argv[1])) as write:\n"
        "    write('new'); print('half', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout.readline() == b"half\n"
    assert len(list(tmp_path.iterdir())) == 2
    child.send_signal(number)
    child.communicate(timeout=30)
    assert child.returncode == (-number if number == signal.SIGINT else 128 + number)
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert out.read_text() == "old\n"


def test_out_that_cannot_be_written_stops_before_work(run, calls, tmp_path):
    assert run("generate", "tiny", "x", "--out", str(tmp_path)).code == 2
    assert run("generate", "tiny", "x", "--out", str(tmp_path / "no" / "rows.jsonl")).code == 4
    assert not calls


def test_out_may_be_a_device(run, calls):
    assert run("generate", "tiny", "x", "--out", os.devnull).code == 0
    assert os.path.exists(os.devnull)


def test_rows_are_written_as_they_come(run, launch, monkeypatch):
    """On stdout, line by line: what is there is not lost with what follows."""

    def generate(model, prompts, **_):
        yield {"id": "0", "sample": 0, "token_ids": [1], "text": "x", "logprobs": LOGPROBS[:1], "finish_reason": "stop"}
        raise KeyboardInterrupt

    launch.generate = generate
    outcome = run("generate", "tiny", "x")
    assert outcome.code == 130
    assert [json.loads(line)["id"] for line in outcome.out.splitlines()] == ["0"]


def test_progress_without_a_terminal_is_a_line_now_and_then(run, launch, monkeypatch):
    times = iter([0.0, 5.0, 11.0, 11.0, 12.0])
    monkeypatch.setattr("exactrl.cli.generate.time.monotonic", lambda: next(times))

    def generate(model, prompts, on_progress, **_):
        for done in (1, 2, 3):
            on_progress("generate, 1,234 tokens/s", done, 3000)
        yield from ()

    launch.generate = generate
    assert run("generate", "tiny", "x").err == "generate, 1,234 tokens/s: 2 of 3,000\n"


def test_out_may_name_what_is_open_already(run, calls, tmp_path):
    """/dev/stdout of a shell's `>> file` is that file: it is added to, not replaced."""
    kept = tmp_path / "kept"
    kept.write_text("keep\n")
    with kept.open("a") as opened:
        assert run("generate", "tiny", "hello", "--out", f"/dev/fd/{opened.fileno()}").code == 0
    assert len(kept.read_text().splitlines()) == 2


def test_ordinary_files_below_dev_are_replaced_whole(run, calls):
    """/dev/shm is a folder like any other."""
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        pytest.skip("no /dev/shm here")
    out = folder / f"exactrl-{os.getpid()}.jsonl"
    out.write_text("old\n")
    try:
        assert run("generate", "tiny", "hello", "--out", str(out)).code == 0
        assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["0"]
    finally:
        out.unlink()
