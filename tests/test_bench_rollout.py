"""bench.rollout without a GPU: workloads, floors, summary, processes that fail, and one whole run of tiny shape."""

from __future__ import annotations

from tests.ops.cuda import interpreter  # isort: skip  # noqa: F401 - before bench.parity imports Triton

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import bench.common
from bench import rollout
from bench.parity import config_of
from bench.rollout_points import NANO, STANDARD, Workload, floor_tokens_per_sec
from bench.rollout_table import Window, kind_of

SGLANG = '''
__version__ = "played"

class Engine:
    """Plays SGLang: ends every response at its limit."""

    def __init__(self, **settings):
        assert settings["load_format"] == "dummy" and settings["disable_radix_cache"]
        assert settings.get("rl_on_policy_target") != "fsdp", "this one cannot"

    def generate(self, *, input_ids, sampling_params, return_logprob):
        assert return_logprob and len(input_ids) == len(sampling_params)
        assert all(p["ignore_eos"] and p["temperature"] == 1.0 for p in sampling_params)
        return [{"meta_info": {"output_token_logprobs": [0.0] * p["max_new_tokens"]}} for p in sampling_params]

    def shutdown(self):
        pass
'''


def test_floors_are_those_of_the_design() -> None:
    """Which gives them rounded; and by hand: 4.02e9 weights, 36 layers x 8 heads x 128 x K and V, mean context 768."""
    found = {w.name: floor_tokens_per_sec(config_of("4B"), w) for w in STANDARD}
    assert found == {name: pytest.approx(x, rel=0.015) for name, x in {"256": 29_700, "32": 11_800, "1": 535}.items()}
    weights = 151936 * 2560 + 36 * 2560 * (4096 * 2 + 1024 * 2 + 9728 * 3)
    assert found["256"] == pytest.approx(256 * 4.3e12 / (2 * weights + 256 * 768 * 36 * 8 * 128 * 2 * 2))


def test_each_repeat_has_prompts_of_its_own_and_every_run_the_same() -> None:
    work = Workload.equal(3, 5, 7)
    first, second, again = ([r.token_ids for r in work.requests(i, 1000)] for i in (0, 1, 0))
    assert first == again
    assert not set(first) & set(second)
    assert [list(ids) for ids in first] == work.prompt_ids(0, 1000), "SGLang is given the same prompts"
    keys = {r.noise_key for i in (0, 1) for r in work.requests(i, 1000)}
    assert len(keys) == 6
    assert {r.params.max_new_tokens for r in work.requests(0, 1000)} == {7}
    assert {r.params.max_new_tokens for r in work.requests(0, 1000, 2)} == {2}


def test_lengths_of_the_mixed_workload() -> None:
    for lengths in (NANO.prompts, NANO.new):
        assert (len(lengths), min(lengths) >= 100, max(lengths) <= 1024) == (256, True, True)
        assert 520 < np.mean(lengths) < 604
    assert Workload.mixed(256, 100, 1024) == NANO
    assert NANO.longest == max(np.array(NANO.prompts) + NANO.new)


def test_a_rolling_workload_keeps_half_of_its_sequences_waiting() -> None:
    work = Workload.rolling(5, 2, 4)
    assert (work.concurrent, work.prompts) == (3, Workload.mixed(5, 2, 4).prompts)
    for given, names in ([], []), (["--rolling", "5:2:4"], ["5 rolling"]), (["--part", "rolling"], ["512 rolling"]):
        arguments = rollout.parser().parse_args(given)
        assert [w.name for w in rollout.work_of("sglang default", arguments)] == ["256", "32", "1", *names]
    assert rollout.jobs_of("sglang") == ["sglang default", "sglang on-policy"]
    assert rollout.jobs_of("sglang", ["default"]) == ["sglang default"]
    assert rollout.setup_of("rolling on", arguments).exact
    assert not rollout.setup_of("rolling off", arguments).exact
    equal = Workload.equal(6, 10, 4)
    halved = replace(equal, limit=3)
    config = config_of("4B")
    assert floor_tokens_per_sec(config, halved) == pytest.approx(floor_tokens_per_sec(config, Workload.equal(3, 10, 4)))


