"""Mamba and its hybrids with attention: Jamba, Bamba, Zamba, Nemotron-H, Falcon-H1, Granite 4."""

from __future__ import annotations

import math
from dataclasses import replace

from kvarn.core.errors import ConfigError
from kvarn.core.geometry.attend import Heads, heads, mixer_kinds
from kvarn.core.geometry.decoder import Style, assemble, hidden_of, n_layers_of
from kvarn.core.geometry.families.moe import routed
from kvarn.core.geometry.parts import (
    FeedForward,
    LayerPart,
    ModelParts,
    attention,
    experts,
    gated_mlp,
    layer,
    linear,
    plain_mlp,
)
from kvarn.core.geometry.reader import ConfigReader
from kvarn.core.geometry.recurrent import Mixer, at, mamba1, mamba2
from kvarn.core.specs import LayerSpec

_NONE = FeedForward(0)
_STYLE = Style(False, False, False)


def _rank(c: ConfigReader, hidden: int, *names: str) -> int:
    stated = c.get(*names, default="auto")
    return math.ceil(hidden / 16) if stated == "auto" else c.size(*names)


def _pure(c: ConfigReader, mixer: Mixer) -> ModelParts:
    hidden = hidden_of(c)
    layers = tuple(layer(mixer.spec, mixer.parameters, None, hidden) for _ in range(n_layers_of(c)))
    return assemble(c, replace(_STYLE, tied=True), layers, _NONE)


def _mamba(c: ConfigReader) -> ModelParts:
    hidden = hidden_of(c)
    inner = c.optional_size("intermediate_size", "d_inner") or c.size("expand") * hidden
    mixer = mamba1(
        c,
        hidden,
        inner,
        c.size("state_size", "d_state"),
        c.size("conv_kernel", "d_conv"),
        _rank(c, hidden, "time_step_rank", "dt_rank"),
        conv_bias=c.flag("use_conv_bias", default=True),
        proj_bias=c.flag("use_bias"),
    )
    return _pure(c, mixer)


def _mamba2(c: ConfigReader) -> ModelParts:
    hidden, n_heads = hidden_of(c), c.size("num_heads")
    inner = n_heads * c.size("head_dim")
    c.understood(("expand", "time_step_rank", "num_attention_heads"))
    mixer = mamba2(
        c,
        hidden,
        inner,
        n_heads,
        c.size("n_groups"),
        c.size("state_size"),
        c.size("conv_kernel"),
        conv_bias=c.flag("use_conv_bias", default=True),
        proj_bias=c.flag("use_bias"),
    )
    return _pure(c, mixer)


def _attention(c: ConfigReader, h: Heads) -> int:
    bias = c.flag("attention_bias")
    return attention(hidden_of(c), h.query, h.kv, h.k_dim, h.v_dim, qkv_bias=bias, o_bias=bias)


def _mamba_of(c: ConfigReader, inner: int, *, norm: bool = True) -> Mixer:
    """The mamba_* keys that Bamba, Falcon-H1 and Granite 4 share."""
    return mamba2(
        c,
        hidden_of(c),
        inner,
        c.size("mamba_n_heads"),
        c.size("mamba_n_groups"),
        c.size("mamba_d_state"),
        c.size("mamba_d_conv"),
        conv_bias=c.flag("mamba_conv_bias", default=True),
        proj_bias=c.flag("mamba_proj_bias"),
        norm=norm,
    )


def _interleaved(
    c: ConfigReader, attends: list[bool], mixer: Mixer, ffn: list[FeedForward], norms: int = 2
) -> tuple[LayerPart, ...]:
    """Layers that have either attention or a recurrent mixer."""
    h, hidden = heads(c), hidden_of(c)
    full, cost = h.spec(), _attention(c, h)
    return tuple(
        layer(full if on else mixer.spec, cost if on else mixer.parameters, f, norms * hidden)
        for on, f in zip(attends, ffn, strict=True)
    )


