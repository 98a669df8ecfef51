"""Who may import whom (docs/architecture.md): walks every import of the package, inside functions too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "exactrl"
ROWS: dict[float, str] = {
    0: "types errors config contract protocols",
    1: "ops",
    2: "model algo",
    3: "engine train tasks sync adapters",
    4: "rl parity",
    5: "cluster report",
    5.5: "launch",
    6: "cli",
}
LEVELS = {room: level for level, rooms in ROWS.items() for room in rooms.split()}
FACADES = {"__init__.py", "__main__.py"}
DYNAMIC = ("import_module", "__import__")
TORCH_FREE = {f"engine/{name}.py" for name in ("allocator", "counters", "scheduler", "sequence", "step")}
ONLY_IN = {"ray": ("cluster/",), "sglang": ("adapters/sglang.py",), "transformers": ("tasks/", "model/", "adapters/")}


def type_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(node: ast.AST, package: list[str], for_types: bool = False) -> Iterator[tuple[str, bool]]:
    """(absolute dotted name, only for types) of every import below `node`; `package` resolves relative ones."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, for_types) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        module = ".".join([*base, *filter(None, [node.module])])
        yield from ((f"{module}.{alias.name}", for_types) for alias in node.names)
    elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith(DYNAMIC):
        # A computed name (a user's "module:function") cannot be judged here; a literal one can.
        yield from ((str(arg.value), for_types) for arg in node.args[:1] if isinstance(arg, ast.Constant))
    else_part = set(map(id, node.orelse)) if isinstance(node, ast.If) else set()
    for child in ast.iter_child_nodes(node):
        yield from imports(child, package, for_types or (type_only(node) and id(child) not in else_part))


def faults(path: str, source: str) -> list[str]:
    """What the file at `path` (below exactrl/) imports although the table forbids it."""
    parts = path.split("/")
    room = parts[0].removesuffix(".py")
    if path in FACADES:
        return []
    if room not in LEVELS:
        return [f"{path}: room {room!r} has no level in docs/architecture.md"]
    found = []
    torch_free = LEVELS[room] == 0 or path in TORCH_FREE
    own_files = {"exactrl." + name.removesuffix(".py").replace("/", ".") for name in TORCH_FREE}
    for name, for_types in imports(ast.parse(source), ["exactrl", *parts[:-1]]):
        top, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if top != "exactrl":
            if top in ONLY_IN and not path.startswith(ONLY_IN[top]):
                found.append(f"{path} imports {name}: only {' and '.join(ONLY_IN[top])} may")
            if top == "torch" and torch_free and not for_types:
                found.append(f"{path} imports torch")
        elif target == "__version__" or (LEVELS[room] == 0 and LEVELS.get(target) == 0):
            continue
        elif target != room and LEVELS.get(target, 99) >= LEVELS[room]:
            found.append(f"{path} imports {name}: {room} is level {LEVELS[room]}, it may import lower levels only")
        elif torch_free and not for_types and LEVELS[target] and not name.startswith(tuple(own_files)):
            found.append(f"{path} imports {name}, which may import torch")
    return found


def test_layers() -> None:
    files = sorted(path for path in ROOT.rglob("*.py") if "__pycache__" not in path.parts)
    assert files, f"no Python files below {ROOT}"
    assert [fault for path in files for fault in faults(path.relative_to(ROOT).as_posix(), path.read_text())] == []


def test_no_utils() -> None:
    names = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.stem.strip("_") in {"utils", "util"}]
    assert names == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ops/linear.py", "from exactrl.model import qwen3"),
        ("engine/engine.py", "def f():\n    import exactrl.train.trainer"),
        ("engine/engine.py", "from exactrl import tasks"),
        ("rl/loop.py", "from ..parity import check"),
        ("algo/grpo.py", "if TYPE_CHECKING:\n    from exactrl.rl.loop import Loop"),
        ("report/html.py", "import importlib\nimportlib.import_module('exactrl.cli')"),
        ("cluster/actors.py", "from exactrl.launch import build"),
        ("launch.py", "import exactrl.cli"),
        ("sync/disk.py", "import exactrl"),
        ("errors.py", "import exactrl.ops.linear"),
        ("config/recipe.py", "import torch.nn"),
        ("protocols.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch"),
        ("engine/scheduler.py", "from exactrl.engine.runner import Runner"),
        ("engine/scheduler.py", "from exactrl.ops import linear"),
        ("rl/loop.py", "import ray"),
        ("adapters/hf.py", "from sglang import Engine"),
        ("train/trainer.py", "from transformers import AutoConfig"),
        ("extras/thing.py", "import json"),
    ],
)
def test_a_violation_is_found(path: str, source: str) -> None:
    assert len(faults(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("cli/train.py", "from exactrl.launch import run\nfrom exactrl.report import write_report"),
        ("launch.py", "from exactrl.engine.engine import Engine\nfrom exactrl.cluster import place"),
        ("engine/scheduler.py", "from exactrl.engine.allocator import A\nfrom exactrl.types import Request"),
        ("engine/sequence.py", "if TYPE_CHECKING:\n    import torch"),
        ("rl/loop.py", "from exactrl import algo"),
        ("contract.py", "from exactrl.errors import ConfigError"),
        ("report/html.py", "from exactrl import __version__\nfrom .text import clean"),
        ("adapters/sglang.py", "import sglang.srt\nimport transformers"),
        ("__init__.py", "from exactrl.cli import main"),
    ],
)
def test_what_is_allowed_stays_allowed(path: str, source: str) -> None:
    assert faults(path, source) == []
