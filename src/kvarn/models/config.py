"""Reading a config in Hugging Face's vocabulary: required values raise ConfigError by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvarn.core.errors import ConfigError

Config = Mapping[str, Any]

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


def text_config(config: Config) -> Config:
    """The language model's part of a config: `text_config` where the model also sees or hears, else the config."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    return {"tie_word_embeddings": config.get("tie_word_embeddings", True), **inner}


def integer(config: Config, key: str) -> int:
    """The positive integer `key`. Raises ConfigError."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config: {key} is {value!r}", fixes=(f"{key} must be a positive integer",))
    return value


def number(config: Config, key: str, default: float) -> float:
    """The number `key`, or `default` where it is absent. Raises ConfigError."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ConfigError(f"config: {key} is {value!r}", fixes=(f"{key} must be a number",))
    return float(value)


def activation(config: Config, default: str = "silu") -> str:
    """The gate's activation as the kernels name it. Raises ConfigError for one that no kernel computes."""
    name = config.get("hidden_activation") or config.get("hidden_act") or default
    if name not in _ACTIVATIONS:
        raise ConfigError(f"config: activation {name!r}", fixes=(f"known: {', '.join(_ACTIVATIONS)}",))
    return _ACTIVATIONS[name]
