"""Layer specs: what one layer stores per token and per sequence. The planner, the allocator, the metrics and the
tests all count from these and from nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from kvarn.core.errors import ConfigError, IncompatiblePlan

ELEMENT_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
}


class LayerKind(StrEnum):
    ATTENTION = "attention"  # K and V, per KV head
    LATENT = "latent"  # MLA: one latent vector and one rope key a token
    SHARED = "shared"  # reads the cache of an earlier layer
    STATE = "state"  # a fixed-size recurrent or convolution state a sequence, nothing a token
    NONE = "none"  # stores nothing


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of recurrent state, per sequence and layer.

    name: "conv" for the columns a causal convolution remembers, "ssm" for a recurrent matrix. columns: of a "conv"
    tensor, how many time steps it remembers (kernel - 1); elements = channels * columns. Drafting engines keep more."""

    name: str
    elements: int
    dtype: str
    columns: int = 0

    @property
    def nbytes(self) -> int:
        return self.elements * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer keeps.

    kv_heads, k_dim, v_dim: attention; elements a token = kv_heads * (k_dim + v_dim).
    latent_dim, rope_dim: MLA; elements a token = latent_dim + rope_dim, once, whatever the heads.
    index_dim: keys of a sparse indexer beside it, elements a token.
    compressed_dim, compress_tokens: beside that, compressed_dim elements stay for every full compress_tokens tokens of
    the whole context, whatever the window (DeepSeek-V4's compressed entries and their indexer keys).
    window_tokens: a query sees itself and window_tokens - 1 earlier tokens. chunk_tokens: it sees its own chunk only.
    shares_layer: index of the layer whose cache is read instead.
    state: recurrent tensors; may stand beside attention (Falcon-H1).
    query_heads: does not change what is stored; needed for grouping, FLOPs and the GQA/MQA counterfactuals.
    """

    kv_heads: int = 0
    k_dim: int = 0
    v_dim: int = 0
    query_heads: int = 0
    latent_dim: int = 0
    rope_dim: int = 0
    index_dim: int = 0
    window_tokens: int | None = None
    chunk_tokens: int | None = None
    shares_layer: int | None = None
    state: tuple[StateTensor, ...] = ()
    compressed_dim: int = 0
    compress_tokens: int = 0

    def __post_init__(self) -> None:
        if self.kv_heads and self.query_heads % self.kv_heads:
            raise ConfigError(f"{self.query_heads} query heads do not divide into {self.kv_heads} KV heads")
        if self.window_tokens is not None and self.window_tokens < 1:
            raise ConfigError(f"window of {self.window_tokens} tokens; it must be at least 1")

    @property
    def kind(self) -> LayerKind:
        if self.shares_layer is not None:
            return LayerKind.SHARED
        if self.latent_dim:
            return LayerKind.LATENT
        if self.kv_heads:
            return LayerKind.ATTENTION
        return LayerKind.STATE if self.state else LayerKind.NONE

    @property
    def elements_per_token(self) -> int:
        """Numbers stored a token by this layer (K, V, latent, rope and indexer keys), before any format."""
        if self.kind is LayerKind.SHARED:
            return 0
        return self.kv_heads * (self.k_dim + self.v_dim) + self.latent_dim + self.rope_dim + self.index_dim

    @property
    def state_bytes(self) -> int:
        return sum(t.nbytes for t in self.state)

    def compressed_elements(self, tokens: int) -> int:
        """Numbers stored beside the window for a context of `tokens`; 0 for layers that compress nothing."""
        return tokens // self.compress_tokens * self.compressed_dim if self.compress_tokens else 0


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A cache group: the layers (model indices) that have the same spec and so share one block table."""

    layers: tuple[int, ...]
    spec: LayerSpec


def cache_groups(layers: Iterable[LayerSpec]) -> tuple[GroupSpec, ...]:
    """Group the layers that keep something a token by equal spec, in order of first appearance."""
    members: dict[LayerSpec, list[int]] = {}
    for index, spec in enumerate(layers):
        if spec.kind in (LayerKind.ATTENTION, LayerKind.LATENT):
            members.setdefault(spec, []).append(index)
    return tuple(GroupSpec(tuple(indices), spec) for spec, indices in members.items())


def share_layers(layers: tuple[LayerSpec, ...], n: int) -> tuple[LayerSpec, ...]:
    """The specs with n neighbouring layers using the first one's cache (cross-layer attention, Brandon et al. 2024,
    arXiv 2405.12981, here on models that were not trained so). Raises IncompatiblePlan where n does not divide the
    layers, or neighbours keep different things (a window and none)."""
    if n < 1:
        raise IncompatiblePlan(f"--share-layers {n}", fixes=("use 1 or more; 1 shares nothing",))
    if n == 1:
        return layers
    if len(layers) % n:
        divisors = ", ".join(str(d) for d in range(2, len(layers) + 1) if len(layers) % d == 0)
        raise IncompatiblePlan(f"--share-layers {n} does not divide {len(layers)} layers", fixes=(f"use {divisors}",))
    for first in range(0, len(layers), n):
        run = layers[first : first + n]
        if run[0].kind is not LayerKind.ATTENTION or any(spec != run[0] for spec in run):
            raise IncompatiblePlan(
                f"--share-layers {n}: layers {first} to {first + n - 1} do not keep the same",
                fixes=("another N", "a model whose layers are alike"),
            )
    return tuple(spec if i % n == 0 else replace(spec, shares_layer=i - i % n) for i, spec in enumerate(layers))
