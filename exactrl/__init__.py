"""ExactRL: RL post-training whose rollout and trainer agree to the last bit.

    import exactrl
    exactrl.train(exactrl.load_recipe("tiny"))
    exactrl.Engine("tiny").generate(["…"], exactrl.SamplingParams(max_new_tokens=32))
    exactrl.sft(exactrl.load_sft_recipe("tiny_sft"))
    exactrl.check("tiny")

Names are loaded when they are used: importing the package imports no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "train": "exactrl.launch",
    "sft": "exactrl.launch",
    "check": "exactrl.launch",
    "Engine": "exactrl.launch",
    "Trainer": "exactrl.train.trainer",
    "SamplingParams": "exactrl.types",
    "Request": "exactrl.types",
    "Config": "exactrl.config",
    "load_recipe": "exactrl.config",
    "make_config": "exactrl.config",
    "SftConfig": "exactrl.config",
    "load_sft_recipe": "exactrl.config",
    "make_sft_config": "exactrl.config",
}
__all__ = ["__version__", *_PUBLIC]


class _Callable(ModuleType):
    """The room exactrl.train, which is also the function exactrl.train(config): importing the room from anywhere binds
    it to that name, so both have to be one object."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return import_module("exactrl.launch").train(*args, **kwargs)


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "train" and isinstance(value, ModuleType):
            value.__class__ = _Callable
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'exactrl' has no attribute {name!r}")
    if name == "train":
        return import_module("exactrl.train")
    return getattr(import_module(_PUBLIC[name]), name)
