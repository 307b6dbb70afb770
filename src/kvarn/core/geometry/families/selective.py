"""Ordinary KV heads with a sparse indexer's keys beside them: MiniMax-M3."""

from __future__ import annotations

from dataclasses import replace

from kvarn.core.errors import ConfigError
from kvarn.core.geometry.attend import heads
from kvarn.core.geometry.decoder import Style, assemble, attention_parameters, hidden_of, n_layers_of
from kvarn.core.geometry.families.moe import routed, with_drafts
from kvarn.core.geometry.parts import FeedForward, ModelParts, experts, gated_mlp, layer
from kvarn.core.geometry.reader import ConfigReader

_STYLE = Style(False, False, False, qk_norm="head")
_SPARSE = "minimax_m3_sparse"


def _selects(c: ConfigReader, n_layers: int) -> list[bool]:
    """Which layers select blocks: layer_types, or sparse_attention_freq of the published config."""
    kinds = c.per_layer("layer_types", n_layers)
    if kinds is not None:
        if strange := sorted({str(k) for k in kinds} - {_SPARSE, "full_attention"}):
            raise ConfigError(f"layer_types holds {', '.join(strange)}, which minimax_m3 does not know")
        return [k == _SPARSE for k in kinds]
    flags = c.sub("sparse_attention_config").per_layer("sparse_attention_freq", n_layers)
    return [bool(f) for f in flags] if flags else [False] * n_layers


def _ffn(c: ConfigReader, i: int) -> FeedForward:
    hidden, n_layers = hidden_of(c), n_layers_of(c)
    kinds, flags = c.per_layer("mlp_layer_types", n_layers), c.per_layer("moe_layer_freq", n_layers)
    dense = kinds[i] == "dense" if kinds else flags is not None and not flags[i]
    if dense:
        return gated_mlp(hidden, c.size("dense_intermediate_size"))
    shared = c.count("shared_intermediate_size")
    return experts(hidden, c.size("moe_intermediate_size", "intermediate_size"), *routed(c), shared_width=shared)


def _minimax_m3(c: ConfigReader) -> ModelParts:
    """A selecting layer stores one index key a token beside its KV heads (transformers' MiniMaxM3VLIndexer)."""
    hidden, n_layers, h = hidden_of(c), n_layers_of(c), heads(c)
    selects, sub = _selects(c, n_layers), c.sub("sparse_attention_config")
    dim = sub.optional_size("sparse_index_dim") or c.size("index_head_dim", default=128)
    n_index = sub.optional_size("sparse_num_index_heads") or c.size("index_n_heads", default=4)
    c.understood(("index_block_size", "index_topk_blocks", "index_local_blocks", "first_k_dense_replace"))
    c.understood(("num_mtp_modules", "qk_norm_type"))
    cost, indexer = attention_parameters(c, _STYLE, h), hidden * dim * (n_index + 1) + 2 * dim
    layers = tuple(
        layer(
            replace(h.spec(), index_dim=dim if selected else 0),
            cost + (indexer if selected else 0),
            _ffn(c, i),
            2 * hidden,
        )
        for i, selected in enumerate(selects)
    )
    return with_drafts(c, assemble(c, replace(_STYLE, ffn=_ffn), layers))


FAMILY = {"minimax_m3": _minimax_m3, "minimax_m3_vl_text": _minimax_m3}
