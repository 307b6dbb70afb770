"""Decoders from before Llama: GPT-2, NeoX, J, OPT, BLOOM, Falcon, MPT, StarCoder."""

from __future__ import annotations

from kvarn.core.errors import ConfigError
from kvarn.core.geometry.attend import Heads
from kvarn.core.geometry.decoder import hidden_of, is_tied, n_layers_of
from kvarn.core.geometry.parts import FeedForward, ModelParts, attention, layer, plain_mlp
from kvarn.core.geometry.reader import ConfigReader


def _parts(
    c: ConfigReader,
    h: Heads,
    ffn: FeedForward,
    *,
    attn_bias: bool,
    norms: int,
    o_bias: bool | None = None,
    norm_bias: bool = True,
    positions: int = 0,
    other: int = 0,
    tied: bool = True,
    head_bias: bool = False,
    windows: list[int | None] | None = None,
    extra: int = 0,
) -> ModelParts:
    """Layers of one kind. positions: rows of a learned position table. other: parameters outside the layers."""
    hidden, vocab, n_layers = hidden_of(c), c.size("vocab_size"), n_layers_of(c)
    norm = hidden * (2 if norm_bias else 1)
    mixer = attention(
        hidden, h.query, h.kv, h.k_dim, h.v_dim, qkv_bias=attn_bias, o_bias=attn_bias if o_bias is None else o_bias
    )
    specs = [h.spec(window=w) for w in (windows or [None] * n_layers)]
    tied = is_tied(c, tied)
    return ModelParts(
        layers=tuple(layer(spec, mixer + extra, ffn, norms * norm) for spec in specs),
        embedding=(vocab + positions) * hidden,
        output=(0 if tied else vocab * hidden) + (vocab if head_bias else 0),
        other=norm + other,
        width=ffn.width,
    )


