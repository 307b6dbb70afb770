"""Rotary position embedding: the frequencies of every published scaling, and a step's cosines and sines.

RoPE: Su et al. 2021 (arXiv 2104.09864). Which scaling a model uses stands in its config as `rope_parameters` (or the
older `rope_theta`, `rope_scaling`, `rope_local_base_freq`, `partial_rotary_factor`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvarn.core.errors import ConfigError
from kvarn.kernels.api import Rope
from kvarn.models.config import Config, integer, number

DEFAULT_THETA = 10_000.0
_OLD_NAMES = {"su": "longrope", "mrope": "default"}


class RotaryEmbedding:
    """Turns a step's positions into `Rope` tables. Computed afresh each step from one frequency a channel pair, so
    there is no longest position and no table to hold.

    `scale` multiplies cos and sin (YaRN's and LongRoPE's attention factor).
    """

    def __init__(self, frequencies: Tensor, scale: float = 1.0) -> None:
        self._frequencies = frequencies
        self._scale = scale

    @property
    def by_length(self) -> bool:
        """Do the frequencies depend on how long the sequence becomes?"""
        return False

    def __call__(self, positions: Tensor, span_tokens: Tensor | None = None) -> Rope:
        """positions [T] int64. span_tokens [T] int64: the length each row's sequence may reach; only ropes with
        `by_length` look at it, and without it each row goes by its own position. Returns cos, sin [T, R/2] float32."""
        angles = positions[:, None].float() * self._frequencies_at(positions, span_tokens)
        if self._scale == 1.0:
            return Rope(angles.cos(), angles.sin())
        return Rope(angles.cos() * self._scale, angles.sin() * self._scale)

    def turn(self, positions: Tensor) -> Rope:
        """The rotation alone, without any attention scaling: positions [n] int64 -> cos, sin [n, R/2] float32. Not for
        ropes with `by_length`."""
        angles = positions[:, None].float() * self._frequencies
        return Rope(angles.cos(), angles.sin())

    def _frequencies_at(self, positions: Tensor, span_tokens: Tensor | None) -> Tensor:
        return self._frequencies


class LongRope(RotaryEmbedding):
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): one set of frequencies for sequences within the original context,
    another for longer ones."""

    def __init__(self, short: Tensor, long: Tensor, original_tokens: int, scale: float) -> None:
        super().__init__(short, scale)
        self._long, self._original_tokens = long, original_tokens

    @property
    def by_length(self) -> bool:
        return True

    def _frequencies_at(self, positions: Tensor, span_tokens: Tensor | None) -> Tensor:
        span = positions + 1 if span_tokens is None else span_tokens
        return torch.where((span > self._original_tokens)[:, None], self._long, self._frequencies)


class DynamicNTK(RotaryEmbedding):
    """Dynamic NTK scaling: the base grows with the sequence once it passes the trained length (equation 17 and
    section 3.3 of YaRN, Peng et al. 2023, arXiv 2309.00071)."""

    def __init__(self, theta: float, dim: int, factor: float, trained_tokens: int) -> None:
        super().__init__(_plain(theta, dim))
        self._theta, self._dim, self._factor, self._trained = theta, dim, factor, trained_tokens

    @property
    def by_length(self) -> bool:
        return True

    def _frequencies_at(self, positions: Tensor, span_tokens: Tensor | None) -> Tensor:
        span = (positions + 1 if span_tokens is None else span_tokens).clamp_min(self._trained).double()
        growth = self._factor * span / self._trained - (self._factor - 1)
        theta = self._theta * growth ** (self._dim / (self._dim - 2))
        return (1.0 / theta[:, None] ** _exponents(self._dim).double()).float()


def rotary_embedding(config: Config, head_dim: int, layer_type: str | None = None) -> RotaryEmbedding:
    """The embedding for layers of `layer_type` (None: the model has one kind). Raises ConfigError by name for an
    unknown scaling or a missing parameter."""
    given = rope_parameters(config, layer_type)
    kind = given["rope_type"]
    dim = head_dim if kind == "proportional" else int(head_dim * number(given, "partial_rotary_factor", 1.0))
    if kind not in _SCALINGS:
        raise ConfigError(f"config: rope scaling {kind!r}", fixes=(f"known: {', '.join(sorted(_SCALINGS))}",))
    return _SCALINGS[kind](given, config, dim)


def rope_parameters(config: Config, layer_type: str | None = None) -> dict[str, Any]:
    """The rope parameters of `layer_type` in the newer vocabulary, whichever the config speaks: always rope_type and
    rope_theta, and partial_rotary_factor and original_max_position_embeddings where they stand beside."""
    found = config.get("rope_parameters") or {}
    if layer_type is not None and isinstance(found.get(layer_type), Mapping):
        found = found[layer_type]
    scaling = config.get("rope_scaling") if layer_type != "sliding_attention" else None
    merged = {**(scaling or {}), **{k: v for k, v in found.items() if v is not None}}
    kind = str(merged.get("rope_type") or merged.get("type") or "default")
    if kind == "yarn" and "short_factor" in merged:
        kind = "longrope"  # early Phi-3 configs call it so
    merged["rope_type"] = _OLD_NAMES.get(kind, kind)
    merged.setdefault("rope_theta", _theta(config, layer_type))
    if config.get("partial_rotary_factor") is not None:
        merged.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    if config.get("original_max_position_embeddings") is not None:
        merged["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return merged


def _theta(config: Config, layer_type: str | None) -> float:
    """Gemma 3 keeps two bases: rope_theta for global layers and rope_local_base_freq for local ones."""
    if layer_type == "sliding_attention":
        return number(config, "rope_local_base_freq", DEFAULT_THETA)
    return number(config, "rope_theta", 1_000_000.0 if layer_type == "full_attention" else DEFAULT_THETA)


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32) / dim


