"""Multi-head latent attention: one latent vector and one rope key a token, whatever the heads (DeepSeek-V2,
arXiv:2405.04434, section 2.1), and the sparse indexer's keys beside them (DeepSeek-V3.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvarn.core.geometry.decoder import Style, assemble, hidden_of, n_layers_of
from kvarn.core.geometry.families.moe import deepseek_moe, routed, with_drafts
from kvarn.core.geometry.parts import FeedForward, LayerPart, ModelParts, gated_mlp, layer, linear
from kvarn.core.geometry.reader import ConfigReader
from kvarn.core.specs import LayerSpec

_STYLE = Style(False, False, False)


def mla_spec(c: ConfigReader, *, index_dim: int = 0) -> LayerSpec:
    """Stored a token: kv_lora_rank + qk_rope_head_dim numbers, and the indexer's key. k_dim and v_dim are the head
    dims of the expanded form (for FLOPs); nothing of them is stored."""
    nope, rope = c.size("qk_nope_head_dim"), c.size("qk_rope_head_dim")
    c.understood(("num_key_value_heads", "head_dim", "qk_head_dim", "index_topk", "layer_types"))
    return LayerSpec(
        query_heads=c.size("num_attention_heads"),
        k_dim=nope + rope,
        v_dim=c.size("v_head_dim", default=hidden_of(c) // c.size("num_attention_heads")),
        latent_dim=c.size("kv_lora_rank"),
        rope_dim=rope,
        index_dim=index_dim,
    )


def mla_parameters(c: ConfigReader, spec: LayerSpec) -> int:
    """Down- and up-projections of queries and of keys and values, their norms, and the output projection."""
    hidden, heads = hidden_of(c), spec.query_heads
    q_rank, bias = c.count("q_lora_rank"), c.flag("attention_bias")
    k_width, v_width = heads * spec.k_dim, heads * spec.v_dim
    query = linear(hidden, q_rank, bias) + q_rank + q_rank * k_width if q_rank else linear(hidden, k_width)
    latent = linear(hidden, spec.latent_dim + spec.rope_dim, bias) + spec.latent_dim
    expand = spec.latent_dim * heads * (spec.k_dim - spec.rope_dim + spec.v_dim)
    return query + latent + expand + linear(v_width, hidden, bias)


def indexer_parameters(c: ConfigReader) -> int:
    """The lightning indexer of DeepSeek-V3.2: query heads from the query latent, one key, weights, a key norm."""
    hidden, dim, n_heads = hidden_of(c), c.size("index_head_dim"), c.size("index_n_heads")
    return c.size("q_lora_rank") * n_heads * dim + hidden * dim + 2 * dim + hidden * n_heads


def _dense(c: ConfigReader, _: int) -> FeedForward:
    return gated_mlp(hidden_of(c), c.size("intermediate_size"))


def _assemble(c: ConfigReader, layers: list[LayerPart], ffn: Callable[[ConfigReader, int], FeedForward]) -> ModelParts:
    return assemble(c, replace(_STYLE, ffn=ffn), tuple(layers))


def _mla(
    c: ConfigReader, ffn: Callable[[ConfigReader, int], FeedForward], *, drafts: bool = False, tied: bool = False
) -> ModelParts:
    spec, hidden = mla_spec(c), hidden_of(c)
    mixer = mla_parameters(c, spec)
    layers = [layer(spec, mixer, ffn(c, i), 2 * hidden) for i in range(n_layers_of(c))]
    parts = assemble(c, replace(_STYLE, ffn=ffn, tied=tied), tuple(layers))
    return with_drafts(c, parts) if drafts else parts


def _sparse(c: ConfigReader) -> ModelParts:
    """DeepSeek-V3.2, GLM-5: latent attention over what an indexer selects. A layer that runs the indexer stores its
    key; a 'shared' one reuses the last selection and stores none."""
    hidden, n_layers = hidden_of(c), n_layers_of(c)
    full = mla_spec(c, index_dim=c.size("index_head_dim"))
    shared = replace(full, index_dim=0)
    base, ffn = mla_parameters(c, full), partial(deepseek_moe, default_dense=3)
    layers = []
    for i, runs in enumerate(_indexers(c, n_layers)):
        mixer = base + (indexer_parameters(c) if runs else 0)
        layers.append(layer(full if runs else shared, mixer, ffn(c, i), 2 * hidden))
    return with_drafts(c, _assemble(c, layers, ffn))


def _indexers(c: ConfigReader, n_layers: int) -> list[bool]:
    """Which layers run the indexer: indexer_types, a pattern of F and S, or a frequency with an offset."""
    types = c.per_layer("indexer_types", n_layers)
    c.understood(("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"))
    pattern = c.get("index_topk_pattern")
    if types is None and isinstance(pattern, (str, list)):
        types = list(pattern)[:n_layers]
    if types is not None:
        return [t in ("full", "F") for t in types]
    every, offset = c.size("index_topk_freq", default=1), c.count("index_skip_topk_offset", default=2)
    return [max(i - offset + 1, 0) % every == 0 for i in range(n_layers)]


def _longcat(c: ConfigReader) -> ModelParts:
    """LongCat-Flash: a layer holds two attentions and two dense parts around one mixture of experts."""
    hidden, n_layers = hidden_of(c), c.layers("num_layers", "num_hidden_layers")
    spec = mla_spec(c)
    mixer, dense = mla_parameters(c, spec), gated_mlp(hidden, c.size("ffn_hidden_size"))
    total, active = routed(c)
    zero = c.count("zero_expert_num")
    one = gated_mlp(hidden, c.size("expert_ffn_hidden_size"))
    router = linear(hidden, total + zero)
    with_moe = FeedForward(
        dense.parameters + router, total * one.parameters, active * one.parameters, dense.width, total, active
    )
    pair = (layer(spec, mixer, with_moe, 2 * hidden), layer(spec, mixer, dense, 2 * hidden))
    c.note("LongCat: a published layer counts as two here, because it holds two attention caches")
    return assemble(c, _STYLE, pair * n_layers, with_moe)


FAMILY = {
    "deepseek_v2": partial(_mla, ffn=deepseek_moe),
    "deepseek_v3": partial(_mla, ffn=partial(deepseek_moe, default_dense=3), drafts=True),
    "glm4_moe_lite": partial(_mla, ffn=partial(deepseek_moe, default_dense=1), drafts=True),
    "minicpm3": partial(_mla, ffn=_dense, tied=True),
    "youtu": partial(_mla, ffn=_dense),
    "deepseek_v32": _sparse,
    "glm_moe_dsa": _sparse,
    "longcat_flash": _longcat,
}
