"""Layers that read another layer's cache (Gemma 3n and 4, Hunyuan's cross-layer attention), and layers that read an
image's (Llama 3.2 Vision)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvarn.core.errors import ConfigError
from kvarn.core.geometry.attend import Heads, every, heads, none_slides, slides_by_config, window_of
from kvarn.core.geometry.decoder import Style, assemble, hidden_of, n_layers_of
from kvarn.core.geometry.families.moe import routed
from kvarn.core.geometry.parts import FeedForward, LayerPart, ModelParts, experts, gated_mlp, layer, linear
from kvarn.core.geometry.reader import ConfigReader
from kvarn.core.specs import LayerSpec

_STYLE = Style(False, False, False, tied=True)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A layer's heads, whether it slides, and the layer whose cache it reads instead of its own."""

    heads: Heads
    slides: bool
    shares: int | None

    def spec(self, window: int | None) -> LayerSpec:
        return replace(self.heads.spec(window=window if self.slides else None), shares_layer=self.shares)


def _share_last(slides: list[bool], n_shared: int) -> list[int | None]:
    """The last n_shared layers read the last earlier layer of their own kind (Gemma3nTextConfig.kv_sharing_modes)."""
    first = len(slides) - n_shared
    if n_shared < 0 or first < 1:
        raise ConfigError(f"num_kv_shared_layers is {n_shared} of {len(slides)} layers; at least one must store")
    found: list[int | None] = [None] * first
    for i in range(first, len(slides)):
        source = next((j for j in reversed(range(first)) if slides[j] == slides[i]), None)
        if source is None:
            raise ConfigError(f"layer {i} shares a cache, but no layer of its kind stores one")
        found.append(source)
    return found


def _projections(hidden: int, plan: _Plan, *, v_from_k: bool = False) -> int:
    """Projections and head norms; a sharing layer has only queries and output."""
    h = plan.heads
    own = 0
    if plan.shares is None:
        own = hidden * h.kv * (h.k_dim + (0 if v_from_k else h.v_dim)) + h.k_dim
    return 2 * hidden * h.query * h.k_dim + h.k_dim + own


def _gemma3n(c: ConfigReader) -> ModelParts:
    hidden, n_layers, h = hidden_of(c), n_layers_of(c), heads(c)
    slides = slides_by_config(c, n_layers, every(5))
    shares = _share_last(slides, c.count("num_kv_shared_layers"))
    listed = isinstance(c.get("intermediate_size"), list)
    widths = c.per_layer("intermediate_size", n_layers) if listed else None
    widths = widths or [c.size("intermediate_size")] * n_layers
    per_layer, inputs = c.size("hidden_size_per_layer_input"), c.size("altup_num_inputs")
    rank, window = c.size("laurel_rank"), window_of(c)
    altup = 2 * hidden + inputs * hidden + inputs * inputs + inputs**3
    extra = altup + 2 * hidden * rank + hidden + 2 * hidden * per_layer + hidden
    layers = []
    for i in range(n_layers):
        plan = _Plan(h, slides[i], shares[i])
        mixer = _projections(hidden, plan) + extra
        layers.append(layer(plan.spec(window), mixer, gated_mlp(hidden, widths[i]), 4 * hidden))
    parts = assemble(c, _STYLE, tuple(layers), gated_mlp(hidden, max(widths)))
    table = c.size("vocab_size_per_layer_input") * n_layers * per_layer
    other = hidden * n_layers * per_layer + per_layer + 2 * (inputs - 1) * hidden * hidden
    return replace(parts, embedding=parts.embedding + table, other=parts.other + other)


def _gemma4(c: ConfigReader) -> ModelParts:
    """Full layers have heads of their own, and where attention_k_eq_v is set no value projection: V is then another
    norm of the same projection, and stored beside K."""
    hidden, n_layers, local = hidden_of(c), n_layers_of(c), heads(c)
    slides = slides_by_config(c, n_layers, every(6))
    slides[-1] = False  # Gemma4TextConfig: the last layer always sees everything
    equal, full = c.flag("attention_k_eq_v"), _gemma4_full(c, local)
    shares = _share_last(slides, c.count("num_kv_shared_layers"))
    double, window = c.flag("use_double_wide_mlp"), window_of(c)
    per_layer = c.count("hidden_size_per_layer_input")
    layers, widest = [], FeedForward(0)
    for i in range(n_layers):
        plan = _Plan(local if slides[i] else full, slides[i], shares[i])
        width = c.size("intermediate_size") * (2 if double and shares[i] is not None else 1)
        ffn = _gemma4_ffn(c, hidden, width)
        mixer = _projections(hidden, plan, v_from_k=equal and not slides[i])
        mixer += 2 * hidden * per_layer + hidden if per_layer else 0
        layers.append(layer(plan.spec(window), mixer, ffn, 4 * hidden))
        widest = max(widest, ffn, key=lambda f: f.width)
    return _gemma4_tables(c, assemble(c, _STYLE, tuple(layers), widest), per_layer)


