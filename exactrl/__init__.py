"""ExactRL: RL post-training whose rollout and trainer agree to the last bit.

    import exactrl
    exactrl.train(exactrl.load_recipe("tiny"))
    exactrl.Engine("tiny").generate(["…"], exactrl.SamplingParams(max_new_tokens=32))
    exactrl.check("tiny")

Names are loaded when they are used: importing the package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "train": "exactrl.launch",
    "check": "exactrl.launch",
    "Engine": "exactrl.launch",
    "Trainer": "exactrl.train.trainer",
    "SamplingParams": "exactrl.types",
    "Request": "exactrl.types",
    "Config": "exactrl.config",
    "load_recipe": "exactrl.config",
    "make_config": "exactrl.config",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'exactrl' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