def _mha(c: ConfigReader, *, kv_elsewhere: bool = False) -> Heads:
    """As many KV heads as query heads, of hidden / heads numbers. Raises ConfigError where the config states others.
    kv_elsewhere: the architecture says its KV heads in words of its own."""
    hidden, n = hidden_of(c), c.size("num_attention_heads", "n_head", "n_heads", "num_heads")
    dim, kv = c.stated("head_dim"), c.stated("num_key_value_heads")
    if dim not in (None, hidden // n) or (not kv_elsewhere and kv not in (None, n)):
        raise ConfigError(f"{c.model_type} has {n} KV heads of {hidden // n}, but the config states {kv} of {dim}")
    return Heads(n, n, hidden // n, hidden // n)


def _width(c: ConfigReader) -> int:
    return c.optional_size("n_inner", "intermediate_size", "ffn_dim") or 4 * hidden_of(c)


def _gpt2(c: ConfigReader) -> ModelParts:
    ffn = plain_mlp(hidden_of(c), _width(c), bias=True)
    return _parts(c, _mha(c), ffn, attn_bias=True, norms=2, positions=c.size("n_positions", "n_ctx"))


def _gpt_bigcode(c: ConfigReader) -> ModelParts:
    """StarCoder, SantaCoder: one KV head for all queries."""
    h = _mha(c, kv_elsewhere=True)
    if c.flag("multi_query", default=True):
        h = Heads(h.query, 1, h.k_dim, h.v_dim)
    ffn = plain_mlp(hidden_of(c), _width(c), bias=True)
    return _parts(c, h, ffn, attn_bias=True, norms=2, positions=c.size("n_positions"))


def _gpt_neo(c: ConfigReader) -> ModelParts:
    """Layers alternate between all tokens and a local window."""
    n_layers, window = n_layers_of(c), c.size("window_size")
    kinds, types = c.sequence("attention_layers"), c.sequence("attention_types")
    if kinds is None:
        types = types or [[["global", "local"], n_layers // 2]]
        kinds = [kind for names, times in types for _ in range(times) for kind in names]
    windows = [window if kind == "local" else None for kind in kinds]
    ffn = plain_mlp(hidden_of(c), _width(c), bias=True)
    positions = c.size("max_position_embeddings")
    return _parts(c, _mha(c), ffn, attn_bias=False, o_bias=True, norms=2, positions=positions, windows=windows)


def _gpt_neox(c: ConfigReader) -> ModelParts:
    """GPT-NeoX, Pythia, Dolly."""
    bias = c.flag("attention_bias", default=True)
    ffn = plain_mlp(hidden_of(c), _width(c), bias=True)
    return _parts(c, _mha(c), ffn, attn_bias=bias, norms=2, tied=False)


def _gptj(c: ConfigReader) -> ModelParts:
    ffn = plain_mlp(hidden_of(c), _width(c), bias=True)
    return _parts(c, _mha(c), ffn, attn_bias=False, norms=1, tied=False, head_bias=True)


def _opt(c: ConfigReader) -> ModelParts:
    """Its position table has two rows more than max_position_embeddings. The 350M model embeds in a smaller space."""
    hidden, embed = hidden_of(c), c.optional_size("word_embed_proj_dim") or hidden_of(c)
    bias, norm_affine = c.flag("enable_bias", default=True), c.flag("layer_norm_elementwise_affine", default=True)
    ffn = plain_mlp(hidden, c.size("ffn_dim"), bias=bias)
    positions, vocab = c.size("max_position_embeddings") + 2, c.size("vocab_size")
    other = 2 * embed * hidden + vocab * (embed - hidden) if embed != hidden else 0
    if not c.flag("do_layer_norm_before", default=True):
        other -= 2 * hidden  # post-norm: no final norm
    norms = 2 if norm_affine else 0
    return _parts(c, _mha(c), ffn, attn_bias=bias, norms=norms, positions=positions, other=other)


def _bloom(c: ConfigReader) -> ModelParts:
    hidden = hidden_of(c)
    return _parts(c, _mha(c), plain_mlp(hidden, 4 * hidden, bias=True), attn_bias=True, norms=2, other=2 * hidden)


def _falcon(c: ConfigReader) -> ModelParts:
    """7B: one KV head. 40B and 180B (new_decoder_architecture): num_kv_heads. RW: as many as query heads."""
    hidden, h = hidden_of(c), _mha(c, kv_elsewhere=True)
    new = c.flag("new_decoder_architecture")
    if new:
        kv = c.optional_size("num_kv_heads", "n_head_kv") or h.query
    else:
        c.understood(("num_kv_heads", "n_head_kv"))
        kv = 1 if c.flag("multi_query", default=True) else h.query
    bias, width = c.flag("bias"), c.optional_size("ffn_hidden_size") or 4 * hidden
    parallel = c.flag("parallel_attn", default=True)
    norms = (c.count("num_ln_in_parallel_attn", default=2) or 2) if new else (1 if parallel else 2)
    return _parts(
        c, Heads(h.query, kv, h.k_dim, h.v_dim), plain_mlp(hidden, width, bias=bias), attn_bias=bias, norms=norms
    )


def _mpt(c: ConfigReader) -> ModelParts:
    hidden, h, attn = hidden_of(c), _mha(c, kv_elsewhere=True), c.sub("attn_config")
    kind = attn.get("attn_type", default="multihead_attention")
    kv = attn.optional_size("kv_n_heads") or (1 if kind == "multiquery_attention" else h.query)
    width = c.size("expansion_ratio", default=4) * hidden
    bias = not c.flag("no_bias", default=True)
    ffn = plain_mlp(hidden, width, bias=bias)
    return _parts(c, Heads(h.query, kv, h.k_dim, h.v_dim), ffn, attn_bias=bias, norms=2, norm_bias=bias)


def _persimmon(c: ConfigReader) -> ModelParts:
    h = _mha(c)
    extra = 4 * h.k_dim if c.flag("qk_layernorm", default=True) else 0
    ffn = plain_mlp(hidden_of(c), c.size("intermediate_size"), bias=True)
    return _parts(c, h, ffn, attn_bias=True, norms=2, tied=False, extra=extra)


FAMILY = {
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "codegen": _gptj,
    "opt": _opt,
    "bloom": _bloom,
    "falcon": _falcon,
    "mpt": _mpt,
    "persimmon": _persimmon,
}
