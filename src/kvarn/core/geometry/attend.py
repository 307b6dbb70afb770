"""Attention specs shared by the families: head counts, and which layers see a window or a chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvarn.core.errors import ConfigError
from kvarn.core.geometry.reader import ConfigReader
from kvarn.core.specs import LayerSpec

Slides = Callable[[int], bool]

FULL_NAMES = frozenset({"full_attention", "attention", "global_attention", "hybrid", "global", "full"})
SLIDING_NAMES = frozenset({"sliding_attention", "hybrid_sliding", "local", "local_attention", "sliding"})
CHUNKED_NAMES = frozenset({"chunked_attention"})
LINEAR_NAMES = frozenset({"linear_attention", "mamba", "mamba2", "recurrent", "conv", "short_conv"})


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, KV heads and the two head dims of one layer."""

    query: int
    kv: int
    k_dim: int
    v_dim: int

    def spec(self, *, window: int | None = None, chunk: int | None = None) -> LayerSpec:
        return LayerSpec(
            kv_heads=self.kv,
            k_dim=self.k_dim,
            v_dim=self.v_dim,
            query_heads=self.query,
            window_tokens=window,
            chunk_tokens=chunk,
        )


def heads(c: ConfigReader) -> Heads:
    """The usual keys. head_dim counts where it is stated; hidden / heads only where it is not."""
    query = c.size("num_attention_heads", "n_head", "n_heads", "num_heads")
    kv = c.optional_size("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num") or query
    dim = c.optional_size("head_dim", "kv_channels", "attention_head_dim")
    if dim is None:
        hidden = c.size("hidden_size", "n_embd", "d_model", "dim")
        if hidden % query:
            raise ConfigError(f"hidden_size {hidden} does not divide by {query} heads and no head_dim is stated")
        dim = hidden // query
    if query % kv:
        raise ConfigError(f"{query} query heads do not divide into {kv} KV heads")
    return Heads(query, kv, dim, c.optional_size("v_head_dim") or dim)


def every(period: int, *, full_first: bool = False) -> Slides:
    """Of each `period` layers one sees everything: the last of them, or the first."""
    return (lambda i: i % period != 0) if full_first else (lambda i: (i + 1) % period != 0)


def all_slide(_: int) -> bool:
    return True


def none_slides(_: int) -> bool:
    return False


def window_of(c: ConfigReader, *names: str) -> int | None:
    """The window in tokens, the query's own counted; None where the config switches it off or has none."""
    use = c.get("use_sliding_window")
    window = c.get("sliding_window", *names)
    if use is False or window in (None, 0, -1):
        c.understood(("sliding_window", *names))
        return None
    return c.size("sliding_window", *names)


def slides_by_config(c: ConfigReader, n_layers: int, default: Slides) -> list[bool]:
    """Which layers slide: layer_types where stated, then a stated period, then the architecture's habit.
    Raises ConfigError for a layer type that is not understood."""
    stated = c.per_layer("layer_types", n_layers)
    if stated is not None:
        if strange := sorted({str(t) for t in stated} - FULL_NAMES - SLIDING_NAMES):
            raise ConfigError(f"layer_types holds {', '.join(strange)}, which {c.model_type} layers cannot be here")
        return [t in SLIDING_NAMES for t in stated]
    pattern = c.get("sliding_window_pattern", "_sliding_window_pattern")
    if isinstance(pattern, str):
        letters = [pattern[i % len(pattern)] for i in range(n_layers)]
        letters[-1] = "G"  # EXAONE 4: the last layer is always global
        return [letter == "L" for letter in letters]
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        default = every(pattern)
    return [default(i) for i in range(n_layers)]


def attention_specs(c: ConfigReader, h: Heads, n_layers: int, slides: Slides = none_slides) -> list[LayerSpec]:
    """One spec a layer, windows set where the config and the architecture say so."""
    window = window_of(c)
    which = slides_by_config(c, n_layers, slides)
    return [h.spec(window=window if slid else None) for slid in which]


def mixer_kinds(c: ConfigReader, n_layers: int, *names: str) -> list[str] | None:
    """layer_types of a hybrid as 'attention', 'sliding' or 'linear' (recurrent, convolution), None where unstated.
    Raises ConfigError for a type that is not understood."""
    stated = c.per_layer(names[0], n_layers, *names[1:])
    if stated is None:
        return None
    kinds = []
    for name in stated:
        if name in FULL_NAMES:
            kinds.append("attention")
        elif name in SLIDING_NAMES:
            kinds.append("sliding")
        elif name in LINEAR_NAMES:
            kinds.append("linear")
        else:
            raise ConfigError(f"{names[0]} holds {name!r}, which is not understood for {c.model_type}")
    return kinds
