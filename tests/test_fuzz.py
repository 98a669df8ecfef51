"""Whatever a recipe or a model folder holds: it loads, or the error is one of ours.

Data files: tests/tasks/test_data.py; grader: tests/tasks/test_grading_rules.py.
"""

from __future__ import annotations

import json
import string
import tomllib
from contextlib import suppress

import pytest
import tomli_w
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exactrl.config import load_recipe, load_sft_recipe, make_config, to_toml
from exactrl.config.settings import Config
from exactrl.errors import ConfigError, ModelError
from exactrl.model.config import read_config
from exactrl.model.folder import load_model, save_model
from exactrl.ops import Ops
from tests.model.test_qwen3 import build, config
from tests.ops.helpers import CONTRACT
from tests.test_config import MINIMAL

FEW = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.dates()
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=8), v, max_size=3), max_leaves=6
)
NAMES = sorted(Config.settings())


@FEW
@given(st.binary(max_size=200))
def test_any_bytes_as_a_recipe(tmp_path, content):
    file = tmp_path / "r.toml"
    file.write_bytes(content)
    for load in (load_recipe, load_sft_recipe):
        with pytest.raises(ConfigError):  # never a whole recipe
            load(file)


@FEW
@given(st.dictionaries(st.sampled_from(NAMES) | st.text(string.ascii_letters + "._", max_size=12), VALUES, max_size=4))
def test_any_values_in_a_recipe(changes):
    """A recipe that loads is written and read again as the same one."""
    table = {section: dict(keys) for section, keys in MINIMAL.items()}
    for name, value in changes.items():
        section, _, key = name.partition(".")
        part = table.setdefault(section, {})
        if isinstance(part, dict):
            part[key] = value
    try:
        made = make_config(table)
    except ConfigError:
        return
    assert make_config(tomllib.loads(to_toml(made))) == made


@FEW
@given(st.lists(st.tuples(st.sampled_from(NAMES) | st.text(max_size=10), st.text(max_size=12)), max_size=4))
def test_any_overrides(tmp_path, overrides):
    file = tmp_path / "r.toml"
    file.write_text(tomli_w.dumps(MINIMAL))
    with suppress(ConfigError):
        load_recipe(file, overrides)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "m"
    save_model(build(config(num_layers=1)), path)
    return path


def load(path):
    return load_model(path, Ops(CONTRACT), torch.float32, trainable=False)


@FEW
@given(data=st.data())
def test_a_damaged_safetensors_file(folder, data):
    """Cut, extended, or with bytes changed in header or data: a ModelError, or a model (changed values are values)."""
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    header = int.from_bytes(whole[:8], "little") + 8
    content = bytearray(whole[: data.draw(st.just(len(whole)) | st.integers(0, len(whole)))])
    for _ in range(data.draw(st.integers(0, 4))):
        if content:
            content[data.draw(st.integers(0, min(header, len(content)) - 1))] = data.draw(st.integers(0, 255))
    content += data.draw(st.binary(max_size=9))
    try:
        file.write_bytes(bytes(content))
        with suppress(ModelError):
            load(folder)
    finally:
        file.write_bytes(whole)


@FEW
@given(st.dictionaries(st.sampled_from(sorted(config().to_json())) | st.text(max_size=6), VALUES, max_size=3))
def test_any_config_json(folder, changes):
    file = folder / "config.json"
    whole = file.read_text()
    try:
        file.write_text(json.dumps({**json.loads(whole), **changes}, default=str))
        with suppress(ModelError):
            read_config(folder)
    finally:
        file.write_text(whole)


@FEW
@given(st.binary(max_size=60))
def test_any_index(folder, content):
    index = folder / "model.safetensors.index.json"
    try:
        index.write_bytes(content)
        with suppress(ModelError):
            load(folder)
    finally:
        index.unlink()
