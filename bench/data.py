"""`python -m bench.data`: time and memory until the first prompts of a large data set are there.

A parquet file in the layout of dapo-math-17k: 17,398 chat prompts of 200 to 800 characters, repeated 103 times, in row
groups of 1,048,576 rows as pandas writes them. The tokenizer is that of the folder EXACTRL_QWEN3_TOKENIZER, else the
bundled model's. Each case is a process of its own: time and peak memory include Python and its imports.

  dedupe    data.dedupe = true
  all rows  without it
  shared    extra_info.index is the same for the repeats of a prompt, as in the public file
  own       each row has an index of its own, so that no two rows are equal
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.common import write_result
from exactrl.tasks.files import ASSETS

UNIQUE, REPEATS, ROW_GROUP = 17_398, 103, 1 << 20
WORDS = [
    "let", "the", "of", "and", "is", "a", "find", "all", "such that", "real number", "integer", "sum", "value of",
    "$n$", "$x^2+1$", "triangle", "$\\frac{a}{b}$", "point", "circle", "$ABC$", "probability", "sequence", "function",
    "equation", "prime", "divisor", "remainder",
]  # fmt: skip
TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def write_file(path: Path, unique: int, repeats: int, own_index: bool) -> None:
    """Rows as in dapo-math-17k; the whole data set comes `repeats` times over."""
    generator = np.random.default_rng(0)
    rows = []
    for number in range(unique):
        size, text = int(generator.integers(200, 800)), f"Problem {number}:"
        while len(text) < size:
            text += " " + " ".join(generator.choice(WORDS, 8))
        rows.append(
            {
                "data_source": "math_dapo",
                "prompt": [{"content": text[:size], "role": "user"}],
                "ability": "MATH",
                "reward_model": {"ground_truth": str(number % 1000), "style": "rule-lighteval/MATH_v2"},
                "extra_info": {"index": f"{number:032x}"},
            }
        )
    table = pa.concat_tables([pa.Table.from_pylist(rows)] * repeats)
    if own_index:
        index = pa.array([f"{i:032x}" for i in range(len(table))])
        info = pa.StructArray.from_arrays([index], ["index"])
        table = table.set_column(table.schema.names.index("extra_info"), "extra_info", info)
    pq.write_table(table, path, row_group_size=ROW_GROUP)


def first_prompts(data: str, folder: str, dedupe: bool) -> dict[str, Any]:
    """Builds the task of a recipe and draws the first step's prompts; seconds since the process began."""
    from exactrl.config import load_recipe
    from exactrl.launch.build import build_task

    settings = {
        "data.train": data, "data.eval": "{}", "run.eval_every": "0", "data.dedupe": str(dedupe).lower(),
        "data.apply_chat_template": "true", "data.label_key": "reward_model.ground_truth", "data.id_key": "",
        "data.max_prompt_tokens": "1024",
    }  # fmt: skip
    task, _, counts = build_task(load_recipe("tiny", list(settings.items())), Path(folder))
    begin = time.perf_counter()
    prompts = task.train_prompts(0, 512)
    return {
        **counts["train"],
        "first_prompts": len(prompts),
        "order_and_draw_seconds": round(time.perf_counter() - begin, 2),
        "seconds": round(time.clock_gettime(time.CLOCK_BOOTTIME) - process_start(), 2),
        "cpu_seconds": round(time.process_time(), 2),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def process_start() -> float:
    """When this process began, in seconds since the machine did (field 22 of /proc/self/stat)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def tokenizer_folder(folder: Path) -> str:
    """A folder with a tokenizer and a chat template; returns the tokenizer's name."""
    given = os.environ.get("EXACTRL_QWEN3_TOKENIZER")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(given or ASSETS / "tiny") / name, folder / name)
    if not given:
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return "Qwen3" if given else "bundled tiny (one token per character)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unique", type=int, default=UNIQUE)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        data, folder, dedupe = arguments.child
        print(json.dumps(first_prompts(data, folder, dedupe == "dedupe")))
        return
    rows = []
    print(f"{'rows':>9} {'index':6} {'case':8} {'prompts':>9} {'seconds':>8} {'CPU s':>6} {'peak MB':>8}")
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = tokenizer_folder(Path(scratch))
        for index in ("shared", "own"):
            path = Path(scratch) / f"{index}.parquet"
            write_file(path, arguments.unique, arguments.repeats, index == "own")
            for case in ("dedupe", "all rows"):
                command = [sys.executable, "-m", "bench.data", "--child", str(path), scratch, case]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                row = {"case": case, "index": index, "file_mb": path.stat().st_size >> 20, **json.loads(done.stdout)}
                rows.append(row)
                print(
                    f"{row['rows']:9} {index:6} {case:8} {row['prompts']:9} {row['seconds']:8.1f} "
                    f"{row['cpu_seconds']:6.1f} {row['peak_rss_mb']:8}",
                    flush=True,
                )
    first = rows[0]
    summary = {
        "tokenizer": tokenizer,
        **{key: first[key] for key in ("rows", "unique", "seconds", "cpu_seconds", "peak_rss_mb")},
    }
    print(f"\nwritten to {write_result('data', rows, summary)}")


if __name__ == "__main__":
    main()
