"""SGLang's side of bench.rollout: a process of its own that knows nothing of ExactRL, so that each has its libraries.

`python bench/rollout_sglang.py MODE MODEL WORK`: MODE "default" or "on-policy" (rl_on_policy_target=fsdp), MODEL a
folder (without weight files SGLang draws random ones), WORK a JSON file of workloads: [{"name", "new", "repeats":
[prompts of token ids, …]}, …]. Prints a line "ROW {…}" for each workload.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path

WARM_UP_TOKENS = 8
MODES = {"default": {}, "on-policy": {"rl_on_policy_target": "fsdp"}}


def end_with_parent() -> None:
    """Ends this process when the one that holds the other end of its standard input is gone."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def say(row: dict) -> None:
    print("ROW " + json.dumps(row), flush=True)


def measure(engine, mode: str, work: dict) -> None:
    def generate(prompts: list[list[int]], new: list[int]) -> None:
        params = [{"max_new_tokens": n, "temperature": 1.0, "ignore_eos": True} for n in new]
        found = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        lengths = [len(f["meta_info"]["output_token_logprobs"]) for f in found]
        assert lengths == new, "a response ended early"

    new, seconds = work["new"], []
    *repeats, first = work["repeats"]
    generate(first, [min(n, WARM_UP_TOKENS) for n in new])
    for prompts in repeats:
        begin = time.perf_counter()
        generate(prompts, new)
        seconds.append(time.perf_counter() - begin)
    say({
        "what": "throughput", "mode": mode, "workload": work["name"], "sequences": len(new),
        "prompt_tokens": sum(map(len, first)), "new_tokens": sum(new), "seconds": [round(s, 4) for s in seconds],
        "tokens_per_sec": round(sum(new) / statistics.median(seconds), 1),
    })  # fmt: skip


def main() -> None:
    mode, model, work = sys.argv[1:]
    end_with_parent()
    began = time.time()
    import sglang

    weights = any(Path(model).glob("*.safetensors"))
    engine = sglang.Engine(
        model_path=model, skip_tokenizer_init=True, dtype="bfloat16", attention_backend="fa3", mem_fraction_static=0.8,
        disable_radix_cache=True, log_level="warning", grammar_backend="none", random_seed=1,
        cuda_graph_max_bs_decode=256, max_running_requests=256, chunked_prefill_size=16384,
        load_format="auto" if weights else "dummy", **MODES[mode],
    )  # fmt: skip
    seconds = round(time.time() - began, 1)
    say({"what": "start", "mode": mode, "seconds": {"engine": seconds}, "sglang": sglang.__version__,
         "weights": "of the folder" if weights else "dummy"})  # fmt: skip
    for entry in json.loads(Path(work).read_text()):
        measure(engine, mode, entry)
    engine.shutdown()


if __name__ == "__main__":
    main()