def _gemma4_full(c: ConfigReader, local: Heads) -> Heads:
    """Heads of the layers that see everything; older files say global_head_dim, newer ones per_layer_config."""
    dim = c.optional_size("global_head_dim")
    kv = c.optional_size("num_global_key_value_heads") if c.flag("attention_k_eq_v") else None
    c.understood(("num_global_key_value_heads",))
    stated = c.get("per_layer_config")
    if isinstance(stated, dict) and stated:
        first = next(iter(stated.values()))
        dim, kv = dim or first.get("head_dim"), kv or first.get("num_key_value_heads")
    dim = dim or 512  # the class default of Gemma4TextConfig
    return Heads(local.query, kv or local.kv, dim, dim)


def _gemma4_ffn(c: ConfigReader, hidden: int, width: int) -> FeedForward:
    dense = gated_mlp(hidden, width)
    if not c.flag("enable_moe_block"):
        return dense
    total, active = routed(c)
    moe = experts(hidden, c.size("moe_intermediate_size"), total, active)
    fixed = moe.parameters + hidden + total + dense.parameters + 3 * hidden
    return replace(moe, parameters=fixed, width=moe.width + width)


def _gemma4_tables(c: ConfigReader, parts: ModelParts, per_layer: int) -> ModelParts:
    """Per-layer embeddings (the E2B and E4B sizes): a table as wide as all layers together."""
    if not per_layer:
        return parts
    wide = per_layer * len(parts.layers)
    table = c.size("vocab_size_per_layer_input") * wide
    return replace(parts, embedding=parts.embedding + table, other=parts.other + hidden_of(c) * wide + per_layer)


def _hunyuan(c: ConfigReader) -> ModelParts:
    """Hunyuan-Large (arXiv:2411.02265): cross-layer attention, cla_share_factor layers on one cache; experts of the
    full width."""
    hidden, n_layers = hidden_of(c), n_layers_of(c)
    h, factor = heads(c), c.size("cla_share_factor", default=1) if c.flag("use_cla") else 1
    c.understood(("cla_share_factor",))
    total, active = routed(c)
    width = c.size("intermediate_size")
    ffn = experts(hidden, width, total, active, shared_width=c.count("num_shared_expert") * width)
    if total == 1:
        ffn = gated_mlp(hidden, width)
    layers = []
    for i in range(n_layers):
        shares = None if i % factor == 0 else i - i % factor
        plan = _Plan(h, False, shares)
        layers.append(layer(plan.spec(None), _projections(hidden, plan), ffn, 2 * hidden))
    return assemble(c, replace(_STYLE, tied=False), tuple(layers), ffn)


def _mllama(c: ConfigReader) -> ModelParts:
    """Llama 3.2 Vision: some layers attend the image instead of the text; their cache grows with images, not tokens."""
    hidden, n_layers, h = hidden_of(c), n_layers_of(c), heads(c)
    cross = set(c.sequence("cross_attention_layers") or (3, 8, 13, 18, 23, 28, 33, 38))
    ffn = gated_mlp(hidden, c.size("intermediate_size"))
    cost = linear(hidden, h.query * h.k_dim) * 2 + linear(hidden, 2 * h.kv * h.k_dim)
    text = layer(h.spec(), cost, ffn, 2 * hidden)
    image = LayerPart(LayerSpec(query_heads=h.query), cost + ffn.parameters + 2 * hidden + 2 * h.k_dim + 2)
    c.note(f"{len(cross)} cross-attention layers keep an image's keys and values, which are not counted")
    slides_by_config(c, n_layers, none_slides)
    parts = assemble(c, replace(_STYLE, tied=False), tuple(image if i in cross else text for i in range(n_layers)), ffn)
    return replace(parts, embedding=parts.embedding + 8 * hidden)


FAMILY = {
    "gemma3n_text": _gemma3n,
    "gemma4_text": _gemma4,
    "hunyuan": _hunyuan,
    "mllama_text_model": _mllama,
}
