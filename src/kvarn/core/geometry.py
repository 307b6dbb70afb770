"""A model's geometry: everything that sizes its memory and its work, read from a config and never from weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvarn.core.specs import GroupSpec, LayerSpec, cache_groups


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """layers: one spec a decoder layer, in order. max_context: tokens the model was trained for, None if unstated.
    notes: what was assumed or flagged while reading, in words. provenance: where the figures came from."""

    architecture: str
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    vocab_size: int
    max_context: int | None = None
    dtype: str = "bfloat16"
    name: str = ""
    provenance: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        return cache_groups(self.layers)
