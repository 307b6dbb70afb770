"""Prefill, decode and tokens/s of a case on a device: limits, or what Kvarn's engine was measured to do."""

from __future__ import annotations

from dataclasses import replace

from kvarn.planner.case import Case, read_bytes
from kvarn.planner.memory import CacheBudget
from kvarn.planner.result import BatchPoint, Times
from kvarn.planner.roofline import Device, Work, decode_work, limit, prefill_work
from kvarn.planner.speed import EngineSpeed
from kvarn.planner.weights import published

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def number_type(case: Case) -> str:
    """What the matrix products are computed in."""
    name = (case.settings.weights or published(case.geometry)).lower()
    return "fp8" if "8" in name and "f" in name else "f32" if "32" in name else "bf16"


def times_of(case: Case, device: Device | None, budget: CacheBudget | None) -> Times:
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
    if device.kvarn is None or case.profile.name != "kvarn" or case.settings.devices != 1:
        return None
    return device.kvarn.of(case.weight_width)


def _predicted_step(case: Case, device: Device, work: Work) -> float | None:
    """Seconds of a decode step with the engine's measured overheads; many rows are bound by its FLOP/s."""
    speed = engine_speed(case, device)
    if speed is None:
        return None
    step_s = speed.decode_s(len(case.geometry.layers), work.weight_bytes, work.kv_bytes)
    return max(step_s, work.flops / speed.prefill_flops)
