"""From a case and a device to a plan. Pure: reads no file, asks no machine."""

from __future__ import annotations

from dataclasses import replace

from kvarn.core.specs import LayerSpec
from kvarn.planner.case import Case, build_case, replica_sequences
from kvarn.planner.memory import LEFT_TO_OTHERS, CacheBudget, cache_budget, cache_terms, other_terms
from kvarn.planner.profiles.base import Split
from kvarn.planner.result import Capacity, DeviceFigures, KVFigures, Plan, RankKV, Verdict, WeightFigures
from kvarn.planner.roofline import Device
from kvarn.planner.settings import Settings
from kvarn.planner.sizes import MAX_TOKENS, show_both, show_bytes, show_tokens
from kvarn.planner.terms import Term
from kvarn.planner.times import times_of
from kvarn.planner.weights import AS_STORED, published
from kvarn.planner.words import layer_groups, notes_of, provenance_of


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
        time=times_of(case, device, budget),
        terms=terms,
        process_bytes=sum(t.bytes for t in terms if t.name != LEFT_TO_OTHERS),
        provenance=provenance_of(case, device),
        device=DeviceFigures(device.name, device.memory_bytes, settings.devices, device.memory_bytes - used)
        if device
        else None,
        cache_bytes=budget.bytes if budget else None,
        cache_low=budget.low if budget else None,
        cache_high=budget.high if budget else None,
        cache_how=budget.how if budget else "",
        groups=layer_groups(case),
        details=cache.details(),
        lines=cache.lines(budget.bytes) if budget else (),
        notes=notes_of(case, cache),
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


def _whole(spec: LayerSpec) -> LayerSpec:
    if spec.window_tokens is None and spec.chunk_tokens is None:
        return spec  # a copy is slow, and most layers of most models need none
    return replace(spec, window_tokens=None, chunk_tokens=None)


def _unwindowed(case: Case, layers: tuple[LayerSpec, ...], settings: Settings) -> int:
    """Bytes a token while every layer still keeps it."""
    whole = tuple(_whole(spec) for spec in layers)
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


__all__ = ["Case", "build_case", "make_plan"]
