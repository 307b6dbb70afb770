"""Hybrids of attention with linear attention, convolutions or other recurrences: Qwen3-Next and 3.5, Kimi Linear,
Ling 3, OLMo Hybrid, MiniMax-01, LFM2, RecurrentGemma, RWKV-4, Inkling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvarn.core.geometry.attend import Heads, every, heads, mixer_kinds, window_of
from kvarn.core.geometry.decoder import Style, assemble, hidden_of, n_layers_of
from kvarn.core.geometry.families.mla import mla_parameters, mla_spec
from kvarn.core.geometry.families.moe import deepseek_moe, qwen_moe, routed, with_drafts
from kvarn.core.geometry.parts import (
    FeedForward,
    LayerPart,
    ModelParts,
    attention,
    experts,
    gated_mlp,
    layer,
    plain_mlp,
)
from kvarn.core.geometry.reader import ConfigReader
from kvarn.core.geometry.recurrent import DeltaHeads, Mixer, delta_heads, gated_delta, kimi_delta, states
from kvarn.core.specs import LayerSpec, StateTensor

FeedForwards = Callable[[ConfigReader, int], FeedForward]
_STYLE = Style(False, False, False)


def _linear_layers(c: ConfigReader, default: Callable[[int], bool]) -> list[bool]:
    """Which layers are recurrent: layer_types where stated, else the architecture's habit."""
    n_layers = n_layers_of(c)
    kinds = mixer_kinds(c, n_layers, "layer_types", "layers_block_type")
    return [k == "linear" for k in kinds] if kinds else [default(i) for i in range(n_layers)]


def _mix(
    c: ConfigReader, recurrent: list[bool], mixer: Mixer, full: LayerSpec, cost: int, ffn: FeedForwards, norms: int = 2
) -> tuple[LayerPart, ...]:
    hidden = hidden_of(c)
    return tuple(
        layer(mixer.spec if r else full, mixer.parameters if r else cost, ffn(c, i), norms * hidden)
        for i, r in enumerate(recurrent)
    )


def _dense(c: ConfigReader, _: int) -> FeedForward:
    return gated_mlp(hidden_of(c), c.size("intermediate_size"))


def _gated_attention(c: ConfigReader, h: Heads) -> int:
    """Qwen3-Next: queries twice as wide (half is an output gate), norms of query and key a head."""
    bias, hidden = c.flag("attention_bias"), hidden_of(c)
    plain = attention(hidden, h.query, h.kv, h.k_dim, h.v_dim, qkv_bias=bias, o_bias=bias)
    gate = h.query * h.k_dim * (hidden + (1 if bias else 0))
    return plain + gate + 2 * h.k_dim


def _qwen_next(c: ConfigReader, ffn: FeedForwards) -> ModelParts:
    """Three of four layers are Gated DeltaNet, every fourth is gated attention."""
    h, hidden = heads(c), hidden_of(c)
    period = c.size("full_attention_interval", default=4)
    mixer = gated_delta(c, hidden, delta_heads(c))
    layers = _mix(c, _linear_layers(c, every(period)), mixer, h.spec(), _gated_attention(c, h), ffn)
    parts = assemble(c, replace(_STYLE, ffn=ffn), layers)
    full = next((p for p in reversed(layers) if p.spec.kv_heads), layers[-1])
    drafts = with_drafts(c, replace(parts, layers=(*layers, full))).drafts
    return replace(parts, drafts=drafts)


def _olmo_hybrid(c: ConfigReader) -> ModelParts:
    h, hidden = heads(c), hidden_of(c)
    # the class computes what the config leaves out (OlmoHybridConfig): heads as in attention, keys 3/4 of a head
    n = c.optional_size("linear_num_key_heads") or h.query
    key = c.optional_size("linear_key_head_dim") or int(0.75 * hidden / n)
    value_heads = c.optional_size("linear_num_value_heads") or h.query
    value = c.optional_size("linear_value_head_dim") or 2 * key
    d = DeltaHeads(n, value_heads, key, value, c.size("linear_conv_kernel_dim"))
    mixer = gated_delta(c, hidden, d)
    cost = attention(hidden, h.query, h.kv, h.k_dim, h.v_dim) + (h.query + h.kv) * h.k_dim
    return assemble(c, _STYLE, _mix(c, _linear_layers(c, every(4)), mixer, h.spec(), cost, _dense))


