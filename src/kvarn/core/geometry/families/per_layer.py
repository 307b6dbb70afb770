"""Decoders whose layers differ in heads and widths: Nemotron-NAS (Llama-3.1-Nemotron), OpenELM, Laguna."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvarn.core.errors import ConfigError
from kvarn.core.geometry.attend import Heads, heads, none_slides, slides_by_config, window_of
from kvarn.core.geometry.decoder import Style, assemble, hidden_of, n_layers_of
from kvarn.core.geometry.families.moe import dense_first, routed
from kvarn.core.geometry.parts import FeedForward, ModelParts, attention, experts, gated_mlp, layer
from kvarn.core.geometry.reader import ConfigReader
from kvarn.core.specs import LayerSpec

_STYLE = Style(False, False, False)


def _multiple(value: int, of: int) -> int:
    return -(-value // of) * of


def _nas_attention(c: ConfigReader, block: dict[str, Any], query: int, dim: int) -> tuple[LayerSpec, int]:
    """One block's attention: absent, one matrix, or with n_heads_in_group queries a KV head."""
    hidden = hidden_of(c)
    if block.get("no_op"):
        return LayerSpec(), 0
    if block.get("replace_with_linear"):
        return LayerSpec(), hidden * hidden + hidden
    group = block.get("n_heads_in_group")
    if not isinstance(group, int) or group < 1 or query % group:
        raise ConfigError(f"n_heads_in_group is {group!r} for {query} heads")
    h = Heads(query, query // group, dim, dim)
    return h.spec(), attention(hidden, h.query, h.kv, dim, dim) + hidden


def _nas_ffn(c: ConfigReader, block: dict[str, Any]) -> FeedForward:
    """Width = 2/3 of ffn_mult * hidden, rounded up to 256 (DeciLM's _ffn_mult_to_intermediate_size)."""
    hidden = hidden_of(c)
    if block.get("no_op"):
        return FeedForward(0)
    if block.get("replace_with_linear"):
        return FeedForward(hidden * hidden + hidden)
    mult, width = block.get("ffn_mult"), block.get("intermediate_size")
    if not isinstance(width, int):
        if not isinstance(mult, (int, float)):
            raise ConfigError(f"a block's ffn_mult is {mult!r}")
        width = _multiple(int(2 * mult * hidden / 3), 256)
    found = gated_mlp(hidden, width)
    return FeedForward(found.parameters + hidden, width=width)


def _nemotron_nas(c: ConfigReader) -> ModelParts:
    n_layers, query = n_layers_of(c), c.size("num_attention_heads")
    dim = c.optional_size("head_dim") or hidden_of(c) // query
    blocks = c.per_layer("block_configs", n_layers)
    if blocks is None:
        return _nas_from_lists(c, n_layers, query, dim)
    layers, widest = [], FeedForward(0)
    for block in blocks:
        spec, cost = _nas_attention(c, block.get("attention") or {}, query, dim)
        ffn = _nas_ffn(c, block.get("ffn") or {})
        layers.append(layer(spec, cost, ffn, 0))
        widest = max(widest, ffn, key=lambda f: f.width)
    return assemble(c, _STYLE, tuple(layers), widest)


def _nas_from_lists(c: ConfigReader, n_layers: int, query: int, dim: int) -> ModelParts:
    """What a GGUF header says of it: heads, KV heads and width a layer, 0 where a layer has none."""
    hidden = hidden_of(c)
    kv = c.per_layer("num_key_value_heads", n_layers) or c.per_layer("num_key_value_heads_per_layer", n_layers)
    widths = c.per_layer("intermediate_size", n_layers)
    if kv is None or widths is None:
        raise ConfigError("nemotron-nas config states neither block_configs nor per-layer heads and widths")
    layers, widest = [], FeedForward(0)
    for n_kv, width in zip(kv, widths, strict=True):
        spec = Heads(query, n_kv, dim, dim).spec() if n_kv else LayerSpec()
        cost = attention(hidden, query, n_kv, dim, dim) + hidden if n_kv else 0
        ffn = gated_mlp(hidden, width) if width else FeedForward(0)
        layers.append(layer(spec, cost, ffn, hidden if width else 0))
        widest = max(widest, ffn, key=lambda f: f.width)
    return assemble(c, _STYLE, tuple(layers), widest)


def _openelm(c: ConfigReader) -> ModelParts:
    """OpenELM (arXiv:2404.14619): heads and widths grow with depth."""
    hidden, n_layers, dim = c.size("model_dim", "hidden_size"), c.layers("num_transformer_layers"), c.size("head_dim")
    query, kv = c.per_layer("num_query_heads", n_layers), c.per_layer("num_kv_heads", n_layers)
    mult, divisor = c.per_layer("ffn_multipliers", n_layers), c.size("ffn_dim_divisor", default=256)
    if query is None or kv is None or mult is None:
        raise ConfigError("openelm config states no num_query_heads, num_kv_heads or ffn_multipliers a layer")
    c.understood(("num_gqa_groups", "share_input_output_layers", "qkv_multipliers"))
    layers, widest = [], FeedForward(0)
    for n_query, n_kv, m in zip(query, kv, mult, strict=True):
        h = Heads(n_query, n_kv, dim, dim)
        ffn = gated_mlp(hidden, _round_to(m * hidden, divisor))
        norms = 2 * hidden + (2 * dim if c.flag("normalize_qk_projections", default=True) else 0)
        layers.append(layer(h.spec(), attention(hidden, n_query, n_kv, dim, dim), ffn, norms))
        widest = max(widest, ffn, key=lambda f: f.width)
    vocab = c.size("vocab_size")
    tied = c.flag("share_input_output_layers", default=True)
    return ModelParts(tuple(layers), vocab * hidden, 0 if tied else vocab * hidden, hidden, width=widest.width)


def _round_to(value: float, divisor: int) -> int:
    """To the nearest multiple, never below 90 % of the value (OpenELM's make_divisible)."""
    found = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return found + divisor if found < 0.9 * value else found


def _laguna(c: ConfigReader) -> ModelParts:
    """Laguna: query heads a layer, gated attention, one dense layer before the experts."""
    hidden, n_layers, h = hidden_of(c), n_layers_of(c), heads(c)
    per_layer = c.per_layer("num_attention_heads_per_layer", n_layers) or [h.query] * n_layers
    slides, window = slides_by_config(c, n_layers, none_slides), window_of(c)
    gating = c.get("gating", default=True)
    layers, widest = [], FeedForward(0)
    for i in range(n_layers):
        own = Heads(per_layer[i], h.kv, h.k_dim, h.v_dim)
        width = {False: 0, "per-head": 1}.get(gating, h.k_dim if gating == "per-element" else 1)
        gate = hidden * own.query * width
        cost = attention(hidden, own.query, own.kv, own.k_dim, own.v_dim) + gate + 2 * h.k_dim
        ffn = _laguna_ffn(c, i)
        layers.append(layer(own.spec(window=window if slides[i] else None), cost, ffn, 2 * hidden))
        widest = max(widest, ffn, key=lambda f: (f.n_experts, f.width))
    return assemble(c, _STYLE, tuple(layers), widest)


def _laguna_ffn(c: ConfigReader, i: int) -> FeedForward:
    hidden = hidden_of(c)
    if dense_first(c, i, default=1):
        return gated_mlp(hidden, c.size("intermediate_size"))
    shared = c.count("shared_expert_intermediate_size")
    total, active = routed(c)
    return experts(hidden, c.size("moe_intermediate_size"), total, active, shared_width=shared, extra=total)


def _step3p5(c: ConfigReader) -> ModelParts:
    """Step 3.5 and 3.7: window layers may have other query heads; gated attention; three dense layers, then experts."""
    hidden, n_layers, h = hidden_of(c), n_layers_of(c), _step_heads(c)
    n_drafts = c.drafts("num_nextn_predict_layers", "num_mtp_layers")
    kinds = (c.sequence("layer_types") or ["full_attention"] * n_layers)[:n_layers]
    other = c.sub("attention_other_setting")
    local = c.optional_size("num_sliding_attention_heads") or other.optional_size("num_attention_heads") or h.query
    local_kv = other.optional_size("num_attention_groups") or h.kv
    c.understood(("mtp_layer_types", "mtp_mlp_layer_types", "per_layer_config", "num_sliding_attention_heads"))
    window, layers = window_of(c), []
    for i, kind in enumerate(kinds):
        slides = kind == "sliding_attention"
        own = Heads(local, local_kv, h.k_dim, h.v_dim) if slides else h
        cost = attention(hidden, own.query, own.kv, own.k_dim, own.v_dim) + hidden * own.query + 2 * own.k_dim
        layers.append(layer(own.spec(window=window if slides else None), cost, _step_ffn(c, i), 2 * hidden))
    parts = assemble(
        c, _STYLE, tuple(layers), max((_step_ffn(c, i) for i in range(n_layers)), key=lambda f: f.n_experts)
    )
    return replace(parts, drafts=parts.layers[-1:] * n_drafts)


def _step_heads(c: ConfigReader) -> Heads:
    query, dim = c.size("num_attention_heads"), c.size("head_dim", default=128)
    kv = c.size("num_key_value_heads", "num_attention_groups", default=query)
    return Heads(query, kv, dim, dim)


def _step_ffn(c: ConfigReader, i: int) -> FeedForward:
    hidden, kinds, listed = hidden_of(c), c.sequence("mlp_layer_types"), c.get("moe_layers_enum")
    if listed is not None:
        sparse = i in {int(n) for n in (listed.split(",") if isinstance(listed, str) else listed)}
    else:
        sparse = kinds[i] == "sparse" if kinds else i >= c.count("first_k_dense_replace", default=3)
    if not sparse:
        return gated_mlp(hidden, c.size("intermediate_size"))
    total = c.size("n_routed_experts", "moe_num_experts", "num_experts")
    active = c.size("num_experts_per_tok", "moe_top_k")
    shared = c.count("share_expert_dim", "share_expert_dims")
    return experts(hidden, c.size("moe_intermediate_size"), total, active, shared_width=shared)


FAMILY = {"step3p5": _step3p5, "nemotron-nas": _nemotron_nas, "openelm": _openelm, "laguna": _laguna}
