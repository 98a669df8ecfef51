"""The minimal Python version: train the bundled model for a few steps, with a reward of your own, and generate.

python examples/run_simple.py
"""

import tempfile
from pathlib import Path

import exactrl


def reward(sample) -> float:
    """1 for a right last line. A custom reward is any function of a sample, named in a recipe as module:function."""
    return float((sample.text or "").endswith(f"Answer: {sample.label}"))


def main() -> None:
    settings = {
        "run.steps": "5",
        "run.eval_every": "0",
        "run.out": str(Path(tempfile.mkdtemp()) / "simple"),
        "reward.name": "run_simple:reward",
    }
    summary = exactrl.train(exactrl.load_recipe("tiny", list(settings.items())))
    print(f"{summary['compared_tokens']} tokens compared, {summary['mismatch_tokens']} differ")
    print(f"report: {summary['report']}")

    engine = exactrl.Engine(f"{summary['out']}/checkpoints/step_000005")
    prompts = [f"Add the numbers column by column.\n{sum_}\n" for sum_ in ("21+84+14", "67+58+39", "10+99+7")]
    for completion in engine.generate(prompts, exactrl.SamplingParams(max_new_tokens=48)):
        print(repr(engine.tokenizer.decode_response(completion.token_ids)), completion.logprobs.sum())


if __name__ == "__main__":
    main()
