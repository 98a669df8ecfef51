"""The minimal Python version: train the bundled model for a few steps, with a reward of your own, and generate.

python examples/run_simple.py
"""

import tempfile
from pathlib import Path

import exactrl

recipe = exactrl.load_recipe(
    "tiny",
    [
        ("run.steps", "5"),
        ("run.eval_every", "0"),
        ("run.out", str(Path(tempfile.mkdtemp()) / "simple")),
    ],
)
summary = exactrl.train(recipe)
print(f"{summary['compared_tokens']} tokens compared, {summary['mismatch_tokens']} differ; report: {summary['report']}")

engine = exactrl.Engine(f"{summary['out']}/checkpoints/step_000005")
prompt = "Add the numbers column by column.\n21+84+14\n"
for completion in engine.generate([prompt] * 3, exactrl.SamplingParams(max_new_tokens=48)):
    print(repr(engine.tokenizer.decode_response(completion.token_ids)), completion.logprobs.sum())
