"""A case: one model on one engine with settings resolved, cut into ranks. Pure: reads no file, asks no machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from kvarn.core.geometry import ModelGeometry
from kvarn.core.specs import LayerKind, LayerSpec
from kvarn.planner.profiles.base import EngineCache, Profile, Split
from kvarn.planner.ranks import rank_stages, with_compressed
from kvarn.planner.settings import Settings
from kvarn.planner.terms import Term
from kvarn.planner.weights import held_by_kvarn, model_weights, rank_weights


@dataclass(frozen=True)
class Case:
    """One model on one engine with settings resolved; the caches of a whole copy and of each pipeline stage's rank.

    weights: as stored or published; stage_weights: as each stage's rank holds them. weight_width: bytes of one weight
    that a product reads."""

    geometry: ModelGeometry
    profile: Profile
    settings: Settings
    whole: EngineCache
    stages: tuple[EngineCache, ...]
    weights: Term
    stage_weights: tuple[Term, ...]
    weight_width: float


def heads_known(geometry: ModelGeometry) -> bool:
    """Whether the query heads are the model's own, not assumed."""
    return geometry.architecture != "factors"


def build_case(geometry: ModelGeometry, profile: Profile, asked: Settings) -> Case:
    """Resolve the engine's defaults and cut the model into ranks. Raises IncompatiblePlan, UnknownName."""
    settings = profile.resolve(asked, geometry.dtype)
    layers = geometry.layers
    if geometry.drafts and settings.draft_layers:
        layers = (*layers, *geometry.drafts[: settings.draft_layers])
        settings = replace(settings, draft_layers=max(0, settings.draft_layers - len(geometry.drafts)))
    known = heads_known(geometry)
    cut = rank_stages(layers, settings.tp, settings.pp, heads_known=known)
    weights = model_weights(geometry, settings.weights)
    held = held_by_kvarn(geometry, settings.weights) if profile.name == "kvarn" else None
    counted = geometry.parameters.total if geometry.parameters else 0
    loaded, width = held or (weights, weights.bytes / counted if counted else 0.0)
    return Case(
        geometry,
        profile,
        settings,
        profile.cache(with_compressed(layers), replace(settings, tp=1, pp=1)),
        tuple(profile.cache(with_compressed(stage), settings) for stage in cut),
        weights,
        tuple(rank_weights(geometry, loaded, i, settings) for i in range(len(cut))),
        width,
    )


def replica_sequences(settings: Settings) -> int:
    """Sequences of one data-parallel replica: the fullest one's."""
    return -(-settings.sequences // settings.dp)


def read_bytes(case: Case, context: int) -> float:
    """Cache bytes that one sequence's decode step reads: what its queries see, not what is reserved."""
    seen = Split()
    for spec, n in Counter(with_compressed(case.geometry.layers)).items():
        window = spec.window_tokens or spec.chunk_tokens or context
        seen += layer_token(case, spec).times(n * min(context, window))
    return seen.total + 2 * sum(s.state_bytes for s in case.geometry.layers)


def layer_token(case: Case, spec: LayerSpec) -> Split:
    """Bytes a token of one layer; one that shares a cache reads its source's."""
    if spec.shares_layer is not None:
        spec = case.geometry.layers[spec.shares_layer]
    if spec.kind not in (LayerKind.ATTENTION, LayerKind.LATENT):
        return Split()
    return case.profile.cache((replace(spec, window_tokens=None, chunk_tokens=None),), case.settings).growth()
