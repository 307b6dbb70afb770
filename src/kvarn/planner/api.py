"""`kvarn.plan`: from names and figures to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvarn.core.errors import InvalidRequest
from kvarn.core.geometry import ModelGeometry
from kvarn.planner.compute import build_case, make_plan
from kvarn.planner.engines import flag_fields, load_engine
from kvarn.planner.formats import split_sides
from kvarn.planner.machines import find_device
from kvarn.planner.profiles.base import Profile
from kvarn.planner.result import Plan
from kvarn.planner.roofline import Device
from kvarn.planner.settings import Settings
from kvarn.planner.sizes import parse_size, parse_tokens
from kvarn.planner.version import Version

DEFAULT_CONTEXT_TOKENS = 8192


def plan(
    model: str | Path | ModelGeometry,
    hardware: str | Device | None = None,
    *,
    context: int | str | None = None,
    batch: int | None = None,
    concurrency: int | None = None,
    kv: str | None = None,
    weights: str | None = None,
    devices: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    engine: str = "kvarn",
    kv_memory: int | str | None = None,
    block_size: int | None = None,
    flags: Sequence[str] = (),
) -> Plan:
    """What a model's cache costs, whether it fits, and how fast it can be at best; nothing is loaded or fetched but a
    config.

    model: a catalogue or short name, a hub id, a path (config.json, directory, GGUF), or a geometry. hardware: a device
    of the catalogue, 'this' machine, 'custom:96GiB', a Device, or None (the verdict is then 'unknown' unless kv_memory
    is given). context: tokens each sequence may reach ('128k' is 131072); default 8192 or the model's own, if less.
    concurrency: sequences resident at once; batch: sequences decoded in one step; each defaults to the other, then 1.
    kv: a KV format, or 'k=NAME,v=NAME'. weights: a weight format, None as stored or published. devices: how many; by
    default tensor parallel over all of them. tp, pp, dp: parallel sizes. engine: 'kvarn', 'vllm', 'vllm@0.20', ...
    flags: that engine's own flags, as on its command line. kv_memory: bytes of the cache of one device ('24GiB').

    Raises UnknownName, InvalidRequest, IncompatiblePlan, ModelError and its kinds.
    """
    profile, version = load_engine(engine)
    geometry = model if isinstance(model, ModelGeometry) else read_model(str(model))
    asked = ask(
        geometry,
        profile,
        version,
        context=context,
        batch=batch,
        concurrency=concurrency,
        kv=kv,
        weights=weights,
        devices=devices,
        tp=tp,
        pp=pp,
        dp=dp,
        kv_memory=kv_memory,
        block_size=block_size,
        fields=flag_fields(profile, flags),
    )
    device = find_device(hardware) if isinstance(hardware, str) else hardware
    return make_plan(build_case(geometry, profile, asked), device)


def read_model(name: str) -> ModelGeometry:
    """The geometry of a named model. Raises UnknownName, ModelError and its kinds, FetchError."""
    from kvarn.planner.sources import load_geometry  # noqa: PLC0415  the hub's client is slow to load

    return load_geometry(name)


def ask(
    geometry: ModelGeometry,
    profile: Profile,
    version: Version,
    *,
    context: int | str | None = None,
    batch: int | None = None,
    concurrency: int | None = None,
    kv: str | None = None,
    weights: str | None = None,
    devices: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    kv_memory: int | str | None = None,
    block_size: int | None = None,
    fields: dict[str, Any] | None = None,
) -> Settings:
    """Settings from figures in Kvarn's words and from an engine's own `fields`, which are outranked. Raises
    InvalidRequest."""
    own = dict(fields or {})
    total = own.pop("total_context", None)
    found: dict[str, Any] = {"weights": weights, "block_size": block_size, "tp": tp, "pp": pp, "dp": dp}
    sequences = concurrency or batch
    found |= {"sequences": sequences, "batch": batch or concurrency}
    found["kv_memory_bytes"] = parse_size(kv_memory, what="--kv-memory") if kv_memory is not None else None
    if kv is not None:
        found["kv_k"], found["kv_v"] = split_sides(kv)
    own |= {name: value for name, value in found.items() if value is not None}
    for name, value in (("batch", batch), ("concurrency", concurrency), ("devices", devices)):
        if value is not None and value < 1:
            raise InvalidRequest(f"{name} is {value}", fixes=("use 1 or more",))
    own.setdefault("batch", own.get("sequences", 1))
    if context is not None:
        own["context_tokens"] = parse_tokens(context, what="--context")
    elif total is not None:
        own["context_tokens"] = max(1, total // own.get("sequences", 1))
    own.setdefault("context_tokens", min(geometry.max_context or DEFAULT_CONTEXT_TOKENS, DEFAULT_CONTEXT_TOKENS))
    return spread(Settings(**own, version=version), devices)


def spread(settings: Settings, devices: int | None) -> Settings:
    """Use `devices` devices: tensor parallel over those that tp, pp and dp leave. Raises InvalidRequest."""
    if devices is None or devices == settings.devices:
        return settings
    others = settings.pp * settings.dp
    if settings.tp == 1 and devices % others == 0:
        return replace(settings, tp=devices // others)
    raise InvalidRequest(
        f"{devices} devices, but tp {settings.tp} x pp {settings.pp} x dp {settings.dp} is {settings.devices}",
        fixes=(f"--devices {settings.devices}", "leave --devices out"),
    )
