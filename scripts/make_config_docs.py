"""Writes docs/configuration.md from the settings themselves: `python scripts/make_config_docs.py`."""

from pathlib import Path

from exactrl.config import describe

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

HEAD = """# Configuration

Made by `scripts/make_config_docs.py`; change the descriptions in `exactrl/config/settings.py`.

A recipe is a TOML file with one table per section. Order: defaults, recipe, command line (`--section.key VALUE`).
"""


def render() -> str:
    lines = [HEAD]
    section = ""
    for row in describe():
        if (here := row.key.partition(".")[0]) != section:
            section = here
            lines += [*([""] if len(lines) > 1 else []), f"## [{section}]", ""]
            lines += ["| key | takes | default | meaning |", "|---|---|---|---|"]
        default = row.default if row.default == "required" else f"`{row.default}`"
        lines.append(f"| `{row.key}` | {row.allowed} | {default} | {row.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(), encoding="utf-8")