def _kimi_linear(c: ConfigReader) -> ModelParts:
    """Kimi Delta Attention in three of four layers, latent attention without rotation in the others."""
    hidden, n_layers, sub = hidden_of(c), n_layers_of(c), c.sub("linear_attn_config")
    n_heads = sub.optional_size("num_heads") or c.size("linear_num_heads")
    dim = sub.optional_size("head_dim") or c.size("linear_head_dim")
    kernel = sub.optional_size("short_conv_kernel_size") or c.size("linear_conv_kernel_dim")
    full = sub.sequence("full_attn_layers")  # counted from 1
    recurrent = _linear_layers(c, lambda i: i == 0 or i % 4 != 0)
    if full is not None:
        recurrent = [i + 1 not in full for i in range(n_layers)]
    spec = mla_spec(c)
    mixer = kimi_delta(c, hidden, n_heads, dim, kernel, low_rank=not sub.flag("use_full_rank_gate"))
    c.understood(("mla_use_nope", "mla_use_output_gate"))
    ffn = partial(_latent_moe, default_dense=1)
    return assemble(c, replace(_STYLE, ffn=ffn), _mix(c, recurrent, mixer, spec, mla_parameters(c, spec), ffn))


def _latent_moe(c: ConfigReader, i: int, default_dense: int) -> FeedForward:
    """Experts that work in a smaller space (routed_expert_hidden_size, Kimi K3), a projection into it and one back."""
    found, latent = deepseek_moe(c, i, default_dense), c.optional_size("routed_expert_hidden_size")
    if latent is None or not found.experts:
        return found
    hidden, width = hidden_of(c), c.size("moe_intermediate_size")
    c.understood(("latent_moe_use_norm",))
    c.note("experts in a latent space: their projections are counted, norms and gates beside them are not")
    return replace(
        found,
        parameters=found.parameters + 2 * hidden * latent,
        experts=found.n_experts * 3 * latent * width,
        active_experts=found.n_active * 3 * latent * width,
    )


def _bailing_hybrid(c: ConfigReader) -> ModelParts:
    """Ling 3: Kimi Delta Attention with full-rank gates, gated latent attention in every sixth layer."""
    hidden, n_heads = hidden_of(c), c.size("num_attention_heads")
    dim = c.optional_size("linear_head_dim") or c.size("head_dim")
    kernel = c.size("linear_conv_kernel_dim", "short_conv_kernel_size")
    c.understood(("linear_num_heads",))
    spec = mla_spec(c)
    cost = mla_parameters(c, spec) + hidden * n_heads
    mixer = kimi_delta(c, hidden, n_heads, dim, kernel, low_rank=False)
    ffn = partial(deepseek_moe, default_dense=2)
    recurrent = _linear_layers(c, every(c.size("layer_group_size")))
    return with_drafts(c, assemble(c, replace(_STYLE, ffn=ffn), _mix(c, recurrent, mixer, spec, cost, ffn)))


def _minimax(c: ConfigReader) -> ModelParts:
    """MiniMax-01: lightning attention (a state of head_dim x head_dim a head), full attention in every eighth layer."""
    h, hidden, n_layers = heads(c), hidden_of(c), n_layers_of(c)
    width = h.query * h.k_dim
    state = states(c, 0, 0, h.query * h.k_dim * h.k_dim)
    mixer = Mixer(state, hidden * 3 * width + width * hidden + hidden * width + width)
    codes = c.per_layer("attn_type_list", n_layers)  # the published spelling: 1 is full attention
    recurrent = [not t for t in codes] if codes else _linear_layers(c, lambda i: (i + 1) % 2 == 0)
    cost = attention(hidden, h.query, h.kv, h.k_dim, h.v_dim)
    ffn: FeedForwards = lambda reader, _: experts(hidden, reader.size("intermediate_size"), *routed(reader))  # noqa: E731
    return assemble(c, replace(_STYLE, ffn=ffn), _mix(c, recurrent, mixer, h.spec(), cost, ffn))


