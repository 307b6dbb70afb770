"""From a geometry, a device, an engine and settings to a plan. Pure: reads no file, asks no machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from kvarn import __version__
from kvarn.core.geometry import ModelGeometry
from kvarn.core.specs import LayerKind, LayerSpec
from kvarn.planner.memory import LEFT_TO_OTHERS, CacheBudget, cache_budget, cache_terms, other_terms
from kvarn.planner.profiles.base import EngineCache, Profile, Split
from kvarn.planner.ranks import rank_stages, with_compressed
from kvarn.planner.result import (
    BatchPoint,
    Capacity,
    DeviceFigures,
    KVFigures,
    LayerGroup,
    Plan,
    Provenance,
    RankKV,
    Times,
    Verdict,
    WeightFigures,
)
from kvarn.planner.roofline import Device, Work, decode_work, limit, prefill_work
from kvarn.planner.settings import Settings
from kvarn.planner.sizes import MAX_TOKENS, show_both, show_bytes, show_tokens
from kvarn.planner.speed import EngineSpeed
from kvarn.planner.terms import Term
from kvarn.planner.weights import AS_STORED, held_by_kvarn, model_weights, published, rank_weights

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


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


def make_plan(case: Case, device: Device | None) -> Plan:
    """Everything that is asked of a plan. Raises nothing but what the sizing raises for impossible figures."""
    settings, geometry = case.settings, case.geometry
    sequences = replica_sequences(settings)
    stage, fixed, budget = _tightest(case, device, sequences)
    cache = case.stages[stage]
    held = cache.held(sequences, settings.context_tokens)
    verdict, reason = _verdict(case, device, budget, held, sequences)
    terms = (*fixed, *cache_terms(held)) if fixed else (case.stage_weights[stage], *cache_terms(held))
    if budget is not None and budget.reserve is not None:
        terms = (*terms, budget.reserve)
    used = sum(t.bytes for t in terms)
    return Plan(
        verdict=verdict,
        reason=reason,
        model=geometry.name or geometry.architecture,
        architecture=geometry.architecture,
        engine=case.profile.name + (f"@{settings.version.text}" if settings.version.text else ""),
        context=settings.context_tokens,
        model_context=geometry.max_context,
        sequences=settings.sequences,
        batch=settings.batch,
        tp=settings.tp,
        pp=settings.pp,
        dp=settings.dp,
        kv=_kv(case, stage, sequences),
        weights=_weights(case, stage),
        capacity=_capacity(case, budget, sequences),
        time=_times(case, device, budget),
        terms=terms,
        process_bytes=sum(t.bytes for t in terms if t.name != LEFT_TO_OTHERS),
        provenance=_provenance(case, device),
        device=DeviceFigures(device.name, device.memory_bytes, settings.devices, device.memory_bytes - used)
        if device
        else None,
        cache_bytes=budget.bytes if budget else None,
        cache_low=budget.low if budget else None,
        cache_high=budget.high if budget else None,
        cache_how=budget.how if budget else "",
        groups=_groups(case),
        details=cache.details(),
        lines=cache.lines(budget.bytes) if budget else (),
        notes=_notes(case, cache),
    )


def _tightest(case: Case, device: Device | None, sequences: int) -> tuple[int, tuple[Term, ...], CacheBudget | None]:
    """The stage with the least room, the terms beside its cache, and its cache's budget."""
    settings, found = case.settings, []
    for i, cache in enumerate(case.stages):
        held = cache.held(sequences, settings.context_tokens).total
        if device is None and settings.kv_memory_bytes is None:
            found.append((-held, i, (), None))
            continue
        fixed: tuple[Term, ...] = ()
        if device is not None:
            rank = cache.layers
            fixed = (
                case.stage_weights[i],
                *other_terms(case.geometry, case.profile, rank, settings, device),
            )
        if device is not None or settings.kv_memory_bytes is not None:
            total = device.memory_bytes if device else 0
            budget = cache_budget(case.profile, settings, total, fixed)
            found.append((budget.bytes - held, i, fixed, budget))
    _, stage, fixed, budget = min(found, key=lambda entry: entry[0])
    return stage, fixed, budget


