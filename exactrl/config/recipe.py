"""Recipes in and out: TOML to settings in the order defaults, recipe, command line; all problems in one ConfigError."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import tomli_w
from pydantic import ValidationError

from exactrl.config.evaluation import EvalConfig
from exactrl.config.explain import allowed, show, unknown
from exactrl.config.settings import Config, Recipe
from exactrl.config.sft import SftConfig
from exactrl.errors import ConfigError

BUNDLED = Path(__file__).parent.parent / "assets" / "recipes"
KINDS: tuple[type[Recipe], ...] = (Config, SftConfig)
R = TypeVar("R", bound=Recipe)


def find_recipe(name: str | Path) -> Path:
    """The recipe file behind a path or a bundled name: "tiny", "bundled:tiny", "recipes/tiny.toml".

    A file that exists wins over a bundled recipe of the same name. Raises ConfigError where there is neither.
    """
    path = Path(name)
    if path.is_file():
        return path
    short = str(name).removeprefix("bundled:").removeprefix("recipes/").removesuffix(".toml")
    known = sorted(file.stem for file in BUNDLED.glob("*.toml"))
    if short in known:
        return BUNDLED / f"{short}.toml"
    problem = "is a folder; a recipe is a TOML file" if path.is_dir() else "does not exist"
    raise ConfigError(f"recipe {str(name)!r} {problem} (bundled recipes: {', '.join(known)})")


def load_recipe(path: str | Path, overrides: Iterable[tuple[str, str]] = ()) -> Config:
    """Reads an RL recipe and applies overrides ("section.key", text as typed), later ones last.

    Raises ConfigError naming the file, or the command line, and every problem.
    """
    return _load(Config, path, overrides)


def load_sft_recipe(path: str | Path, overrides: Iterable[tuple[str, str]] = ()) -> SftConfig:
    """Reads a recipe for supervised fine-tuning; see load_recipe."""
    return _load(SftConfig, path, overrides)


def _load(kind: type[R], path: str | Path, overrides: Iterable[tuple[str, str]]) -> R:
    file = find_recipe(path)
    table = _read_toml(file)
    _require_kind(kind, table, str(file))
    settings = kind.settings()
    problems: list[str] = []
    overridden: set[str] = set()
    for name, text in overrides:
        key, entry = _split(name)
        if key not in settings or (entry and key != "data.eval"):
            problems.append(f"command line: {unknown(name, kind)}")
            continue
        _override(table, key, entry, text, settings[key].annotation)
        overridden.add(key)
    return _make(kind, table, str(file), overridden, problems)


def make_config(table: Mapping[str, Any], source: str = "settings") -> Config:
    """Checks a nested mapping {section: {key: value}} of an RL run and completes it with defaults.

    `source` names the mapping in messages. Raises ConfigError with all problems.
    """
    _require_kind(Config, table, source)
    return _make(Config, table, source)


def make_sft_config(table: Mapping[str, Any], source: str = "settings") -> SftConfig:
    """Settings of a supervised run; see make_config."""
    _require_kind(SftConfig, table, source)
    return _make(SftConfig, table, source)


def make_eval_config(table: Mapping[str, Any]) -> EvalConfig:
    """Settings of an evaluation, as given on the command line; see make_config."""
    return _make(EvalConfig, table, "command line")


def _make(
    kind: type[R], table: Mapping[str, Any], source: str, overridden: Iterable[str] = (), problems: Iterable[str] = ()
) -> R:
    """Keys in `overridden` came from the command line instead of `source`; `problems` are lines already found."""
    overridden = set(overridden)
    table = {section: _with_tuples(keys) for section, keys in table.items()}
    lines = list(problems)
    try:
        config = kind.model_validate(table)
    except ValidationError as error:
        wrong = _explain(error, table, kind)
        for key, text in wrong.items():
            lines.append(f"{'command line' if key in overridden else source}: {text}")
        for keys, text in kind.disagreements(_valid_values(table, wrong, kind)):
            lines.append(f"{'command line' if overridden.intersection(keys) else source}: {text}")
    if lines:
        raise ConfigError("\n".join(lines))
    return config


def _require_kind(kind: type[Recipe], table: Mapping[str, Any], source: str) -> None:
    """Raises ConfigError for a recipe of another kind: one that has fewer unknown settings when read as that."""
    foreign = _foreign(kind, table)
    for other in KINDS:
        if len(_foreign(other, table)) < len(foreign):
            raise ConfigError(
                f"{source}: a recipe for `exactrl {other.command}`, not for `exactrl {kind.command}`, which has no "
                f"{foreign[0]}; run it with `exactrl {other.command}`"
            )


def _foreign(kind: type[Recipe], table: Mapping[str, Any]) -> list[str]:
    """Settings of the table that this kind of recipe does not have."""
    settings = kind.settings()
    names = [f"{section}.{key}" for section, keys in table.items() if isinstance(keys, Mapping) for key in keys]
    return [name for name in names if name not in settings]


def to_toml(config: Recipe) -> str:
    """The complete configuration as a recipe; loading it gives back an equal one."""
    return tomli_w.dumps(config.model_dump())


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        text = file.read_bytes().decode("utf-8-sig")
        return tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read recipe {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text (byte {error.start}); a recipe is a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        reason = str(error).replace("at end of document", f"at line {len(text.splitlines())}, the end of the file")
        raise ConfigError(f"{file}: not valid TOML: {reason}") from error


def _split(name: str) -> tuple[str, str]:
    """The setting and, where one is named, the entry of a table: data.eval.heldout is ("data.eval", "heldout")."""
    section, _, rest = name.partition(".")
    key, _, entry = rest.partition(".")
    return f"{section}.{key}", entry


def _override(table: dict[str, Any], name: str, entry: str, text: str, annotation: Any) -> None:
    section, _, key = name.partition(".")
    keys = table.setdefault(section, {})
    if not isinstance(keys, dict):
        return  # reported as "must be a table"
    if not entry:
        keys[key] = _parse(text, annotation)
        return
    entries = keys.setdefault(key, {})
    if isinstance(entries, dict):
        entries[entry] = text


def _parse(text: str, annotation: Any) -> Any:
    """The value that `text` spells for this type; `text` itself where it spells none, for validation to refuse."""
    if get_origin(annotation) is Annotated:
        return _parse(text, get_args(annotation)[0])
    if annotation is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if get_origin(annotation) in (tuple, dict):
        return _parse_list(text, get_args(annotation)[0]) if get_origin(annotation) is tuple else _toml_value(text)
    if annotation in (int, float):
        try:
            return annotation(text)
        except ValueError:
            return text
    return text


def _parse_list(text: str, item: Any) -> Any:
    if text.lstrip().startswith("["):
        return _toml_value(text)
    return [_parse(part.strip(), item) for part in text.split(",")] if text.strip() else []


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _with_tuples(keys: Any) -> Any:
    """TOML knows lists, settings are tuples."""
    if not isinstance(keys, Mapping):
        return keys
    return {key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()}


def _explain(error: ValidationError, table: Mapping[str, Any], kind: type[Recipe]) -> dict[str, str]:
    """One sentence for each wrong setting ("section.key") or section."""
    wrong: dict[str, str] = {}
    for fault in error.errors(include_url=False):
        place = ".".join(str(part) for part in fault["loc"][:2])
        if fault["loc"] and place not in wrong:
            wrong[place] = (
                _section_fault(place, fault, kind) if len(fault["loc"]) == 1 else _key_fault(place, fault, table, kind)
            )
    return wrong


def _section_fault(name: str, fault: Any, kind: type[Recipe]) -> str:
    if name not in kind.sections():
        return unknown(name, kind)
    if fault["type"] == "missing":
        required = [key for key, field in kind.sections()[name].model_fields.items() if field.is_required()]
        return f"section [{name}] is missing; it needs at least: {', '.join(required)}"
    return f"{name} must be a table, [{name}], not {show(fault['input'])}"


def _key_fault(place: str, fault: Any, table: Mapping[str, Any], kind: type[Recipe]) -> str:
    field = kind.settings().get(place)
    if field is None:
        return unknown(place, kind)
    section, _, key = place.partition(".")
    takes = f"it takes {allowed(field)}"
    if key not in table[section]:
        return f"{place} is required; {takes}. {field.description}"
    reason = str(fault["ctx"]["error"]) if fault["type"] == "value_error" else takes
    return f"{place} = {show(table[section][key])} is not allowed: {reason}"


def _valid_values(table: Mapping[str, Any], wrong: Mapping[str, str], kind: type[Recipe]) -> dict[str, Any]:
    """Given values and defaults of all settings that have no problem of their own."""
    values = {}
    for name, field in kind.settings().items():
        section, _, key = name.partition(".")
        keys = table.get(section, {})
        if name in wrong or section in wrong or not isinstance(keys, Mapping):
            continue
        if key in keys:
            values[name] = keys[key]
        elif not field.is_required():
            values[name] = field.get_default(call_default_factory=True)
    return values
