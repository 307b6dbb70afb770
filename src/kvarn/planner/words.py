"""A case in words: its layers, where its figures came from, what was assumed."""

from __future__ import annotations

from collections import Counter

from kvarn import __version__
from kvarn.core.specs import LayerKind, LayerSpec
from kvarn.planner.case import Case, layer_token
from kvarn.planner.profiles.base import EngineCache
from kvarn.planner.ranks import with_compressed
from kvarn.planner.result import LayerGroup, Provenance
from kvarn.planner.roofline import Device


def shape_words(spec: LayerSpec) -> str:
    """A layer's spec in words."""
    parts = []
    if spec.kind is LayerKind.SHARED:
        return f"reads the cache of layer {spec.shares_layer}"
    if spec.kind is LayerKind.LATENT:
        parts.append(f"latent {spec.latent_dim} + rope {spec.rope_dim}, once for {spec.query_heads} heads")
    elif spec.kv_heads:
        dims = f"{spec.k_dim}" if spec.k_dim == spec.v_dim else f"K {spec.k_dim}, V {spec.v_dim}"
        parts.append(f"{spec.query_heads} query heads on {spec.kv_heads} KV heads of {dims}")
    if spec.index_dim:
        parts.append(f"indexer key {spec.index_dim}")
    if spec.compress_tokens:
        parts.append(f"{spec.compressed_dim} numbers stay for every {spec.compress_tokens} tokens")
    if spec.window_tokens:
        parts.append(f"window {spec.window_tokens:,}")
    if spec.chunk_tokens:
        parts.append(f"chunks of {spec.chunk_tokens:,}")
    parts += [f"{t.name} state {t.elements:,} x {t.dtype}" for t in spec.state]
    return ", ".join(parts) or "nothing"


def attention_name(spec: LayerSpec) -> str:
    """MHA, GQA, MQA, MLA, or what else a layer is."""
    if spec.kind is LayerKind.LATENT:
        name = "MLA"
    elif spec.kind is LayerKind.ATTENTION:
        name = "MHA" if spec.kv_heads == spec.query_heads else "MQA" if spec.kv_heads == 1 else "GQA"
    else:
        return spec.kind.value
    where = " window" if spec.window_tokens else " chunked" if spec.chunk_tokens else ""
    return name + where + (" + state" if spec.state else "")


def layer_groups(case: Case) -> tuple[LayerGroup, ...]:
    return tuple(
        LayerGroup(
            attention_name(spec),
            n,
            shape_words(spec),
            n * sum(layer_token(case, part).total for part in with_compressed((spec,)) if spec.shares_layer is None),
            n * spec.state_bytes,
        )
        for spec, n in Counter(case.geometry.layers).items()
    )


def provenance_of(case: Case, device: Device | None) -> Provenance:
    g, s = case.geometry, case.settings
    assumed = [*g.notes]
    if g.unknown_keys:
        assumed.append(
            f"config keys that look like cache geometry and were not understood: {', '.join(g.unknown_keys)}"
        )
    return Provenance(
        model=g.provenance or "given",
        hardware=(device.source or device.name) if device else "none given",
        engine=f"{case.profile.name} {s.version.text or '(latest rules known)'}",
        kvarn=__version__,
        assumptions=tuple(assumed),
    )


def notes_of(case: Case, cache: EngineCache) -> tuple[str, ...]:
    s, g = case.settings, case.geometry
    found = [*case.profile.notes, *cache.notes()]
    if g.max_context and s.context_tokens > g.max_context:
        found.append(
            f"context {s.context_tokens:,} is beyond the {g.max_context:,} tokens that the model was made for; computed"
        )
    kv_heads = max((spec.kv_heads for spec in g.layers), default=0)
    if kv_heads and s.tp > kv_heads:
        found.append(
            f"tensor parallel {s.tp} is more than {kv_heads} KV heads: each is kept by {s.tp // kv_heads} ranks"
        )
    if s.tp > 1 and any(spec.latent_dim for spec in g.layers):
        found.append("MLA latents are kept whole by every tensor-parallel rank")
    if s.dp > 1:
        found.append(f"each of {s.dp} replicas keeps its own sequences whole; capacity is one replica's")
    return tuple(found)