def _verdict(
    case: Case, device: Device | None, budget: CacheBudget | None, held: Split, sequences: int
) -> tuple[Verdict, str]:
    """Fits, does not, or cannot be told: unknown memory, unknown weights, or within the range of the estimates."""
    need = f"{sequences} x {show_tokens(case.settings.context_tokens)} tokens need {show_both(held.total)} of cache"
    where = " a rank" if case.settings.tp * case.settings.pp > 1 else ""
    if budget is None:
        return "unknown", f"{need}{where}; no hardware and no --kv-memory was given, so whether that fits is open"
    if device is not None and case.settings.kv_memory_bytes is None and case.weights.certainty == "unknown":
        return "unknown", f"{need}{where}; the weights' size is unknown: state --weights-size or --kv-memory"
    have = f"{show_both(budget.bytes)} are left for it"
    alone = min(t.low for t in case.stage_weights)
    if device is not None and alone > device.memory_bytes:
        return "does_not_fit", f"{need}{where}; the weights alone are {show_both(alone)}, more than the device has"
    over = _over_device(case, device, budget)
    if over:
        return "does_not_fit", f"{need}{where}; with weights that is {show_both(over)} more than the device has"
    if held.total <= budget.low:
        return "fits", f"{need}{where}; {have}"
    if held.total > budget.high:
        return "does_not_fit", f"{need}{where}; {have}, {show_both(held.total - budget.bytes)} too little"
    span = f"{show_bytes(budget.low)} to {show_bytes(budget.high)}"
    return "unknown", f"{need}{where}; {have}, {span} over the range of the estimates: too close to tell"


def _over_device(case: Case, device: Device | None, budget: CacheBudget) -> int:
    """Bytes by which an asked-for cache and the weights exceed the device; 0 where they do not."""
    if device is None or case.settings.kv_memory_bytes is None:
        return 0
    return max(0, min(t.low for t in case.stage_weights) + budget.bytes - device.memory_bytes)


def _unwindowed(case: Case, layers: tuple[LayerSpec, ...], settings: Settings) -> int:
    """Bytes a token while every layer still keeps it."""
    whole = tuple(replace(spec, window_tokens=None, chunk_tokens=None) for spec in layers)
    return case.profile.cache(whole, settings).growth().total


def _kv(case: Case, stage: int, sequences: int) -> KVFigures:
    s, cache = case.settings, case.stages[stage]
    inside, inside_rank = (
        _unwindowed(case, case.whole.layers, replace(s, tp=1, pp=1)),
        _unwindowed(case, cache.layers, s),
    )
    whole, part = case.whole.held(s.sequences, s.context_tokens), cache.held(sequences, s.context_tokens)
    rank = RankKV(
        cache.growth().total or inside_rank,
        cache.held(1, s.context_tokens).total,
        part.total,
        part.k,
        part.v,
        part.state,
        stage,
    )
    return KVFigures(
        case.whole.growth().total or inside,
        case.whole.held(1, s.context_tokens).total,
        whole.total,
        whole.k,
        whole.v,
        whole.state,
        inside,
        s.kv_k or "",
        s.kv_v or "",
        rank,
    )


def _weights(case: Case, stage: int) -> WeightFigures:
    counted = case.geometry.parameters
    stored = case.geometry.stored_weight_bytes is not None and case.settings.weights in AS_STORED
    asked = case.settings.weights if case.settings.weights not in AS_STORED else None
    return WeightFigures(
        case.weights.bytes,
        counted.total if counted else None,
        counted.active if counted else None,
        "as stored" if stored else asked or published(case.geometry),
        case.stage_weights[stage].bytes,
    )


def _capacity(case: Case, budget: CacheBudget | None, sequences: int) -> Capacity:
    """The minimum over the stages; each stage may have its own room, here all get the tightest stage's."""
    block = getattr(case.stages[0], "block_tokens", None)
    if budget is None:
        return Capacity(block_tokens=block)
    s, room = case.settings, budget.bytes
    blocks = [b for b in (c.blocks(room) for c in case.stages) if b is not None]
    return Capacity(
        min(blocks) if blocks else None,
        block,
        min(c.tokens(room) for c in case.stages),
        _longest(case, room, sequences),
        min(c.concurrency(room, s.context_tokens) for c in case.stages),
    )


def _longest(case: Case, room: int, sequences: int) -> int:
    """The longest context that fits; the model's own where memory sets no limit (windows and state only)."""
    found = min(c.longest(room, sequences) for c in case.stages)
    limit_tokens = case.geometry.max_context
    return limit_tokens if found >= MAX_TOKENS // 2 and limit_tokens else found


