"""Geometry from factors given by hand: `--layers 80 --kv-heads 8 --head-dim 128`."""

from __future__ import annotations

from kvarn.core.errors import InvalidRequest
from kvarn.core.geometry.model import ModelGeometry, ParameterCount
from kvarn.core.specs import LayerSpec

_MOST = 1 << 31


def geometry_from_factors(
    layers: int,
    kv_heads: int,
    head_dim: int,
    *,
    query_heads: int | None = None,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    vocab_size: int | None = None,
    window_tokens: int | None = None,
    parameters: int | None = None,
    dtype: str = "bfloat16",
) -> ModelGeometry:
    """A model of equal layers. What is not given stays unknown: without query_heads one per KV head is assumed (noted),
    without hidden_size it is query_heads * head_dim (noted). parameters: total, for the weights' bytes.

    Raises InvalidRequest for figures below 1, absurd ones, and head counts that do not divide.
    """
    given = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
    optional = {"query_heads": query_heads, "hidden_size": hidden_size, "window_tokens": window_tokens}
    optional |= {"intermediate_size": intermediate_size, "vocab_size": vocab_size}
    for name, value in (given | {k: v for k, v in optional.items() if v is not None}).items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MOST:
            raise InvalidRequest(f"{name} is {value!r}", fixes=(f"give {name} as an integer from 1 to {_MOST - 1}",))
    if layers > 1 << 16:
        raise InvalidRequest(f"layers is {layers}", fixes=("give at most 65536 layers",))
    notes = []
    if query_heads is None:
        query_heads = kv_heads
        notes.append("query heads not given: one a KV head is assumed (it does not change the cache)")
    if query_heads % kv_heads:
        raise InvalidRequest(
            f"{query_heads} query heads do not divide into {kv_heads} KV heads",
            fixes=("give a multiple of the KV heads",),
        )
    if hidden_size is None:
        hidden_size = query_heads * head_dim
        notes.append(f"hidden size not given: query heads x head dim = {hidden_size} is assumed")
    spec = LayerSpec(kv_heads, head_dim, head_dim, query_heads, window_tokens=window_tokens)
    return ModelGeometry(
        architecture="factors",
        layers=(spec,) * layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size or 0,
        dtype=dtype,
        name=f"{layers} layers x {kv_heads} KV heads x {head_dim}",
        provenance="factors given by hand",
        notes=tuple(notes),
        parameters=ParameterCount(0, 0, parameters) if parameters else None,
        intermediate_size=intermediate_size or 0,
    )
