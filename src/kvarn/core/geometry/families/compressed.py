"""DeepSeek-V4: one shared key-and-value head in a short window, and compressed entries of everything before it."""

from __future__ import annotations

from dataclasses import replace

from kvarn.core.errors import ConfigError
from kvarn.core.geometry.decoder import Style, assemble, hidden_of, n_layers_of
from kvarn.core.geometry.families.moe import routed, with_drafts
from kvarn.core.geometry.parts import FeedForward, ModelParts, experts, layer
from kvarn.core.geometry.reader import ConfigReader
from kvarn.core.specs import LayerSpec

_SPARSE, _HEAVY, _WINDOW = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
_RATIO_KIND = {0: _WINDOW, 4: _SPARSE, 128: _HEAVY}
_STYLE = Style(False, False, False)


def _kinds(c: ConfigReader, n_layers: int) -> list[str]:
    """layer_types, or compress_ratios (0, 4 or 128 a layer), or the default of DeepseekV4Config."""
    stated = c.sequence("layer_types")
    ratios = c.sequence("compress_ratios")
    if stated is None and ratios is not None:
        if strange := sorted({r for r in ratios if r not in _RATIO_KIND}):
            raise ConfigError(f"compress_ratios holds {strange}; {sorted(_RATIO_KIND)} are known")
        stated = [_RATIO_KIND[r] for r in ratios]
    if stated is None:
        stated = [_HEAVY] * min(n_layers, 2) + [_SPARSE if i % 2 else _HEAVY for i in range(max(n_layers - 2, 0))]
    if len(stated) < n_layers or any(k not in _RATIO_KIND.values() for k in stated):
        raise ConfigError(f"{len(stated)} layer types for {n_layers} layers, or unknown ones among them")
    return stated[:n_layers]


def _spec(c: ConfigReader, kind: str) -> LayerSpec:
    """K and V are one vector of head_dim a token, kept for the window; a compressed vector of the same size stays for
    every 4 or 128 tokens, in sparse layers with an indexer key."""
    dim = c.size("head_dim")
    spec = LayerSpec(
        query_heads=c.size("num_attention_heads"),
        k_dim=dim,
        v_dim=dim,
        latent_dim=dim,
        window_tokens=c.size("sliding_window"),
    )
    if kind == _WINDOW:
        return spec
    rates = c.get("compress_rates") or {}
    rate = rates.get(kind, 4 if kind == _SPARSE else 128)
    extra = c.size("index_head_dim") if kind == _SPARSE else 0
    return replace(spec, compressed_dim=dim + extra, compress_tokens=rate)


def _parameters(c: ConfigReader, kind: str) -> int:
    hidden, n_heads, dim, rank = hidden_of(c), c.size("num_attention_heads"), c.size("head_dim"), c.size("q_lora_rank")
    groups, o_rank = c.size("o_groups"), c.size("o_lora_rank")
    cost = n_heads + hidden * rank + rank + rank * n_heads * dim + hidden * dim + dim
    cost += n_heads * dim * o_rank + groups * o_rank * hidden
    if kind == _HEAVY:
        cost += 2 * hidden * dim + dim + 128 * dim
    if kind == _SPARSE:
        index, index_heads = c.size("index_head_dim"), c.size("index_n_heads")
        cost += 2 * hidden * 2 * dim + dim + 4 * 2 * dim
        cost += 2 * hidden * 2 * index + index + 4 * 2 * index + rank * index_heads * index + hidden * index_heads
    return cost


def _hyper(c: ConfigReader) -> int:
    """Hyper-connections around attention and experts: a projection of hc_mult hidden states to their mixing weights."""
    n, hidden = c.size("hc_mult"), hidden_of(c)
    mixes = n * n + 2 * n
    return 2 * (mixes * n * hidden + mixes + 3)


def _ffn(c: ConfigReader, _: int) -> FeedForward:
    width = c.size("moe_intermediate_size", "intermediate_size")
    return experts(hidden_of(c), width, *routed(c), shared_width=c.count("n_shared_experts") * width)


def _deepseek_v4(c: ConfigReader) -> ModelParts:
    hidden, kinds = hidden_of(c), _kinds(c, n_layers_of(c))
    c.understood(("qk_rope_head_dim", "num_key_value_heads", "compress_ratios", "index_topk", "num_hash_layers"))
    parts = {
        kind: layer(_spec(c, kind), _parameters(c, kind) + _hyper(c), _ffn(c, 0), 2 * hidden) for kind in set(kinds)
    }
    n = c.size("hc_mult")
    found = assemble(c, _STYLE, tuple(parts[kind] for kind in kinds), _ffn(c, 0))
    found = replace(found, other=found.other + n * n * hidden + n + 1)
    return with_drafts(c, found)


FAMILY = {"deepseek_v4": _deepseek_v4}
