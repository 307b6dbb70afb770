"""'Change X to get Y': one change at a time, each planned anew, ranked by what it gains; each with its price."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import files

from kvarn.core.errors import KvarnError
from kvarn.core.formats import format_names
from kvarn.core.specs import LayerKind, LayerSpec
from kvarn.planner.compute import Case, build_case, make_plan
from kvarn.planner.report import table
from kvarn.planner.result import Plan
from kvarn.planner.roofline import Device
from kvarn.planner.settings import Settings
from kvarn.planner.sizes import show_bytes, show_tokens
from kvarn.planner.weights import published

PEER_FORMATS = {
    "vllm": ("fp8", "nvfp4"),
    "sglang": ("fp8",),
    "llama.cpp": ("q8_0", "q4_0"),
    "ollama": ("q8_0", "q4_0"),
    "tensorrt-llm": ("fp8", "nvfp4"),
    "mlc": (),
}
WINDOW_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Advice:
    """One change. kind: 'setting' (a flag), 'policy' (a technique of Kvarn's cache) or 'model' (another architecture,
    for comparison). saved_bytes: on the fullest device, for the same sequences; concurrency: times as many at once;
    context: times as long, where memory sets no limit up to the length that the model was made for. price: what it
    costs in quality or speed."""

    change: str
    kind: str
    verdict: str
    saved_bytes: int
    concurrency: float | None
    context: float | None
    price: str


def prices() -> dict[str, str]:
    """What techniques cost, in words; measured ones say on what."""
    text = files("kvarn.planner").joinpath("prices.toml").read_text(encoding="utf-8")
    return {name: entry["price"] for name, entry in tomllib.loads(text).items()}


def _formats(case: Case) -> tuple[str, ...]:
    if case.profile.name == "kvarn":
        return tuple(n for n in format_names() if n != case.settings.kv_k)
    return tuple(n for n in PEER_FORMATS.get(case.profile.name, ()) if n != case.settings.kv_k)


def _setting_changes(case: Case, asked: Settings) -> Iterator[tuple[str, str, Settings]]:
    """(words, name of the price, settings)."""
    for name in _formats(case):
        yield f"--kv {name}", f"kv.{name}", replace(asked, kv_k=name, kv_v=name)
    stored = case.settings.weights or published(case.geometry)
    if "8" not in stored and "4" not in stored and case.geometry.stored_weight_bytes is None:
        for name in ("fp8", "int4"):
            yield f"--weights {name}", f"weights.{name}", replace(asked, weights=name)
    if case.profile.budget == "all":  # llama.cpp and ollama split by layers
        yield f"--pp {2 * asked.pp}", "pp", replace(asked, pp=2 * asked.pp)
    else:
        yield f"--tp {2 * asked.tp}", "tp", replace(asked, tp=2 * asked.tp)
    if asked.context_tokens > 1024:
        yield (
            f"--context {asked.context_tokens // 2}",
            "context",
            replace(asked, context_tokens=asked.context_tokens // 2),
        )
    if asked.sequences > 1:
        half = asked.sequences // 2
        yield f"--concurrency {half}", "concurrency", replace(asked, sequences=half, batch=min(asked.batch, half))
    if case.profile.budget in ("total", "static") and asked.memory_fraction is None and asked.kv_memory_bytes is None:
        flag = next((f.names[0] for f in case.profile.flags if f.field == "memory_fraction"), None)
        if flag:
            yield f"{flag} 0.95", "fraction", replace(asked, memory_fraction=0.95)
    tokens = case.settings.batched_tokens
    flag = next((f.names[0] for f in case.profile.flags if f.field == "batched_tokens"), None)
    if tokens and tokens > 1024 and flag:
        yield f"{flag} {tokens // 4}", "batched", replace(asked, batched_tokens=tokens // 4)


def _full_layers(layers: Iterable[LayerSpec], change) -> tuple[LayerSpec, ...]:
    """Layers with plain full attention changed, the others as they are."""
    return tuple(change(s) if s.kind is LayerKind.ATTENTION and not s.window_tokens else s for s in layers)


def _model_changes(case: Case) -> Iterator[tuple[str, str, str, tuple[LayerSpec, ...]]]:
    """(words, kind, name of the price, layers)."""
    layers = case.geometry.layers
    full = [s for s in layers if s.kind is LayerKind.ATTENTION and not s.window_tokens]
    if not full:
        return
    if case.settings.context_tokens > WINDOW_TOKENS:
        yield (
            f"window of {WINDOW_TOKENS} tokens and attention sinks",
            "policy",
            "window",
            _full_layers(layers, lambda s: replace(s, window_tokens=WINDOW_TOKENS)),
        )
    keep = max(1, case.settings.context_tokens // 4)
    yield (
        "evict tokens: keep a quarter (H2O and kin)",
        "policy",
        "eviction",
        _full_layers(layers, lambda s: replace(s, window_tokens=keep)),
    )
    yield "neighbouring layers share one cache", "policy", "sharing", _paired(layers)
    for heads, name in ((8, "GQA with 8 KV heads"), (1, "MQA with 1 KV head")):
        if all(s.kv_heads > heads and s.query_heads % heads == 0 for s in full):
            changed = _full_layers(layers, lambda s, heads=heads: replace(s, kv_heads=heads))
            yield f"a model with {name}", "model", "heads", changed


def _paired(layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Every second layer of two equal neighbours reads the first's cache."""
    found: list[LayerSpec] = []
    for i, spec in enumerate(layers):
        first = i % 2 and layers[i - 1] == spec and spec.kind is LayerKind.ATTENTION
        found.append(replace(spec, shares_layer=i - 1) if first else spec)
    return tuple(found)