def rows(job: str, **speeds: float) -> list[dict[str, Any]]:
    return [{"job": job, "what": "throughput", "workload": k[1:], "tokens_per_sec": v} for k, v in speeds.items()]


def test_the_summary_is_made_of_the_rows() -> None:
    found = rollout.summary_of(
        [
            *rows("ours", w256=100.0, w32=50.0), *rows("off", w256=101.0, w32=55.0, w1=7.0),
            *rows("sglang default", w256=80.0), *rows("nano on", mixed=9.0),
            {"job": "ours", "what": "start", "seconds": {"first_token": 3.5}},
            {"job": "sync", "what": "start", "seconds": {"first_token": 99}},
            {"job": "sync", "what": "sync", "median_ms": 20.5},
            {"job": "scheduler", "what": "scheduler", "share": 0.03},
            {"job": "sglang on-policy", "what": "failure", "why": "exit code 1"},
        ],
        {"256": 200.0, "32": 100.0},
    )  # fmt: skip
    assert found["tax_by_workload"] == {"256": 1.01, "32": 1.1}
    assert found["tax"] == 1.1
    assert found["of_floor"] == {"256": 0.5, "32": 0.5}
    assert (found["over_sglang_default"], found["off_over_sglang_default"]) == ({"256": 1.25}, {"256": 1.2625})
    assert (found["start_seconds"], found["sync_ms"], found["nano_on_tokens_per_sec"]) == (3.5, 20.5, 9.0)
    assert found["scheduler_share"] == 0.03
    assert found["failed"] == ["sglang on-policy: exit code 1"]
    assert not {"sglang_on_policy", "nano_off_tokens_per_sec"} & set(found), "what was not measured is absent"
    assert set(rollout.summary_of([], {"1": 1.0})) == {"floor"}


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ('print("ROW {}"); raise SystemExit(4)', ["exit code 4"]),
        ('print("ROW {}", flush=True); import time; time.sleep(60)', ["longer than 3 s"]),
        ('print("note"); print("ROW {}")', []),
    ],
)  # fmt: skip
def test_a_process_that_fails_or_takes_too_long_says_so(program, expected) -> None:
    found = list(rollout.rows_of([sys.executable, "-c", program], dict(os.environ), 3))
    assert found == [{}, *({"what": "failure", "why": why} for why in expected)]


def test_a_process_ends_with_the_one_that_started_it() -> None:
    """Killed outright, a parent closes its end of the pipe and can do no more: nothing may stay on the GPU."""
    program = "from bench.rollout_sglang import *; end_with_parent(); print('up', flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "up\n"
    assert process.poll() is None
    process.stdin.close()
    try:
        assert process.wait(10) == 1
    finally:
        process.kill()
        process.stdout.close()