def _jamba(c: ConfigReader) -> ModelParts:
    hidden, n_layers = hidden_of(c), n_layers_of(c)
    rank, d_state = _rank(c, hidden, "mamba_dt_rank"), c.size("mamba_d_state")
    mixer = mamba1(
        c,
        hidden,
        c.size("mamba_expand") * hidden,
        d_state,
        c.size("mamba_d_conv"),
        rank,
        conv_bias=c.flag("mamba_conv_bias", default=True),
        proj_bias=c.flag("mamba_proj_bias"),
    )
    mixer = Mixer(mixer.state, mixer.parameters + rank + 2 * d_state)
    period, offset = c.size("attn_layer_period"), c.count("attn_layer_offset")
    kinds = mixer_kinds(c, n_layers, "layer_types", "layers_block_type")
    attends = [k == "attention" for k in kinds] if kinds else [i % period == offset for i in range(n_layers)]
    width = c.size("intermediate_size")
    dense, sparse = gated_mlp(hidden, width), _NONE
    if c.count("num_experts", "num_local_experts") > 1:
        sparse = experts(hidden, width, *routed(c))
    moe_period, moe_offset = c.size("expert_layer_period"), c.count("expert_layer_offset")
    is_sparse = [sparse.experts > 0 and i % moe_period == moe_offset for i in range(n_layers)]
    ffn = [sparse if s else dense for s in is_sparse]
    return assemble(c, _STYLE, _interleaved(c, attends, mixer, ffn), sparse if any(is_sparse) else dense)


def _bamba(c: ConfigReader) -> ModelParts:
    n_layers, hidden = n_layers_of(c), hidden_of(c)
    attends = at(c.sequence("attn_layer_indices") or (), n_layers)
    c.understood(("layers_block_type", "layer_types", "mamba_d_head"))
    ffn = gated_mlp(hidden, c.size("intermediate_size"), bias=c.flag("mlp_bias"))
    mixer = _mamba_of(c, c.size("mamba_expand") * hidden)
    return assemble(c, _STYLE, _interleaved(c, attends, mixer, [ffn] * n_layers), ffn)


def _granite_hybrid(c: ConfigReader) -> ModelParts:
    """Granite 4: every layer a mixture of experts (none in the dense sizes) beside one shared part."""
    n_layers, hidden = n_layers_of(c), hidden_of(c)
    kinds = mixer_kinds(c, n_layers, "layer_types", "layers_block_type")
    attends = [k == "attention" for k in kinds] if kinds else [False] * n_layers
    c.understood(("mamba_d_head", "intermediate_size"))
    shared = gated_mlp(hidden, c.size("shared_intermediate_size"))
    ffn = shared
    if c.count("num_local_experts"):
        moe = experts(hidden, c.size("intermediate_size"), *routed(c))
        ffn = replace(moe, parameters=moe.parameters + shared.parameters, width=moe.width + shared.width)
    mixer = _mamba_of(c, c.size("mamba_expand") * hidden)
    return assemble(c, _STYLE, _interleaved(c, attends, mixer, [ffn] * n_layers), ffn)


def _falcon_h1(c: ConfigReader) -> ModelParts:
    """Attention and Mamba side by side in every layer: the cache of a full transformer, and a state besides."""
    hidden, h = hidden_of(c), heads(c)
    inner = c.optional_size("mamba_d_ssm") or c.size("mamba_expand") * hidden
    c.understood(("mamba_d_head", "mamba_expand", "layers_block_type", "layer_types"))
    mixer = _mamba_of(c, inner, norm=c.flag("mamba_rms_norm"))
    ffn = gated_mlp(hidden, c.size("intermediate_size"), bias=c.flag("mlp_bias"))
    one = layer(mixer.beside(h.spec()), _attention(c, h) + mixer.parameters, ffn, 2 * hidden)
    return assemble(c, _STYLE, (one,) * n_layers_of(c), ffn)


_NEMOTRON = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_NEMOTRON_NAMES = {"mamba": "linear_attention", "attention": "full_attention"} | {v: v for v in _NEMOTRON.values()}


