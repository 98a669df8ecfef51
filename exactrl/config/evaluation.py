"""Settings of `exactrl eval`, which takes them from the command line: those of a recipe's [data] and [reward]."""

from __future__ import annotations

from typing import ClassVar

from exactrl.config.settings import Config, DataConfig, Recipe, RewardConfig, Rules


class EvalConfig(Recipe):
    """data.train is the set to evaluate on."""

    command: ClassVar[str] = "eval"
    rules: ClassVar[Rules] = {
        keys: rule for keys, rule in Config.rules.items() if all(key.startswith(("data.", "reward.")) for key in keys)
    }

    data: DataConfig
    reward: RewardConfig = RewardConfig()