def _lfm2_width(c: ConfigReader) -> int:
    """Lfm2MLP shrinks the stated width to two thirds and rounds it up, unless told not to."""
    width = c.size("block_ff_dim", "intermediate_size")
    if not c.flag("block_auto_adjust_ff_dim", default=True):
        return width
    width = int(c.get("block_ffn_dim_multiplier", default=1.0) * int(2 * width / 3))
    multiple = c.size("block_multiple_of", default=256)
    return -(-width // multiple) * multiple


def _lfm2(c: ConfigReader, ffn: FeedForwards) -> ModelParts:
    """Short convolutions in most layers; they keep conv_L_cache - 1 inputs."""
    h, hidden, n_layers = heads(c), hidden_of(c), n_layers_of(c)
    kernel = c.size("conv_L_cache")
    bias = 5 * hidden if c.flag("conv_bias") else 0
    mixer = Mixer(states(c, hidden, kernel - 1, 0), 4 * hidden * hidden + hidden * kernel + bias)
    full = c.sequence("full_attn_idxs")
    recurrent = _linear_layers(c, lambda i: full is not None and i not in full)
    cost = attention(hidden, h.query, h.kv, h.k_dim, h.v_dim) + 2 * h.k_dim
    layers = _mix(c, recurrent, mixer, h.spec(), cost, ffn)
    return assemble(
        c, replace(_STYLE, ffn=ffn, tied=True), layers, max((ffn(c, i) for i in range(n_layers)), key=_rank)
    )


def _rank(f: FeedForward) -> tuple[int, int]:
    return f.n_experts, f.width


def _lfm2_dense(c: ConfigReader, _: int) -> FeedForward:
    return gated_mlp(hidden_of(c), _lfm2_width(c))


def _lfm2_sparse(c: ConfigReader, i: int) -> FeedForward:
    hidden = hidden_of(c)
    if i < c.count("num_dense_layers"):
        return gated_mlp(hidden, c.size("intermediate_size"))
    return experts(hidden, c.size("moe_intermediate_size"), *routed(c))


def _recurrent_gemma(c: ConfigReader) -> ModelParts:
    """Griffin (arXiv:2402.19427): two gated linear recurrences, then local attention."""
    hidden, n_layers = hidden_of(c), n_layers_of(c)
    h, width = heads(c), c.optional_size("lru_width") or hidden
    window, kernel = c.size("attention_window_size"), c.size("conv1d_width")
    blocks = c.sequence("block_types") or ["recurrent", "recurrent", "attention"]
    mixer = Mixer(
        states(c, width, kernel - 1, width),
        3 * (hidden * width + width) + width * kernel + width + width + 2 * (width * width // h.query + width),
    )
    cost = attention(hidden, h.query, h.kv, h.k_dim, h.v_dim, qkv_bias=c.flag("attention_bias"), o_bias=True)
    half = c.size("intermediate_size") // 2
    ffn: FeedForwards = lambda _, __: gated_mlp(hidden, half, bias=True)  # noqa: E731
    recurrent = [blocks[i % len(blocks)] == "recurrent" for i in range(n_layers)]
    layers = _mix(c, recurrent, mixer, h.spec(window=window), cost, ffn)
    return assemble(c, replace(_STYLE, ffn=ffn, tied=True), layers)


def _rwkv(c: ConfigReader) -> ModelParts:
    """RWKV-4 (arXiv:2305.13048): five vectors a layer, whatever the length."""
    hidden = hidden_of(c)
    attend, width = (
        c.optional_size("attention_hidden_size") or hidden,
        c.optional_size("intermediate_size") or 4 * hidden,
    )
    state = tuple(StateTensor(name, hidden, "float32") for name in ("ffn_input", "attention_input"))
    state += tuple(StateTensor(name, attend, "float32") for name in ("numerator", "denominator", "maximum"))
    time_mix = 2 * attend + 3 * hidden + 3 * hidden * attend + attend * hidden
    ffn = plain_mlp(hidden, width)
    ffn = replace(ffn, parameters=ffn.parameters + 2 * hidden + hidden * hidden)
    one = layer(LayerSpec(state=state), time_mix, ffn, 4 * hidden)
    parts = assemble(c, replace(_STYLE, norm_bias=True), (one,) * n_layers_of(c), ffn)
    return replace(parts, other=parts.other + 2 * hidden)


def _inkling(c: ConfigReader) -> ModelParts:
    """Inkling: window layers with KV heads of their own, and four short convolutions in every layer."""
    hidden, n_layers = hidden_of(c), n_layers_of(c)
    full = heads(c)
    local = Heads(
        *(c.size(n) for n in ("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_head_dim"))
    )
    window = window_of(c, "sliding_window_size")
    ids = c.sequence("local_layer_ids")
    c.understood(("number_of_conv_states",))
    kinds = mixer_kinds(c, n_layers, "layer_types")
    if kinds:
        slides = [k == "sliding" for k in kinds]
    else:
        slides = [i in ids if ids is not None else (i + 1) % 6 != 0 for i in range(n_layers)]
    layers = []
    for i, slid in enumerate(slides):
        h = local if slid else full
        cost, state = _inkling_mixer(c, h, slid)
        spec = replace(h.spec(window=window if slid else None), state=state)
        layers.append(layer(spec, cost, _inkling_ffn(c, i), 2 * hidden))
    parts = assemble(c, replace(_STYLE, ffn=_inkling_ffn), tuple(layers))
    return replace(parts, other=parts.other + hidden)


def _inkling_mixer(c: ConfigReader, h: Heads, slid: bool) -> tuple[int, tuple[StateTensor, ...]]:
    hidden, kernel, d_rel = hidden_of(c), c.size("conv_kernel_size", "sconv_kernel_size"), c.size("d_rel")
    channels = 2 * h.kv * h.k_dim + 2 * hidden
    extent = c.size("sliding_window_size", "sliding_window") if slid else c.size("rel_extent")
    relative = hidden * h.query * d_rel + d_rel * extent
    cost = attention(hidden, h.query, h.kv, h.k_dim, h.v_dim) + channels * kernel + relative + 2 * h.k_dim
    return cost, states(c, channels, kernel - 1, 0)


def _inkling_ffn(c: ConfigReader, i: int) -> FeedForward:
    hidden, kinds = hidden_of(c), c.per_layer("mlp_layer_types", n_layers_of(c))
    dense_width, width = c.stated("dense_intermediate_size"), c.size("moe_intermediate_size")
    if dense_width is not None:  # then intermediate_size is the experts' width (InklingTextConfig)
        width = c.size("intermediate_size")
    if kinds[i] == "dense" if kinds else i < c.count("dense_mlp_idx"):
        return gated_mlp(hidden, dense_width or c.size("intermediate_size"))
    total, active = routed(c)
    shared = c.count("n_shared_experts")
    found = experts(hidden, width, total, active, shared_width=shared * width)
    return replace(found, parameters=found.parameters + shared * hidden + 1)


FAMILY = {
    "qwen3_next": partial(_qwen_next, ffn=qwen_moe),
    "qwen3_5_text": partial(_qwen_next, ffn=_dense),
    "qwen3_5_moe_text": partial(_qwen_next, ffn=qwen_moe),
    "olmo_hybrid": _olmo_hybrid,
    "kimi_linear": _kimi_linear,
    "bailing_hybrid": _bailing_hybrid,
    "minimax": _minimax,
    "lfm2": partial(_lfm2, ffn=_lfm2_dense),
    "lfm2_moe": partial(_lfm2, ffn=_lfm2_sparse),
    "recurrent_gemma": _recurrent_gemma,
    "rwkv": _rwkv,
    "inkling_text": _inkling,
}
