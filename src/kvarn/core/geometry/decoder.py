"""The usual decoder: embedding, layers of attention and feed-forward, final norm, head. Families differ by a Style."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvarn.core.geometry.attend import Heads, Slides, attention_specs, heads, none_slides
from kvarn.core.geometry.parts import FeedForward, LayerPart, ModelParts, attention, gated_mlp, layer, plain_mlp
from kvarn.core.geometry.reader import ConfigReader
from kvarn.core.specs import LayerSpec

FeedForwards = Callable[[ConfigReader, int], FeedForward]
Switch = bool | str


@dataclass(frozen=True)
class Style:
    """How an architecture differs from Llama in what is stored and counted.

    Biases are True, False or the config key that says so. norms: norm weights of hidden size a layer. norm_bias: norms
    have a bias. qk_norm: '' none, 'head' one weight of head_dim each for query and key, 'full' one over all heads.
    gated: three matrices in the feed-forward part, else two. slides: which layers have the window where the config
    does not list them. ffn: feed-forward part of layer i, for mixtures of experts.
    """

    qkv_bias: Switch = "attention_bias"
    o_bias: Switch = "attention_bias"
    mlp_bias: Switch = "mlp_bias"
    gated: bool = True
    norms: int = 2
    norm_bias: Switch = False
    final_norm: bool = True
    qk_norm: str = ""
    slides: Slides = none_slides
    ffn: FeedForwards | None = None
    extra_per_layer: Callable[[ConfigReader, Heads], int] | None = None
    head_bias: Switch = False
    tied: bool = False


def is_on(c: ConfigReader, switch: Switch) -> bool:
    return c.flag(switch) if isinstance(switch, str) else switch


def n_layers_of(c: ConfigReader) -> int:
    return c.layers("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def hidden_of(c: ConfigReader) -> int:
    return c.size("hidden_size", "n_embd", "d_model", "dim")


def is_tied(c: ConfigReader, default: bool = False) -> bool:
    return c.flag("tie_word_embeddings", "tie_embedding", default=default)


def dense_ffn(c: ConfigReader, style: Style) -> FeedForward:
    hidden, width = hidden_of(c), c.size("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    return (gated_mlp if style.gated else plain_mlp)(hidden, width, bias=is_on(c, style.mlp_bias))


def attention_parameters(c: ConfigReader, style: Style, h: Heads) -> int:
    """Projections and query/key norms of one layer."""
    found = attention(
        hidden_of(c),
        h.query,
        h.kv,
        h.k_dim,
        h.v_dim,
        qkv_bias=is_on(c, style.qkv_bias),
        o_bias=is_on(c, style.o_bias),
    )
    if style.qk_norm == "head":
        found += 2 * h.k_dim
    elif style.qk_norm == "full":
        found += (h.query + h.kv) * h.k_dim
    return found + (style.extra_per_layer(c, h) if style.extra_per_layer else 0)


def norm_size(c: ConfigReader, style: Style) -> int:
    return hidden_of(c) * (2 if is_on(c, style.norm_bias) else 1)


def decoder_layers(c: ConfigReader, style: Style, specs: list[LayerSpec], h: Heads) -> tuple[LayerPart, ...]:
    ffn = style.ffn or (lambda reader, _: dense_ffn(reader, style))
    mixer, norms = attention_parameters(c, style, h), style.norms * norm_size(c, style)
    return tuple(layer(spec, mixer, ffn(c, i), norms) for i, spec in enumerate(specs))


def assemble(
    c: ConfigReader, style: Style, layers: tuple[LayerPart, ...], ffn: FeedForward | None = None
) -> ModelParts:
    """Layers plus embedding, final norm and head. ffn: the layer whose width and experts describe the model."""
    hidden, vocab = hidden_of(c), c.size("vocab_size", "padded_vocab_size")
    tied = is_tied(c, style.tied)
    ffn = ffn or widest(c, style, len(layers))
    return ModelParts(
        layers=layers,
        embedding=vocab * hidden,
        output=(0 if tied else vocab * hidden) + (vocab if is_on(c, style.head_bias) else 0),
        other=norm_size(c, style) if style.final_norm else 0,
        width=ffn.width,
        n_experts=ffn.n_experts,
        n_active=ffn.n_active,
    )


def widest(c: ConfigReader, style: Style, n_layers: int) -> FeedForward:
    """Of the layers' feed-forward parts the one with experts, else the widest."""
    if style.ffn is None:
        return dense_ffn(c, style)
    return max((style.ffn(c, i) for i in range(n_layers)), key=lambda f: (f.n_experts, f.width))


def decoder(c: ConfigReader, style: Style) -> ModelParts:
    """The whole of a plain decoder."""
    h = heads(c)
    specs = attention_specs(c, h, n_layers_of(c), style.slides)
    return assemble(c, style, decoder_layers(c, style, specs, h))
