"""Mixtures of experts over ordinary attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvarn.core.errors import ConfigError
from kvarn.core.geometry.attend import Heads, all_slide, every, heads, window_of
from kvarn.core.geometry.decoder import (
    Style,
    assemble,
    attention_parameters,
    decoder,
    decoder_layers,
    hidden_of,
    n_layers_of,
    norm_size,
)
from kvarn.core.geometry.parts import FeedForward, ModelParts, experts, gated_mlp, layer
from kvarn.core.geometry.reader import ConfigReader
from kvarn.core.specs import LayerSpec

_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_TOTAL = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def routed(c: ConfigReader) -> tuple[int, int]:
    """Experts of a layer, and how many of them a token passes through."""
    total, active = c.size(*_TOTAL), c.get(*_PER_TOKEN)
    if isinstance(active, list) and active:
        active = max(active)
    if not isinstance(active, int) or not 0 < active <= total:
        raise ConfigError(f"{active!r} of {total} experts a token")
    return total, active


def dense_first(c: ConfigReader, i: int, default: int = 0) -> bool:
    """Whether layer i is dense: mlp_layer_types where stated, else the first first_k_dense_replace layers."""
    kinds = c.per_layer("mlp_layer_types", n_layers_of(c))
    if kinds is not None:
        return kinds[i] == "dense"
    return i < c.count("first_k_dense_replace", "num_dense_layers", default=default)


def _mixtral(c: ConfigReader, _: int) -> FeedForward:
    return experts(hidden_of(c), c.size("intermediate_size"), *routed(c))


def _qwen_sparse(c: ConfigReader, i: int) -> bool:
    step = c.size("decoder_sparse_step", default=1)
    return i not in (c.sequence("mlp_only_layers") or []) and (i + 1) % step == 0


def qwen_moe(c: ConfigReader, i: int) -> FeedForward:
    """Qwen's experts with one gated shared expert, where it has one."""
    hidden = hidden_of(c)
    if not _qwen_sparse(c, i):
        return gated_mlp(hidden, c.size("intermediate_size"))
    shared = c.count("shared_expert_intermediate_size")
    gate = hidden if shared else 0
    return experts(hidden, c.size("moe_intermediate_size"), *routed(c), shared_width=shared, extra=gate)


def _granite(c: ConfigReader, _: int) -> FeedForward:
    shared = c.count("shared_intermediate_size") if c.model_type != "granitemoe" else 0
    return experts(hidden_of(c), c.size("intermediate_size"), *routed(c), shared_width=shared)


def _gpt_oss(c: ConfigReader, _: int) -> FeedForward:
    return experts(hidden_of(c), c.size("intermediate_size"), *routed(c), router_bias=True, bias=True)


