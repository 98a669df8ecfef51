"""Every setting of a run, typed, frozen and complete after parsing. Importing this room loads no torch."""

from exactrl.config.explain import describe
from exactrl.config.recipe import (
    find_recipe,
    load_recipe,
    load_sft_recipe,
    make_config,
    make_eval_config,
    make_sft_config,
    to_toml,
)
from exactrl.config.settings import (
    Config,
    ContractConfig,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from exactrl.config.sft import SftConfig

__all__ = [
    "Config",
    "ContractConfig",
    "DataConfig",
    "ModelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SftConfig",
    "TrainConfig",
    "describe",
    "find_recipe",
    "load_recipe",
    "load_sft_recipe",
    "make_config",
    "make_eval_config",
    "make_sft_config",
    "to_toml",
]
