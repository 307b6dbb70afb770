"""Dense decoders of Llama's kind: one attention and one gated feed-forward part a layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvarn.core.geometry.attend import Heads, all_slide, every
from kvarn.core.geometry.decoder import Style, decoder
from kvarn.core.geometry.families.moe import with_drafts
from kvarn.core.geometry.parts import ModelParts, attention, gated_mlp, layer
from kvarn.core.geometry.reader import ConfigReader


def _late_layers_slide(c: ConfigReader, style: Style) -> ModelParts:
    """Qwen2, Qwen3: where the window is switched on, layers from max_window_layers on have it."""
    first = c.count("max_window_layers")
    return decoder(c, replace(style, slides=lambda i: i >= first))


def _xielu(_: ConfigReader, __: Heads) -> int:
    """Apertus: the activation has two learned scalars."""
    return 2


def _output_gate(c: ConfigReader, h: Heads) -> int:
    """Muse Glimmer: attention's output is gated by a projection of its own width."""
    return c.size("hidden_size") * h.query * h.k_dim


def _cohere_norm(c: ConfigReader, h: Heads) -> int:
    return (h.query + h.kv) * h.k_dim if c.flag("use_qk_norm") else 0


def _stablelm_norm(c: ConfigReader, h: Heads) -> int:
    return (h.query + h.kv) * h.k_dim if c.flag("qk_layernorm") else 0


def _stablelm(c: ConfigReader) -> ModelParts:
    norms = 1 if c.flag("use_parallel_residual") else 2
    style = Style("use_qkv_bias", False, False, norms=norms, norm_bias=True, extra_per_layer=_stablelm_norm)
    return decoder(c, style)


_LLAMA = Style()
_NO_BIAS = Style(qkv_bias=False, o_bias=False, mlp_bias=False)
_QWEN2 = Style(qkv_bias=True, o_bias=False, mlp_bias=False)
_QWEN3 = Style(mlp_bias=False, qk_norm="head")
_GEMMA = Style(mlp_bias=False, tied=True)
_OLMO2 = Style(mlp_bias=False, qk_norm="full")
_STARCODER2 = Style("use_bias", "use_bias", "use_bias", gated=False, norm_bias=True, slides=all_slide)
_COHERE = Style(mlp_bias=False, norms=1, extra_per_layer=_cohere_norm, tied=True)
_NEMOTRON = Style(gated=False, norm_bias=True)
_PHI = Style(True, True, True, gated=False, norms=1, norm_bias=True, head_bias=True)

_STYLES = {
    "llama": _LLAMA,
    "yi": _LLAMA,
    "internlm2": Style("bias", "bias", False),
    "internlm3": Style("qkv_bias", "bias", "bias"),
    "baichuan": _NO_BIAS,
    "xverse": _NO_BIAS,
    "minicpm": Style(mlp_bias=False, tied=True),
    "exaone": _NO_BIAS,
    "mistral": Style(False, False, False, slides=all_slide),
    "ministral": Style(False, False, False, slides=all_slide),
    "ministral3": Style(False, False, False, slides=all_slide),
    "cwm": Style(False, False, False, slides=every(4, full_first=True)),
    "smollm3": _LLAMA,
    "granite": _LLAMA,
    "granite_swa": Style(slides=every(4, full_first=True), extra_per_layer=lambda _, h: h.query),
    "arcee": Style(gated=False),
    "helium": _LLAMA,
    "ernie4_5": Style("use_bias", "use_bias", "use_bias"),
    "hunyuan_v1_dense": Style(mlp_bias=False, qk_norm="head"),
    "seed_oss": Style(o_bias="attention_out_bias"),
    "glm": Style(o_bias=False, mlp_bias=False),
    "glm4": Style(o_bias=False, mlp_bias=False, norms=4),
    "gemma": _GEMMA,
    "gemma2": Style(mlp_bias=False, norms=4, slides=every(2), tied=True),
    "vaultgemma": Style(mlp_bias=False, slides=every(2), tied=True),
    "gemma3_text": Style(mlp_bias=False, norms=4, qk_norm="head", slides=every(6), tied=True),
    "olmo": Style(mlp_bias=False, norms=0, final_norm=False),
    "olmo2": _OLMO2,
    "olmo3": Style(mlp_bias=False, qk_norm="full", slides=every(4)),
    "exaone4": Style(False, False, False, qk_norm="head", slides=every(4)),
    "apertus": Style(gated=False, qk_norm="head", extra_per_layer=_xielu),
    "nemotron": _NEMOTRON,
    "starcoder2": _STARCODER2,
    "cohere": _COHERE,
    "cohere2": Style(mlp_bias=False, norms=1, slides=every(4), tied=True),
    "phi": _PHI,
    "phi3": Style(False, False, False, slides=all_slide),
    "nanochat": Style(o_bias=False, mlp_bias=False, gated=False, norms=0, final_norm=False),
    "muse_glimmer_text": Style(False, False, False, norms=4, extra_per_layer=_output_gate),
}
_LATE_WINDOW = {
    "qwen2": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
}


def _muse(c: ConfigReader) -> ModelParts:
    """Muse Glimmer: every 4th layer, counted backward from the last, sees everything."""
    last = c.layers("num_hidden_layers") - 1
    return decoder(c, replace(_STYLES["muse_glimmer_text"], slides=lambda i: (last - i) % 4 != 0))


def _chatglm(c: ConfigReader) -> ModelParts:
    """ChatGLM2, ChatGLM3, GLM-4-9B as first published: KV groups, its own spellings."""
    hidden, query, dim = c.size("hidden_size"), c.size("num_attention_heads"), c.size("kv_channels")
    kv = c.size("multi_query_group_num") if c.flag("multi_query_attention") else query
    c.understood(("multi_query_group_num",))
    h, vocab = Heads(query, kv, dim, dim), c.size("padded_vocab_size", "vocab_size")
    bias = c.flag("add_bias_linear")
    mixer = attention(hidden, query, kv, dim, dim, qkv_bias=c.flag("add_qkv_bias") or bias, o_bias=bias)
    ffn = gated_mlp(hidden, c.size("ffn_hidden_size"), bias=bias)
    one = layer(h.spec(), mixer, ffn, 2 * hidden)
    return ModelParts((one,) * c.layers("num_layers"), vocab * hidden, vocab * hidden, hidden, width=ffn.width)


def _qwen1(c: ConfigReader) -> ModelParts:
    """Qwen 1: intermediate_size counts gate and up together."""
    width = c.size("intermediate_size") // 2
    c.understood(("kv_channels",))
    style = Style(True, False, False, ffn=lambda reader, _: gated_mlp(reader.size("hidden_size"), width))
    return decoder(c, style)


def _mimo_7b(c: ConfigReader) -> ModelParts:
    """MiMo 7B: Qwen2 with a next-token-prediction layer."""
    return with_drafts(c, decoder(c, _QWEN2))


FAMILY = {
    "mimo": _mimo_7b,
    "chatglm": _chatglm,
    "qwen": _qwen1,
    **{name: partial(decoder, style=style) for name, style in _STYLES.items()},
    **{name: partial(_late_layers_slide, style=style) for name, style in _LATE_WINDOW.items()},
    "stablelm": _stablelm,
    "muse_glimmer_text": _muse,
}
