"""Reading a Hugging Face config.json of a dense Qwen3 model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exactrl.errors import ModelError

ASSETS = Path(__file__).parent.parent / "assets"
ADAPTER = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a dense Qwen3 model. `raw` is the config.json it came from, written back when the model is saved."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_positions: int = 40960
    initializer_range: float = 0.02
    raw: dict[str, Any] = field(default_factory=dict, compare=False, hash=False)

    def to_json(self) -> dict[str, Any]:
        """A config.json that transformers reads."""
        rope = {} if "rope_parameters" in self.raw else {"rope_theta": self.rope_theta}
        return {
            "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "torch_dtype": "float32",
            **self.raw, **rope, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
            "vocab_size": self.vocab_size, "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size, "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads, "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim, "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings, "max_position_embeddings": self.max_positions,
        }  # fmt: skip


def find_model(name: str | Path) -> Path:
    """Folder of a model: a path, `bundled:NAME`, or the bare name of a bundled model. Raises ModelError."""
    text = str(name)
    _refuse_adapter(Path(text))
    bundled = ASSETS / text.removeprefix("bundled:")
    if text.startswith("bundled:") or not (Path(text) / "config.json").is_file():
        if "/" not in text and (bundled / "config.json").is_file():
            return bundled
        if Path(text).exists():
            runs = sorted(p.parent.name for p in Path(text).glob("checkpoints/step_*/config.json"))
            hint = f"; it is a run: use {Path(text) / 'checkpoints' / runs[-1]}, or exactrl export" if runs else ""
            raise ModelError(f"model {text!r}: not a model folder, it has no config.json{hint}")
        known = sorted(p.parent.name for p in ASSETS.glob("*/config.json"))
        raise ModelError(f"model {text!r}: no such folder, and no bundled model of that name ({', '.join(known)})")
    return Path(text)


def read_config(folder: Path) -> ModelConfig:
    """ModelConfig of a model folder. Raises ModelError for anything that would be computed differently than asked."""
    _refuse_adapter(folder)
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: holds a {type(raw).__name__}, not an object")
    return parse_config(raw, str(path))


def _refuse_adapter(folder: Path) -> None:
    """Other tools would apply it on loading; leaving it out would silently train and roll out the base weights."""
    if (folder / ADAPTER).is_file():
        raise ModelError(
            f"{folder}: holds an adapter ({ADAPTER}); adapters are not supported: merge it into the base model "
            "(peft: merge_and_unload, then save_pretrained) and use that folder"
        )


def parse_config(raw: dict[str, Any], path: str) -> ModelConfig:
    _refuse_unsupported(raw, path)
    heads = _integer(raw, "num_attention_heads", path)
    hidden = _integer(raw, "hidden_size", path)
    config = ModelConfig(
        vocab_size=_integer(raw, "vocab_size", path),
        hidden_size=hidden,
        intermediate_size=_integer(raw, "intermediate_size", path),
        num_layers=_integer(raw, "num_hidden_layers", path),
        num_heads=heads,
        num_kv_heads=_integer(raw, "num_key_value_heads", path),
        head_dim=_integer(raw, "head_dim", path, default=128),
        rope_theta=_rope_theta(raw, path),
        rms_norm_eps=_number(raw, "rms_norm_eps", path, 1e-6),
        tie_word_embeddings=_flag(raw, "tie_word_embeddings", path),
        max_positions=_integer(raw, "max_position_embeddings", path, default=32768),
        initializer_range=_number(raw, "initializer_range", path, 0.02),
        raw=raw,
    )
    if heads % config.num_kv_heads:
        raise ModelError(f"{path}: num_attention_heads {heads} is not a multiple of num_key_value_heads")
    if config.head_dim % 2:
        raise ModelError(f"{path}: head_dim {config.head_dim} is odd; rotary embedding needs pairs")
    return config


def _refuse_unsupported(raw: dict[str, Any], path: str) -> None:
    if raw.get("model_type") != "qwen3":
        raise ModelError(f"{path}: model_type is {raw.get('model_type')!r}; only dense Qwen3 ('qwen3') is supported")
    refused = {
        "attention_bias": raw.get("attention_bias", False),
        "attention_dropout": raw.get("attention_dropout", 0),
        "use_sliding_window": raw.get("use_sliding_window", False),
        "quantization_config": raw.get("quantization_config"),
        "auto_map": raw.get("auto_map"),  # code of the model's own, which is never run
        "layer_types": [kind for kind in raw.get("layer_types") or () if kind != "full_attention"][:1],
    }
    for key, value in refused.items():
        if value:
            raise ModelError(f"{path}: {key} is {value!r}, which is not supported; it would change what is computed")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path}: hidden_act is {raw['hidden_act']!r}; only 'silu' is supported")


def _rope_theta(raw: dict[str, Any], path: str) -> float:
    """rope_theta from the top level or from rope_parameters (newer files). Never a default: a wrong one is silent."""
    parameters = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    for place in (parameters, scaling):
        kind = place.get("rope_type", place.get("type", "default"))
        if kind != "default":
            raise ModelError(f"{path}: rope type {kind!r} is not supported, only 'default'")
    values = {float(p["rope_theta"]) for p in (raw, parameters) if isinstance(p.get("rope_theta"), int | float)}
    if len(values) != 1:
        found = "nowhere" if not values else f"with two values {sorted(values)}"
        raise ModelError(f"{path}: rope_theta is given {found} (top level and rope_parameters were read)")
    return values.pop()


def _integer(raw: dict[str, Any], key: str, path: str, default: int | None = None) -> int:
    value = raw.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{path}: {key} must be a positive integer, not {value!r}")
    return value


def _flag(raw: dict[str, Any], key: str, path: str) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise ModelError(f"{path}: {key} must be true or false, not {value!r}")
    return value


def _number(raw: dict[str, Any], key: str, path: str, default: float) -> float:
    value = raw.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ModelError(f"{path}: {key} must be a positive number, not {value!r}")
    return float(value)