def test_a_window_begins_when_every_sequence_decodes() -> None:
    engine, seen = SimpleNamespace(stats=SimpleNamespace(generated_tokens=0, steps=0)), []
    window = Window(engine, 2, 3, lambda: seen.append(engine.stats.steps), lambda: seen.append(engine.stats.steps))
    for step in range(40):
        engine.stats = SimpleNamespace(generated_tokens=max(0, 2 * (step - 4)), steps=step)
        window(0, 2)
    assert seen == [20, 23], "16 tokens each, then three steps"
    assert window.seen == 3


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<", "attention"),
        ("attend_splits", "attention"),
        ("_merge_all", "attention"),
        ("_merge", "logprob, sampling"),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", "linear"),
        ("void deep_gemm::sm90_bf16_gemm_impl<", "linear"),
        ("void cublasLt::splitKreduce_kernel<", "linear"),
        ("rms_norm_kernel", "norm"),
        ("qkv_kernel", "rotary, cache"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("something_new", "other"),
    ],
)
def test_kernels_are_counted_by_kind(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_a_whole_run_of_tiny_shape(tmp_path, monkeypatch, capsys) -> None:
    """On and off beside a played SGLang whose second mode fails; then one part again, which keeps the others' rows."""
    (tmp_path / "sglang.py").write_text(SGLANG)
    for module in (bench.common, rollout):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    common = ["rollout", "--shape", "tiny", "--device", "cpu", "--workload", "2:8:4", "1:8:3", "--repeats", "1",
              "--machine", "test", "--sglang-path", str(tmp_path), "--seconds", "120"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", [*common, "--part", "ours", "off", "sglang"])
    rollout.main()
    path = tmp_path / "rollout-test.json"
    result = json.loads(path.read_text())
    summary = result["summary"]
    for key in ("tokens_per_sec", "off_tokens_per_sec", "sglang_default", "over_sglang_default"):
        assert set(summary[key]) == {"2", "1"}, key
    assert summary["tax"] == max(summary["tax_by_workload"].values())
    assert summary["failed"] == ["sglang on-policy: exit code 1"]
    tokens = {(r["job"], r["workload"]): r["new_tokens"] for r in result["rows"] if r["what"] == "throughput"}
    assert {job for job, _ in tokens} == {"ours", "off", "sglang default"}
    assert {tokens[job, "2"] for job, _ in tokens} == {8}
    kernels = {r["job"]: r.get("kernels") for r in result["rows"] if r["what"] == "start"}
    assert (kernels["ours"], kernels["off"]) == ("exact-v1 numba kernels", "plain torch")

    monkeypatch.setattr(
        sys, "argv", [*common, "--part", "sync", "sleep", "scheduler", "rolling", "--rolling", "4:3:9", "--add"]
    )
    rollout.main()
    again = json.loads(path.read_text())
    assert again["summary"]["sync_ms"] > 0
    assert 0 < again["summary"]["scheduler_share"] < 1
    assert {"sleep_ms", "sync_ms"} <= set(again["summary"])
    for key in ("tokens_per_sec", "off_tokens_per_sec", "floor", "tax_by_workload"):
        assert set(again["summary"][key]) == {"2", "1", "4 rolling"}, key
    assert again["summary"]["tax"] == max(again["summary"]["tax_by_workload"].values())
    assert again["rows"][: len(result["rows"])] == result["rows"]
    assert "sync" in capsys.readouterr().out


def test_rows_of_a_part_that_runs_again_go(tmp_path) -> None:
    path = tmp_path / "rollout.json"
    assert rollout.kept_rows(path, ["ours"]) == []
    path.write_text(json.dumps({"rows": [{"job": "ours"}, {"job": "nano on"}, {"job": "off"}]}))
    assert rollout.kept_rows(path, ["ours", "nano on"]) == [{"job": "off"}]


def test_modes_and_models_of_the_jobs() -> None:
    arguments = rollout.parser().parse_args([])
    exact = {job: rollout.setup_of(job, arguments).exact for part in rollout.PARTS for job in rollout.jobs_of(part)}
    assert {job for job, on in exact.items() if not on} == {"off", "off-table", "nano off", "rolling off"}
    shapes = {job: rollout.setup_of(job, arguments).shape for job in exact}
    assert {job for job, shape in shapes.items() if shape == "0.6B"} == {"nano on", "nano off"}
    assert set(shapes.values()) == {"4B", "0.6B"}


def test_an_argument_that_makes_no_sense_is_refused() -> None:
    for wrong in (["--workload", "2:8"], ["--workload", "0:8:4"], ["--engine", "overlap"], ["--part", "all"]):
        with pytest.raises(SystemExit):
            rollout.parser().parse_args(wrong)
    found = rollout.parser().parse_args(["--engine", "overlap=false", "max_concurrent=4"])
    assert dict(found.engine) == {"overlap": False, "max_concurrent": 4}


def test_repeats_that_captured_graphs_do_not_count() -> None:
    from bench.rollout_points import settled

    assert settled([9.0, 5.0, 6.0], [2, 7, 7, 7]) == [5.0, 6.0]
    assert settled([9.0, 8.0], [0, 3, 4]) == [9.0, 8.0]
    assert settled([3.0, 4.0], [0, 0, 0]) == [3.0, 4.0]
