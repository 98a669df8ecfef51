"""Writes docs/configuration.md from the settings themselves: `python scripts/make_config_docs.py`."""

from pathlib import Path

from exactrl.config import SftConfig, describe
from exactrl.config.explain import Row

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

HEAD = """# Configuration

Made by `scripts/make_config_docs.py`; change the descriptions in `exactrl/config/settings.py` and `sft.py`.

A recipe is a TOML file with one table per section. Order: defaults, recipe, command line (`--section.key VALUE`). The
first part is for recipes of `exactrl train`, the [second](#recipes-of-exactrl-sft) for those of `exactrl sft`.
"""
SFT_HEAD = """
# Recipes of `exactrl sft`

[contract] is the same as above; supervised fine-tuning uses its kernels, and compares nothing.
"""


def render() -> str:
    supervised = [row for row in describe(SftConfig) if not row.key.startswith("contract.")]
    return "\n".join([HEAD, *tables(describe()), SFT_HEAD, *tables(supervised)]) + "\n"


def tables(rows: list[Row]) -> list[str]:
    lines: list[str] = []
    section = ""
    for row in rows:
        if (here := row.key.partition(".")[0]) != section:
            section = here
            lines += [*([""] if lines else []), f"## [{section}]", ""]
            lines += ["| key | takes | default | meaning |", "|---|---|---|---|"]
        default = row.default if row.default == "required" else f"`{row.default}`"
        lines.append(f"| `{row.key}` | {row.allowed} | {default} | {row.help} |")
    return lines


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(), encoding="utf-8")