def advise(case: Case, asked: Settings, device: Device | None, plan: Plan) -> tuple[Advice, ...]:
    """All changes that gain something, those that make the plan fit first, then by concurrency gained."""
    costs, found = prices(), []
    for words, price, settings in _setting_changes(case, asked):
        found.append(_try(words, "setting", costs.get(price, ""), case, settings, device, plan))
    for words, kind, price, layers in _model_changes(case):
        if kind == "policy" and case.profile.name != "kvarn":
            continue  # a technique of Kvarn's cache is no advice for another engine
        geometry = replace(case.geometry, layers=layers)
        found.append(_try(words, kind, costs.get(price, ""), replace(case, geometry=geometry), asked, device, plan))
    useful = [a for a in found if a is not None]
    order = {"setting": 0, "policy": 1, "model": 2}
    return tuple(
        sorted(
            useful,
            key=lambda a: (
                plan.verdict != "fits" and a.verdict != "fits",
                order[a.kind] == 2,
                -(a.concurrency or 0),
                -a.saved_bytes,
            ),
        )
    )


def _try(
    words: str, kind: str, price: str, case: Case, settings: Settings, device: Device | None, before: Plan
) -> Advice | None:
    """The change planned; None where it is impossible or gains nothing."""
    try:
        after = make_plan(build_case(case.geometry, case.profile, settings), device)
    except KvarnError:
        return None
    saved = _used(before) - _used(after)
    at_once = _times(after.capacity.concurrency, before.capacity.concurrency)
    longer = _times(after.capacity.max_context, _comparable(before.capacity.max_context, after))
    gains = saved > 0 or (at_once or 0) > 1.0 or (longer or 0) > 1.0
    return Advice(words, kind, after.verdict, saved, at_once, longer, price) if gains else None


def _comparable(longest_before: int | None, after: Plan) -> int | None:
    """What the longest context is compared with: the model's own length, where only that limits it afterwards."""
    if longest_before is None or after.model_context is None or after.capacity.max_context != after.model_context:
        return longest_before
    return min(longest_before, after.model_context)


def _gain(times: float | None) -> str:
    return "-" if not times else f"{times:.2f}x" if times < 1000 else "no limit"


def _used(plan: Plan) -> int:
    return sum(t.bytes for t in plan.terms)


def _times(after: float | None, before: float | None) -> float | None:
    return after / before if after is not None and before else None


def advice_lines(found: tuple[Advice, ...], plan: Plan, most: int = 16) -> list[str]:
    """The advice as a table."""
    if not found:
        return []
    rows = [("change", "then", "saved a device", "users", "context", "price")]
    for a in found[:most]:
        users, context = (_gain(x) for x in (a.concurrency, a.context))
        rows.append((a.change, a.verdict.replace("_", " "), show_bytes(a.saved_bytes), users, context, a.price))
    title = "To make it fit, or to get more" if plan.verdict != "fits" else "To get more"
    return [f"{title} (one change at a time; at {show_tokens(plan.context)} tokens)", *table(rows)]
