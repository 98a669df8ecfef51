"""The tables of docs/attention.md, made from the rows of bench/results/attention-h200.json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]


def markdown(head: list[str], body: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def decode_table(rows: list[Row], page_size: int, key: str) -> str:
    """Batches down, contexts across; ragged batches are left to the result file."""
    found = {
        (row["sequences"], row["keys"]): row[key]
        for row in rows
        if row["part"] == "decode" and row["page_size"] == page_size and " to " not in row["batch"]
    }
    batches, contexts = (sorted({pair[i] for pair in found}) for i in (0, 1))
    body = [[str(b), *(f"{found[b, c]:.2f}" if (b, c) in found else "" for c in contexts)] for b in batches]
    return markdown(["batch", *(f"{c // 1024}k" for c in contexts)], body)


def chunk_table(rows: list[Row]) -> str:
    body = [
        [row["batch"], str(row["page_size"]), f"{row['over_fa3_contract']:.2f}"]
        for row in rows
        if row["part"] == "chunks"
    ]
    return markdown(["batch", "page size", "exact-v1 / exact-v1-fa3"], body)


def prefill_table(rows: list[Row]) -> str:
    body = [
        [row["layout"], str(row["length"]), f"{row['tflops']['ours']:.0f}", f"{row['tflops']['fa3']:.0f}",
         f"{row['speed_ratio']:.2f}"]
        for row in rows
        if row["part"] == "prefill"
    ]  # fmt: skip
    return markdown(["layout", "length", "ours, TFLOP/s", "FA3", "speed ratio"], body)


def backward_table(rows: list[Row]) -> str:
    found = [row for row in rows if row["part"] == "backward"]
    names = list(dict.fromkeys(name for row in found for name in row["tflops"]))
    body = [
        [str(row["length"]), *(f"{row['tflops'][n]:.0f}" if n in row["tflops"] else "" for n in names)] for row in found
    ]
    return markdown(["length", *names], body)


def tables(rows: list[Row]) -> str:
    parts = []
    for page_size in sorted({row["page_size"] for row in rows if row["part"] == "decode"}):
        parts += [f"Decode, time over the target, pages of {page_size}:", decode_table(rows, page_size, "time_ratio")]
        title = f"Decode, time of exact-v1 over exact-v1-fa3, pages of {page_size}:"
        parts += [title, decode_table(rows, page_size, "over_fa3_contract")]
    parts += ["Chunks and mixed batches:", chunk_table(rows), "Prefill:", prefill_table(rows)]
    return "\n\n".join([*parts, "Backward, TFLOP/s:", backward_table(rows)])