def _plain(theta: float, dim: int) -> Tensor:
    """One frequency a channel pair: theta^(-2i / dim)."""
    return 1.0 / theta ** _exponents(dim)


def _need(given: Mapping[str, Any], key: str) -> float:
    if not isinstance(given.get(key), (int, float)):
        raise ConfigError(f"config: rope scaling {given['rope_type']!r} has no {key}", fixes=("add it to the config",))
    return given[key]


def _default(given: Mapping[str, Any], config: Config, dim: int) -> RotaryEmbedding:
    return RotaryEmbedding(_plain(given["rope_theta"], dim))


def _linear(given: Mapping[str, Any], config: Config, dim: int) -> RotaryEmbedding:
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595)."""
    return RotaryEmbedding(_plain(given["rope_theta"], dim) / _need(given, "factor"))


def _proportional(given: Mapping[str, Any], config: Config, dim: int) -> RotaryEmbedding:
    """Gemma 4: only the first share of all channel pairs turns, at the whole head's frequencies."""
    turning = int(number(given, "partial_rotary_factor", 1.0) * dim // 2)
    frequencies = torch.zeros(dim // 2)
    frequencies[:turning] = _plain(given["rope_theta"], dim)[:turning]
    return RotaryEmbedding(frequencies / number(given, "factor", 1.0))


def _dynamic(given: Mapping[str, Any], config: Config, dim: int) -> RotaryEmbedding:
    trained = integer(config, "max_position_embeddings")
    return DynamicNTK(given["rope_theta"], dim, _need(given, "factor"), trained)


def _factors(given: Mapping[str, Any], config: Config, dim: int) -> RotaryEmbedding:
    """Frequencies divided one by one, as a GGUF's `rope_freqs` tensor states them (Llama 3.1 and later)."""
    return RotaryEmbedding(_plain(given["rope_theta"], dim) / _per_channel(given, "factors", dim))


def _llama3(given: Mapping[str, Any], config: Config, dim: int) -> RotaryEmbedding:
    """Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, those between blended (the model's published
    reference code, `apply_scaling`)."""
    plain = _plain(given["rope_theta"], dim)
    factor, low, high = (_need(given, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = _original_tokens(given, config)
    wavelength = 2 * math.pi / plain
    blend = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return RotaryEmbedding((1 - blend) * plain / factor + blend * plain)


def _yarn(given: Mapping[str, Any], config: Config, dim: int) -> RotaryEmbedding:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): sections 3.2 (by parts) and 3.4 (attention factor)."""
    theta, original = given["rope_theta"], _original_tokens(given, config)
    factor = given.get("factor") or integer(config, "max_position_embeddings") / original
    low, high = (
        dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (given.get("beta_fast") or 32, given.get("beta_slow") or 1)
    )
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    slowed = ramp.clamp(0.0, 1.0)
    plain = _plain(theta, dim)
    return RotaryEmbedding(plain / factor * slowed + plain * (1 - slowed), _yarn_scale(given, factor))


def _yarn_scale(given: Mapping[str, Any], factor: float) -> float:
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    numerator, denominator = given.get("mscale"), given.get("mscale_all_dim")
    return mscale(numerator) / mscale(denominator) if numerator and denominator else mscale(1.0)


def _longrope(given: Mapping[str, Any], config: Config, dim: int) -> RotaryEmbedding:
    original = int(_original_tokens(given, config))
    factor = given.get("factor") or integer(config, "max_position_embeddings") / original
    scale = given.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    plain = _plain(given["rope_theta"], dim)
    short, long = (_per_channel(given, key, dim) for key in ("short_factor", "long_factor"))
    return LongRope(plain / short, plain / long, original, float(scale))


def _per_channel(given: Mapping[str, Any], key: str, dim: int) -> Tensor:
    factors = given.get(key)
    if factors is None or len(factors) != dim // 2:
        count = "no" if factors is None else len(factors)
        raise ConfigError(f"config: rope {key} has {count} values", fixes=(f"{dim // 2} are needed",))
    return torch.tensor(factors, dtype=torch.float32)


def _original_tokens(given: Mapping[str, Any], config: Config) -> float:
    return given.get("original_max_position_embeddings") or integer(config, "max_position_embeddings")


_SCALINGS: dict[str, Callable[[Mapping[str, Any], Config, int], RotaryEmbedding]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "proportional": _proportional,
    "factors": _factors,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
