"""A model's geometry: everything that sizes its memory and its work, read from a config and never from weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvarn.core.specs import GroupSpec, LayerSpec, cache_groups


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Numbers of parameters (elements, not bytes).

    embedding: the input table(s). output: the language-model head, 0 where it is the input table (tied).
    layers: all decoder layers without routed experts, final norm included. experts: all routed experts.
    active_experts: of those, what one token passes through. drafts: next-token-prediction (MTP) layers.
    """

    embedding: int
    output: int
    layers: int
    experts: int = 0
    active_experts: int = 0
    drafts: int = 0

    @property
    def total(self) -> int:
        """Everything that is loaded to generate text without drafting."""
        return self.embedding + self.output + self.layers + self.experts

    @property
    def active(self) -> int:
        """What one token passes through, the embedding table and the head included."""
        return self.embedding + self.output + self.layers + self.active_experts


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """What `geometry_of` found.

    layers: one spec a decoder layer, in order. max_context: tokens the model was trained for, None if unstated.
    dtype: of the weights as published. notes: what was assumed or flagged while reading, in words. provenance: where
    the figures came from. drafts: specs of next-token-prediction (MTP) layers, which hold a cache only where drafting
    is on. parameters: None where the config does not say enough to count them. intermediate_size: width of the widest
    feed-forward activation of a token (active experts together). experts, experts_active: routed, of one layer.
    weight_format: how the published weights are quantized ('fp8', 'int4', 'mxfp4', ...), '' where they are of `dtype`.
    weight_bytes: exact bytes by stored type, where a header or index states them. unknown_keys: config keys that look
    like cache geometry and were not understood: results are then not to be trusted blindly.
    """

    architecture: str
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    vocab_size: int
    max_context: int | None = None
    dtype: str = "bfloat16"
    name: str = ""
    provenance: str = ""
    notes: tuple[str, ...] = field(default=())
    drafts: tuple[LayerSpec, ...] = ()
    parameters: ParameterCount | None = None
    tied_embeddings: bool = False
    intermediate_size: int = 0
    experts: int = 0
    experts_active: int = 0
    weight_format: str = ""
    weight_bytes: tuple[tuple[str, int], ...] = ()
    unknown_keys: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        return cache_groups(self.layers)

    @property
    def stored_weight_bytes(self) -> int | None:
        """Exact bytes of the weights as stored, or None where no header or index was read."""
        return sum(nbytes for _, nbytes in self.weight_bytes) if self.weight_bytes else None
