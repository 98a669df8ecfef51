"""`exactrl grade`: rows in, the same rows with verdicts out; faults by file and line; counts on stderr."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import tracemalloc

import pytest

from exactrl.cli import grade as command

ROWS = [
    '{"response": "so \\\\boxed{027}", "gold": 27, "id": 3.10}',
    '{"response": "\\\\boxed{\\\\frac{1}{\\\\sqrt3}}",   "gold": "\\\\frac{\\\\sqrt3}{3}", "text": "é\\u00e9 \\ud800"}',
    "",
    '{"gold": ["5"], "response": "none"}',
    '{"response": "\\\\boxed{9^{9^{9^9}}}", "gold": 9}',
    '{"response": "\\\\boxed{6}", "gold": 9.0}  ',
    '{"response": "\\\\boxed{\\\\frac{}{}}", "gold": "\\\\pi"}',
]
VERDICTS = [
    (True, "027", "equal"),
    (True, r"\frac{1}{\sqrt3}", "equal"),
    (False, None, "no_answer"),
    (False, "9^{9^{9^9}}", "too_large"),
    (False, "6", "different"),
    (False, r"\frac{}{}", "unparsed"),
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(ROWS), encoding="utf-8")
    return path


@pytest.fixture
def stdin(monkeypatch):
    def give(content: bytes):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return give


def verdicts(out: str):
    rows = [json.loads(line) for line in out.splitlines()]
    return [(row["correct"], row["extracted"], row["reason"]) for row in rows]


def test_rows_keep_their_text_and_gain_three_keys(run, file):
    outcome = run("grade", str(file))
    assert outcome.code == 0
    assert verdicts(outcome.out) == VERDICTS
    for line, given in zip(outcome.out.splitlines(), filter(None, ROWS), strict=True):
        assert line.startswith(given.strip()[:-1] + ", ")
        assert list(json.loads(line))[-3:] == ["correct", "extracted", "reason"]
    assert outcome.err.startswith("6 rows: 2 correct, 1 wrong, 1 no answer, 1 unparsed, 1 timeout; ")
    assert outcome.err.endswith(" rows/s\n")


def test_from_stdin_and_to_a_file(run, file, stdin, tmp_path):
    stdin(file.read_bytes())
    out = tmp_path / "graded.jsonl"
    outcome = run("grade", "-", "--out", str(out), "-q", "--workers", "1", "--timeout", "2")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
    assert verdicts(out.read_text(encoding="utf-8")) == VERDICTS


def test_dapo(run, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"response": "Answer: $23$", "gold": 23}\n{"response": "\\\\boxed{23}", "gold": 23}\n')
    assert verdicts(run("grade", str(path), "--reward", "dapo").out) == [
        (True, "23", "equal"),
        (False, None, "no_answer"),
    ]
    assert verdicts(run("grade", str(path)).out) == [(False, None, "no_answer"), (True, "23", "equal")]


def test_half_a_surrogate_pair_in_an_answer_comes_out_as_it_went_in(run, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"response": "\\\\boxed{\\ud800}", "gold": "中"}\n{"response": "\\\\boxed{中}", "gold": "中"}\n')
    outcome = run("grade", str(path))
    assert verdicts(outcome.out) == [(False, "\ud800", "different"), (True, "中", "equal")]


FAULTS = [
    (b'{"response": "a"}', r"key 'gold': missing; the row has 'response'"),
    (b'{"gold": 1}', r"key 'response': missing"),
    (b'{"response": 5, "gold": 1}', "key 'response': must be a text, not int"),
    (b'{"response": "a", "gold": null}', "key 'gold': must be a text, a number, or a list of one of them, not null"),
    (b'{"response": "a", "gold": [1, 2]}', "not list of 2 items"),
    (b'{"response": "a", "gold": true}', "not bool"),
    (b'{"response": "a", "gold": NaN}', "not a line of JSON: NaN is not a JSON number"),
    (b'{"response": "a", "gold": 1e999}', "key 'gold': must be a finite number"),
    (b'{"response": "a", "gold": 1, "gold": 2}', "a key appears twice"),
    (b'{"response": "a", "gold": 1, "reason": 2}', "key 'reason': this is what grading adds; rename it"),
    (b'{"response": "a", "gold": 1} {}', "not a line of JSON"),
    (b'{"response": "a", "go', "not a line of JSON"),
    (b"[1]", "a row must be a JSON object, not list"),
    (b'{"response": "\xff", "gold": 1}', "byte 0xff is not valid UTF-8"),
    (b"[" * 100_000, "not a line of JSON"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_a_faulty_row_is_named_and_nothing_is_lost(run, stdin, tmp_path, fault, message):
    good = b'{"response": "\\\\boxed{1}", "gold": 1}\n\n'
    path, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    path.write_bytes(good + fault + b"\n" + good)
    out.write_text("kept\n")
    outcome = run("grade", str(path), "--out", str(out), "-q")
    assert (outcome.code, outcome.out) == (2, "")
    assert f"error: {path}:3" in outcome.err
    assert message in outcome.err
    assert out.read_text() == "kept\n"
    assert run("grade", str(path), "-q").out == ""  # the whole file is read before anything is printed
    stdin(path.read_bytes())
    outcome = run("grade", "-", "-q")
    assert outcome.code == 2
    assert "error: stdin:3" in outcome.err
    assert verdicts(outcome.out) == [(True, "1", "equal")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-file"], "no-such-file: cannot be read"),
        (["/"], "/: cannot be read"),
        (["-", "--reward", "maths"], "'maths' is not one of"),
        (["-", "--timeout", "0"], "--timeout"),
        (["-", "--workers", "-1"], "--workers"),
        ([], "Missing argument 'FILE'"),
    ],
)
def test_usage(run, stdin, arguments, message):
    stdin(b"")
    outcome = run("grade", *arguments)
    assert outcome.code == 2
    assert message in outcome.err


def test_a_pipe_by_name_is_read_once(run, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes("\n".join(ROWS).encode()))
    writer.start()
    outcome = run("grade", str(pipe))
    writer.join()
    assert (outcome.code, verdicts(outcome.out)) == (0, VERDICTS)


def test_no_rows_are_no_error(run, stdin):
    stdin(b"\n")
    outcome = run("grade", "-")
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err.startswith("0 rows: 0 correct")


def test_order_is_kept_over_many_batches(run, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_BATCH", 7)
    rows = [{"response": rf"\boxed{{{i}+\sqrt{{4}}}}", "gold": i + 2 if i % 3 else i, "i": i} for i in range(50)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    graded = [json.loads(line) for line in run("grade", str(path)).out.splitlines()]
    assert [(row["i"], row["correct"]) for row in graded] == [(i, bool(i % 3)) for i in range(50)]


def test_memory_does_not_grow_with_the_input(tmp_path, capsys):
    def peak(rows: int) -> int:
        path = tmp_path / "rows.jsonl"
        path.write_text('{"response": "\\\\boxed{1} %s", "gold": 1}\n' % ("x" * 2000) * rows)
        tracemalloc.start()
        from exactrl.cli import main

        assert main(["grade", str(path), "--out", os.devnull, "-q"]) == 0
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    peak(10)
    assert peak(4000) < 1.5 * peak(1000)


def test_as_a_process_in_a_pipe(file):
    done = subprocess.run(
        [sys.executable, "-m", "exactrl", "grade", "-"], input=file.read_bytes(), capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert verdicts(done.stdout.decode()) == VERDICTS


def test_files_of_eval_are_graded_by_their_keys(run, tmp_path):
    row = {"id": "a", "text": r"so \boxed{7}", "label": "7", "reward": 1.0}
    (tmp_path / "eval.jsonl").write_text(json.dumps(row) + "\n")
    found = run("grade", str(tmp_path / "eval.jsonl"), "--response-key", "text", "--gold-key", "label")
    assert json.loads(found.out) == {**row, "correct": True, "extracted": "7", "reason": "equal"}
    refused = run("grade", str(tmp_path / "eval.jsonl"))
    assert refused.code == 2
    assert "--response-key" in refused.err


def test_the_input_is_never_overwritten(run, tmp_path):
    (tmp_path / "g.jsonl").write_text('{"response": "1", "gold": 1}\n')
    found = run("grade", str(tmp_path / "g.jsonl"), "--out", str(tmp_path / "g.jsonl"))
    assert found.code == 2
    assert "the file that is read" in found.err
    assert (tmp_path / "g.jsonl").read_text() == '{"response": "1", "gold": 1}\n'