def number_type(case: Case) -> str:
    """What the matrix products are computed in."""
    name = (case.settings.weights or published(case.geometry)).lower()
    return "fp8" if "8" in name and "f" in name else "f32" if "32" in name else "bf16"


def read_bytes(case: Case, context: int) -> float:
    """Cache bytes that one sequence's decode step reads: what its queries see, not what is reserved."""
    seen = Split()
    for spec, n in Counter(with_compressed(case.geometry.layers)).items():
        window = spec.window_tokens or spec.chunk_tokens or context
        seen += _layer_token(case, spec).times(n * min(context, window))
    return seen.total + 2 * sum(s.state_bytes for s in case.geometry.layers)


def _layer_token(case: Case, spec: LayerSpec) -> Split:
    """Bytes a token of one layer; one that shares a cache reads its source's."""
    if spec.shares_layer is not None:
        spec = case.geometry.layers[spec.shares_layer]
    if spec.kind not in (LayerKind.ATTENTION, LayerKind.LATENT):
        return Split()
    return case.profile.cache((replace(spec, window_tokens=None, chunk_tokens=None),), case.settings).growth()


def _times(case: Case, device: Device | None, budget: CacheBudget | None) -> Times:
    g, s = case.geometry, case.settings
    if g.parameters is None:
        return Times()
    per_weight, kv_read = case.weight_width, read_bytes(case, s.context_tokens)
    prefill = prefill_work(g, s, s.context_tokens, per_weight)
    decode = decode_work(g, s, s.batch, s.context_tokens, per_weight, kv_read)
    figures = Times(
        prefill_flops=prefill.flops,
        decode_flops=decode.flops,
        decode_weight_bytes=int(decode.weight_bytes),
        decode_kv_bytes=int(decode.kv_bytes),
    )
    if device is None:
        return figures
    first, step = limit(prefill, device, s, number_type(case)), limit(decode, device, s, number_type(case))
    if first is None or step is None:
        return figures
    speed, step_s = engine_speed(case, device), _predicted_step(case, device, decode) or step.seconds
    first_s = speed.prefill_s(len(g.layers), s.context_tokens, prefill.flops) if speed else first.seconds
    return replace(
        figures,
        prefill_s=first_s,
        decode_s_per_token=step_s,
        bound_by=step.bound_by,
        prefill_bound_by=first.bound_by,
        tokens_per_s=s.batch * s.dp / step_s,
        basis="predicted" if speed else "roofline",
        batches=_batches(case, device, budget, kv_read),
    )


def _batches(case: Case, device: Device, budget: CacheBudget | None, kv_read: float) -> tuple[BatchPoint, ...]:
    """Tokens a second against batch, at the planned context."""
    found, context = [], case.settings.context_tokens
    for batch in BATCHES:
        work = decode_work(case.geometry, case.settings, batch, context, case.weight_width, kv_read)
        timing = limit(work, device, case.settings, number_type(case))
        if timing is None:
            return ()
        seconds = _predicted_step(case, device, work) or timing.seconds
        fits = None if budget is None else all(c.held(batch, context).total <= budget.bytes for c in case.stages)
        found.append(BatchPoint(batch, seconds, batch / seconds, timing.bound_by, fits))
    return tuple(found)


def engine_speed(case: Case, device: Device) -> EngineSpeed | None:
    """What Kvarn's engine was measured to do on this machine, where that is what is planned."""
    return device.kvarn if case.profile.name == "kvarn" and case.settings.devices == 1 else None


def _predicted_step(case: Case, device: Device, work: Work) -> float | None:
    """Seconds of a decode step with the engine's measured overheads; many rows are bound by its FLOP/s."""
    speed = engine_speed(case, device)
    if speed is None:
        return None
    step_s = speed.decode_s(len(case.geometry.layers), work.weight_bytes, work.kv_bytes)
    return max(step_s, work.flops / speed.prefill_flops)


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


def _groups(case: Case) -> tuple[LayerGroup, ...]:
    return tuple(
        LayerGroup(
            attention_name(spec),
            n,
            shape_words(spec),
            n * sum(_layer_token(case, part).total for part in with_compressed((spec,)) if spec.shares_layer is None),
            n * spec.state_bytes,
        )
        for spec, n in Counter(case.geometry.layers).items()
    )


def _provenance(case: Case, device: Device | None) -> Provenance:
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


def _notes(case: Case, cache: EngineCache) -> tuple[str, ...]:
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


__all__ = ["Case", "build_case", "heads_known", "make_plan", "read_bytes"]