def _nemotron_types(c: ConfigReader, pattern_name: str, list_name: str, *more: str) -> list[str]:
    stated, pattern = c.sequence(list_name, *more), c.stated(pattern_name)
    if stated is None and isinstance(pattern, str):
        stated = [_NEMOTRON.get(letter, letter) for letter in pattern]
    if stated is None:
        return []
    if strange := sorted({str(s) for s in stated} - set(_NEMOTRON_NAMES)):
        raise ConfigError(f"{list_name} holds {', '.join(strange)}; {', '.join(_NEMOTRON_NAMES)} are known")
    return [_NEMOTRON_NAMES[s] for s in stated]


def _nemotron_h(c: ConfigReader) -> ModelParts:
    """Each layer is one thing: Mamba-2, attention, feed-forward or experts. Only attention layers keep K and V."""
    kinds = _nemotron_types(c, "hybrid_override_pattern", "layers_block_type", "layer_types")
    c.understood(("num_hidden_layers", "expand"))
    if not kinds:
        raise ConfigError("nemotron_h config states neither layers_block_type nor hybrid_override_pattern")
    parts = {kind: _nemotron_layer(c, kind) for kind in set(kinds)}
    layers = tuple(parts[kind][0] for kind in kinds)
    found = assemble(c, _STYLE, layers, max((f for _, f in parts.values()), key=lambda f: (f.n_experts, f.width)))
    drafts = _nemotron_types(c, "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    n_drafts = c.drafts("num_nextn_predict_layers")
    return replace(found, drafts=tuple(_nemotron_layer(c, kind)[0] for kind in drafts) * n_drafts)


def _nemotron_layer(c: ConfigReader, kind: str) -> tuple[LayerPart, FeedForward]:
    hidden = hidden_of(c)
    if kind == "full_attention":
        h = heads(c)
        return layer(h.spec(), _attention(c, h), None, hidden), _NONE
    if kind == "mlp":
        ffn = plain_mlp(hidden, c.size("intermediate_size"), bias=c.flag("mlp_bias"))
        return layer(LayerSpec(), 0, ffn, hidden), ffn
    if kind == "moe":
        ffn = _nemotron_moe(c)
        return layer(LayerSpec(), 0, ffn, hidden), ffn
    n_heads = c.size("mamba_num_heads")
    mixer = mamba2(
        c,
        hidden,
        n_heads * c.size("mamba_head_dim"),
        n_heads,
        c.size("n_groups"),
        c.size("ssm_state_size"),
        c.size("conv_kernel"),
        conv_bias=c.flag("use_conv_bias", default=True),
        proj_bias=c.flag("use_bias") or c.flag("mamba_proj_bias"),
    )
    return layer(mixer.spec, mixer.parameters, None, hidden), _NONE


def _nemotron_moe(c: ConfigReader) -> FeedForward:
    """Two-matrix experts, working in a latent space of moe_latent_size where that is stated (Nemotron 3 Super)."""
    hidden, latent = hidden_of(c), c.optional_size("moe_latent_size")
    shared = c.count("n_shared_experts") * c.size("moe_shared_expert_intermediate_size")
    inside, width = latent or hidden, c.size("moe_intermediate_size")
    total, active = routed(c)
    one = 2 * inside * width
    fixed = linear(hidden, total) + 2 * hidden * shared + (2 * hidden * latent if latent else 0)
    return FeedForward(fixed, total * one, active * one, active * width + shared, total, active)


def _zamba2(c: ConfigReader) -> ModelParts:
    """Mamba-2 in every layer; some layers run a transformer block before it, whose weights all of them share."""
    hidden, n_layers = hidden_of(c), n_layers_of(c)
    kinds = c.per_layer("layers_block_type", n_layers, "layer_types") or _zamba2_default(n_layers)
    inner, n_heads = c.size("mamba_expand") * hidden, c.size("n_mamba_heads")
    mixer = mamba2(
        c,
        hidden,
        inner,
        n_heads,
        c.size("mamba_ngroups"),
        c.size("mamba_d_state"),
        c.size("mamba_d_conv"),
        conv_bias=c.flag("use_conv_bias", default=True),
        proj_bias=c.flag("add_bias_linear"),
    )
    h = _zamba_heads(c, hidden)
    width, rank = c.optional_size("intermediate_size") or 4 * hidden, c.size("adapter_rank")
    adapter = hidden * rank + rank * 2 * width
    if c.flag("use_shared_attention_adapter"):
        adapter += 3 * (2 * hidden * rank + rank * h.query * h.k_dim)
    hybrid = mixer.parameters + hidden * hidden + adapter
    block = _zamba_block(hidden, h, width) * c.size("num_mem_blocks")
    c.understood(("mamba_headdim", "hybrid_layer_ids", "attention_hidden_size", "kv_channels", "num_query_groups"))
    return _zamba_parts(c, kinds, mixer, h, hybrid, block, width)


def _zamba(c: ConfigReader) -> ModelParts:
    """Zamba 1: Mamba in every layer, one shared transformer block before some of them."""
    hidden, n_layers = hidden_of(c), n_layers_of(c)
    period, offset = c.size("attn_layer_period"), c.count("attn_layer_offset")
    kinds = c.per_layer("layers_block_type", n_layers, "layer_types") or [
        "hybrid" if i == 2 or (i > 2 and (i - 3) % period == offset) else "mamba" for i in range(n_layers)
    ]
    inner = c.size("mamba_expand") * hidden
    rank, d_state = _rank(c, hidden, "mamba_dt_rank"), c.size("mamba_d_state")
    mixer = mamba1(c, hidden, inner, d_state, c.size("mamba_d_conv"), rank)
    # time-step ranks, B and C stand once a Mamba head, each over inner / heads channels: the same number of parameters
    c.understood(("n_mamba_heads", "attention_hidden_size"))
    h, width = _zamba_heads(c, hidden), c.size("intermediate_size")
    hybrid = mixer.parameters + hidden * hidden
    return _zamba_parts(c, kinds, mixer, h, hybrid, _zamba_block(hidden, h, width), width)


def _zamba_heads(c: ConfigReader, hidden: int) -> Heads:
    query = c.size("num_attention_heads")
    dim = c.optional_size("attention_head_dim") or 2 * hidden // query
    return Heads(query, c.optional_size("num_key_value_heads") or query, dim, dim)


def _zamba_block(hidden: int, h: Heads, width: int) -> int:
    """The shared transformer block: it reads the hidden state beside the embedding, hence 2 x hidden."""
    qkv = 2 * hidden * (h.query * h.k_dim + 2 * h.kv * h.k_dim)
    return qkv + h.query * h.k_dim * hidden + 3 * hidden * width + 3 * hidden


def _zamba_parts(
    c: ConfigReader, kinds: list[str], mixer: Mixer, h: Heads, hybrid: int, block: int, width: int
) -> ModelParts:
    hidden, both = hidden_of(c), mixer.beside(h.spec())
    layers = tuple(
        layer(both, hybrid, None, hidden) if kind == "hybrid" else layer(mixer.spec, mixer.parameters, None, hidden)
        for kind in kinds
    )
    parts = assemble(c, replace(_STYLE, tied=True), layers, FeedForward(0, width=width))
    return replace(parts, other=parts.other + block)


def _zamba2_default(n_layers: int) -> list[str]:
    kinds = ["mamba"] + (["mamba"] * 5 + ["hybrid"]) * 7 + ["mamba"] * 4 + ["hybrid"] + ["mamba"] * 3 + ["hybrid"]
    kinds += ["mamba"] * 2
    if len(kinds) != n_layers:
        raise ConfigError(f"zamba2 with {n_layers} layers states no layers_block_type")
    return kinds


FAMILY = {
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "mamba2": _mamba2,
    "jamba": _jamba,
    "bamba": _bamba,
    "zamba": _zamba,
    "zamba2": _zamba2,
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granite_hybrid,
}