def deepseek_moe(c: ConfigReader, i: int, default_dense: int = 0) -> FeedForward:
    """Fine-grained experts beside shared ones, after some dense layers (DeepSeek, GLM-4.5, dots, Kimi)."""
    hidden = hidden_of(c)
    if dense_first(c, i, default_dense):
        return gated_mlp(hidden, c.size("intermediate_size"))
    width = c.size("moe_intermediate_size")
    n_shared = c.count("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    return experts(hidden, width, *routed(c), shared_width=n_shared * width)


def _minimax_m2(c: ConfigReader, _: int) -> FeedForward:
    return experts(hidden_of(c), c.size("intermediate_size"), *routed(c))


def minimax_m2(c: ConfigReader) -> ModelParts:
    """MiniMax-M2: attn_type_list is all ones (full attention); drafting modules hold mtp_transformer_layers each."""
    kinds = c.per_layer("attn_type_list", n_layers_of(c))
    if kinds and any(kind != 1 for kind in kinds):
        raise ConfigError(f"attn_type_list holds {sorted(set(kinds))}; minimax_m2 knows only 1, full attention")
    parts = decoder(c, Style(False, False, qk_norm="full", ffn=_minimax_m2))
    modules = c.drafts("num_mtp_modules") * c.drafts("mtp_transformer_layers", default=1) if c.flag("use_mtp") else 0
    c.understood(("num_mtp_modules", "mtp_transformer_layers", "qk_norm_type"))
    return replace(parts, drafts=parts.layers[-1:] * modules)


def _hunyuan(c: ConfigReader, _: int) -> FeedForward:
    width = c.size("moe_intermediate_size") if isinstance(c.stated("moe_intermediate_size"), int) else None
    dense = c.size("intermediate_size")
    return experts(hidden_of(c), width or dense, *routed(c), shared_width=dense)


def _ernie(c: ConfigReader, i: int) -> FeedForward:
    hidden, last = hidden_of(c), c.get("moe_layer_end_index", default=-1)
    last = n_layers_of(c) - 1 if last == -1 else last
    start, step = c.count("moe_layer_start_index"), c.size("moe_layer_interval", default=1)
    if not (start <= i <= last and (i + 1) % step == 0):
        return gated_mlp(hidden, c.size("intermediate_size"), bias=c.flag("use_bias"))
    width = c.size("moe_intermediate_size")
    shared, (total, active) = c.count("moe_num_shared_experts"), routed(c)
    return experts(hidden, width, total, active, shared_width=shared * width, extra=total)


def _llama4(c: ConfigReader, i: int) -> FeedForward:
    hidden, stated = hidden_of(c), c.sequence("moe_layers")
    step = c.size("interleave_moe_layer_step", default=1)
    if not (i in stated if stated is not None else i % step == step - 1):
        return gated_mlp(hidden, c.size("intermediate_size_mlp"))
    width = c.size("intermediate_size")
    return experts(hidden, width, *routed(c), shared_width=width)


def llama4(c: ConfigReader) -> ModelParts:
    """Three of four layers see only their own chunk (and rotate); every fourth sees everything (NoPE)."""
    n_layers, h, chunk = n_layers_of(c), heads(c), c.optional_size("attention_chunk_size")
    rotates = c.sequence("no_rope_layers") or None
    interval = c.size("no_rope_layer_interval", default=4)
    kinds = c.per_layer("layer_types", n_layers)
    specs: list[LayerSpec] = []
    for i in range(n_layers):
        local = bool(rotates[i]) if rotates and i < len(rotates) else (i + 1) % interval != 0
        if kinds is not None:
            local = kinds[i] == "chunked_attention"
        specs.append(h.spec(chunk=chunk if local else None))
    style = Style(ffn=_llama4)
    return assemble(c, style, decoder_layers(c, style, specs, h))


def _afmoe(c: ConfigReader) -> ModelParts:
    """Trinity: gated attention, sliding but for every fourth layer, dense first."""
    style = Style(
        norms=4,
        qk_norm="head",
        slides=every(c.size("global_attn_every_n_layers", default=4)),
        ffn=_afmoe_ffn,
        extra_per_layer=lambda reader, h: hidden_of(reader) * h.query * h.k_dim,
    )
    return decoder(c, style)


def _afmoe_ffn(c: ConfigReader, i: int) -> FeedForward:
    found = deepseek_moe(c, i, default_dense=1)
    bias = found.n_experts
    return FeedForward(
        found.parameters + bias, found.experts, found.active_experts, found.width, found.n_experts, found.n_active
    )


def mimo(c: ConfigReader) -> ModelParts:
    """MiMo-V2: window layers have sinks and KV heads of their own (twice as many where unstated: transformers'
    MiMoV2FlashAttention), keys are wider than values."""
    n_layers, full = n_layers_of(c), heads(c)
    local = Heads(
        c.optional_size("swa_num_attention_heads") or full.query,
        c.optional_size("swa_num_key_value_heads") or 2 * full.kv,
        c.optional_size("swa_head_dim") or full.k_dim,
        c.optional_size("swa_v_head_dim") or full.v_dim,
    )
    slides = _mimo_slides(c, n_layers)
    stated = c.stated("sliding_window_size")
    c.understood(("sliding_window", "attention_chunk_size", "swa_rope_theta", "add_swa_attention_sink_bias"))
    window = stated + 1 if isinstance(stated, int) else window_of(c)
    layers = []
    for i, slid in enumerate(slides):
        h = local if slid else full
        spec = h.spec(window=window if slid else None)
        sinks = h.query if slid else 0
        mixer = attention_parameters(c, _MIMO, h) + sinks
        layers.append(layer(spec, mixer, deepseek_moe(c, i, default_dense=1), 2 * norm_size(c, _MIMO)))
    return assemble(c, _MIMO, tuple(layers))


def _mimo_slides(c: ConfigReader, n_layers: int) -> list[bool]:
    if (pattern := c.per_layer("hybrid_layer_pattern", n_layers)) is not None:
        return [bool(p) for p in pattern]
    kinds = c.per_layer("layer_types", n_layers)
    if kinds is not None:
        return [k == "sliding_attention" for k in kinds]
    return [not (i == 0 or (i + 1) % 6 == 0) for i in range(n_layers)]


def dbrx(c: ConfigReader) -> ModelParts:
    """DBRX keeps its attention and experts in configs of their own."""
    hidden, query = c.size("d_model"), c.size("n_heads")
    attn, ffn = c.sub("attn_config"), c.sub("ffn_config")
    kv = attn.size("kv_n_heads", default=1)
    h = Heads(query, kv, hidden // query, hidden // query)
    style = Style(
        qkv_bias=False,
        o_bias=False,
        norms=2,
        ffn=lambda _, __: experts(
            hidden,
            ffn.size("ffn_hidden_size", default=3584),
            ffn.size("moe_num_experts", default=4),
            ffn.size("moe_top_k", default=1),
        ),
    )
    specs = [h.spec()] * c.layers("n_layers")
    return assemble(c, style, decoder_layers(c, style, specs, h))


_MIMO = Style("attention_bias", False, ffn=lambda c, i: deepseek_moe(c, i, default_dense=1))
_FFN: dict[str, tuple[Style, Callable[[ConfigReader, int], FeedForward]]] = {
    "mixtral": (Style(False, False, slides=all_slide), _mixtral),
    "qwen2_moe": (Style(True, False), qwen_moe),
    "qwen3_moe": (Style(qk_norm="head", slides=all_slide), qwen_moe),
    "qwen3_vl_moe_text": (Style(qk_norm="head"), qwen_moe),
    "olmoe": (Style(qk_norm="full"), _mixtral),
    "flex_olmo": (Style(qk_norm="full"), _mixtral),
    "phimoe": (Style(norm_bias=True, head_bias="lm_head_bias", slides=all_slide), _mixtral),
    "granitemoe": (Style(), _granite),
    "granitemoeshared": (Style(), _granite),
    "gpt_oss": (Style(slides=every(2), extra_per_layer=lambda _, h: h.query), _gpt_oss),
    "dots1": (Style(qk_norm="head"), deepseek_moe),
    "solar_open": (Style(False, False), deepseek_moe),
    "exaone_moe": (Style(False, False, qk_norm="head", slides=every(4)), partial(deepseek_moe, default_dense=1)),
    "hunyuan_v1_moe": (Style(qk_norm="head"), _hunyuan),
    "ernie4_5_moe": (Style("use_bias", "use_bias"), _ernie),
    "hy_v3": (Style(qk_norm="head"), partial(deepseek_moe, default_dense=1)),
    "grok-1": (Style(False, False, norms=4, tied=True), _mixtral),
    "bailing_moe": (Style("use_qkv_bias", "use_bias"), deepseek_moe),
}


def _styled(c: ConfigReader, style: Style, ffn: Callable[[ConfigReader, int], FeedForward]) -> ModelParts:
    return decoder(c, replace(style, ffn=ffn))


def _glm4_moe(c: ConfigReader) -> ModelParts:
    """GLM-4.5: query and key norms only where use_qk_norm says so; one next-token layer that may draft."""
    style = Style(o_bias=False, qk_norm="head" if c.flag("use_qk_norm") else "")
    parts = _styled(c, style, partial(deepseek_moe, default_dense=1))
    return with_drafts(c, parts)


def with_drafts(c: ConfigReader, parts: ModelParts, n_default: int = 0) -> ModelParts:
    """Add next-token-prediction layers: each is one more layer like the last, plus a projection of two hidden states
    and norms."""
    n = c.drafts("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", default=n_default)
    hidden, last = hidden_of(c), parts.layers[-1]
    draft = replace(last, parameters=last.parameters + 2 * hidden * hidden + 3 * hidden)
    return replace(parts, drafts=(draft,) * n)


FAMILY = {
    **{name: partial(_styled, style=style, ffn=ffn) for name, (style, ffn) in _FFN.items()},
    "glm4_moe": _glm4_moe,
    "llama4_text": llama4,
    "minimax_m2": minimax_m2,
    "afmoe": _afmoe,
    "mimo_v2_flash": mimo,
    "mimo_v2": mimo,
    "dbrx": dbrx,
}
