"""What one rank keeps: a model's layer specs under tensor and pipeline parallelism.

Tensor parallel divides KV heads (and recurrent state) and replicates what cannot be divided: one KV head when there are
more ranks than heads, and MLA latents always. Pipeline parallel gives each stage whole layers; the pool is the minimum
over the stages. Data parallel divides nothing: every replica keeps its own sequences whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvarn.core.errors import IncompatiblePlan
from kvarn.core.specs import LayerKind, LayerSpec, StateTensor


def rank_heads(kv_heads: int, tp: int) -> int:
    """KV heads of one rank. Raises IncompatiblePlan unless one number divides the other."""
    if kv_heads % tp and tp % kv_heads:
        near = [d for d in range(1, max(tp, kv_heads) + 1) if kv_heads % d == 0 or d % kv_heads == 0]
        fits = sorted(near, key=lambda d: abs(d - tp))[:3]
        raise IncompatiblePlan(
            f"tensor parallel {tp} and {kv_heads} KV heads: neither divides the other",
            fixes=(f"use --tp {' or '.join(str(d) for d in sorted(fits))}",),
        )
    return max(1, kv_heads // tp)


def _rank_state(tensor: StateTensor, tp: int) -> StateTensor:
    if tensor.elements % tp:
        raise IncompatiblePlan(
            f"tensor parallel {tp} does not divide the {tensor.elements} numbers of {tensor.name} state"
        )
    return replace(tensor, elements=tensor.elements // tp)


def rank_layer(spec: LayerSpec, tp: int, *, heads_known: bool = True) -> LayerSpec:
    """The part of one layer that one of `tp` ranks keeps. heads_known: false where the query heads are an assumption,
    which then is no reason to refuse. Raises IncompatiblePlan."""
    if tp == 1:
        return spec
    state = tuple(_rank_state(t, tp) for t in spec.state)
    if spec.kind is LayerKind.LATENT:
        return replace(spec, state=state, query_heads=max(1, spec.query_heads // tp))
    if not spec.kv_heads:
        return replace(spec, state=state)
    heads = rank_heads(spec.kv_heads, tp)
    if not heads_known:
        return replace(
            spec, kv_heads=heads, query_heads=max(heads, spec.query_heads // tp // heads * heads), state=state
        )
    if spec.query_heads % tp:
        raise IncompatiblePlan(
            f"tensor parallel {tp} does not divide the {spec.query_heads} query heads",
            fixes=(f"use a divisor of {spec.query_heads}",),
        )
    queries = spec.query_heads // tp
    if queries % heads:
        raise IncompatiblePlan(
            f"tensor parallel {tp}: {queries} query heads a rank over {heads} KV heads do not divide"
        )
    return replace(spec, kv_heads=heads, query_heads=queries, state=state)


def with_compressed(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Layers whose compressed entries stand as layers of their own: d numbers for every n tokens are d / n a token of
    the whole context, beside what the window keeps (DeepSeek-V4)."""
    found: list[LayerSpec] = []
    for spec in layers:
        found.append(replace(spec, compressed_dim=0, compress_tokens=0))
        if spec.compress_tokens:
            each = -(-spec.compressed_dim // spec.compress_tokens)
            found.append(LayerSpec(latent_dim=each, query_heads=spec.query_heads))
    return tuple(found)


def stage_sizes(n_layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each pipeline stage, as even as can be; what is left over goes to the later stages but the last, which
    has the output head as well (vLLM's rule). Raises IncompatiblePlan for more stages than layers."""
    if pp > n_layers:
        raise IncompatiblePlan(f"pipeline parallel {pp} has more stages than the model's {n_layers} layers")
    sizes = [n_layers // pp] * pp
    for i in range(n_layers % pp):
        sizes[max(0, pp - 2 - i)] += 1
    return tuple(sizes)


def rank_stages(
    layers: Sequence[LayerSpec], tp: int, pp: int, *, heads_known: bool = True
) -> tuple[tuple[LayerSpec, ...], ...]:
    """The layer specs of one rank of each stage, in order. Raises IncompatiblePlan."""
    stages, start = [], 0
    for size in stage_sizes(len(layers), pp):
        stages.append(tuple(rank_layer(spec, tp, heads_known=heads_known) for spec in layers[start : start + size]))
        start += size
    return tuple(stages)
