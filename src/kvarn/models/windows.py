"""Which layers have a window, in the ways that configs say it."""

from __future__ import annotations

from collections.abc import Sequence

from kvarn.core.errors import ConfigError
from kvarn.models.config import Config

_WINDOWED = {"sliding_attention": True, "full_attention": False}


def from_layer_types(types: Sequence[str], window_tokens: int | None, n_layers: int) -> tuple[int | None, ...]:
    """One entry a layer, 'sliding_attention' or 'full_attention'. Raises ConfigError."""
    if len(types) != n_layers:
        raise ConfigError(f"config: {len(types)} layer_types for {n_layers} layers", fixes=("give one a layer",))
    if unknown := sorted(set(types) - set(_WINDOWED)):
        raise ConfigError(f"config: layer type {unknown[0]!r}", fixes=(f"known: {', '.join(_WINDOWED)}",))
    return tuple(window_tokens if _WINDOWED[kind] else None for kind in types)


def periodic(period: int, window_tokens: int | None, n_layers: int) -> tuple[int | None, ...]:
    """Every `period`-th layer sees everything, the others have the window."""
    return tuple(window_tokens if (i + 1) % period else None for i in range(n_layers))


def from_max_window_layers(config: Config, n_layers: int) -> tuple[int | None, ...]:
    """Qwen: only with use_sliding_window, and then by layer_types or from layer max_window_layers on."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    if types := config.get("layer_types"):
        return from_layer_types(types, window, n_layers)
    first = config.get("max_window_layers", 28)
    return tuple(window if i >= first else None for i in range(n_layers))
