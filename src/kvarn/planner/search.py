"""`--fit`: settings that reach a target, such as "32 users at 32k on two L40S"."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvarn.core.errors import InvalidRequest, KvarnError
from kvarn.core.formats import format_names
from kvarn.core.geometry import ModelGeometry
from kvarn.planner.advise import PEER_FORMATS
from kvarn.planner.compute import build_case, make_plan
from kvarn.planner.profiles.base import Profile
from kvarn.planner.report import table
from kvarn.planner.result import Plan
from kvarn.planner.roofline import Device
from kvarn.planner.settings import Settings
from kvarn.planner.sizes import parse_tokens, show_seconds, show_tokens

_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight"),
    *("nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen"),
)
_USERS = re.compile(r"\b(\w+)\s+(?:users?|sequences?|requests?|chats?|streams?)\b", re.IGNORECASE)
_CONTEXT = re.compile(r"\b(?:at|of|with)\s+(\d[\d_,]*\s*[km]?)\b", re.IGNORECASE)
_DEVICE = re.compile(r"\bon\s+(?:(?:an?\s+)|(?:(\d+|[a-z]+)\s*x?\s+))?(\S.*?)\s*$", re.IGNORECASE)
# Cheapest in quality first. Formats that are not listed stand behind, in their own order.
KV_ORDER = ("bfloat16", "float16", "bf16", "f16", "fp8", "int8", "fp8_e4m3", "q8_0", "int4", "q4_0", "nvfp4", "int2")
WEIGHTS = (None, "fp8", "int4")
MOST_DEVICES = 64


@dataclass(frozen=True, slots=True)
class Target:
    """What to reach. None: not said."""

    sequences: int | None = None
    context_tokens: int | None = None
    devices: int | None = None
    hardware: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """Settings that reach the target, in words, and their plan."""

    words: str
    plan: Plan


def _number(text: str) -> int | None:
    if text.isdigit():
        return int(text)
    return _WORDS.index(text.lower()) if text.lower() in _WORDS else None


def parse_target(text: str) -> Target:
    """Read '32 users at 32k on two L40S'; any part may be missing. Raises InvalidRequest when nothing is understood."""
    users, context, device = _USERS.search(text), _CONTEXT.search(text), _DEVICE.search(text)
    count = name = None
    if device:
        count = _number(device[1]) if device[1] else 1
        name = device[2] if device[1] is None or count is not None else f"{device[1]} {device[2]}"
        count = count or 1
    found = Target(
        _number(users[1]) if users else None,
        parse_tokens(context[1].replace(" ", "")) if context else None,
        count,
        name,
    )
    if found == Target():
        raise InvalidRequest(
            f"target {text!r} is not understood", fixes=("write it like '32 users at 32k on two L40S'",)
        )
    return found


def splits(devices: int) -> Iterator[tuple[int, int, int]]:
    """(tp, pp, dp) with tp * pp * dp = devices: more tensor parallel first, pipeline last."""
    for pp in (n for n in range(1, devices + 1) if devices % n == 0):
        for tp in (n for n in range(devices // pp, 0, -1) if (devices // pp) % n == 0):
            yield tp, pp, devices // pp // tp


def _kv_formats(profile: Profile, asked: Settings) -> list[tuple[str | None, str | None]]:
    if asked.kv_k is not None:
        return [(asked.kv_k, asked.kv_v)]
    names = format_names() if profile.name == "kvarn" else PEER_FORMATS.get(profile.name, ())
    quantized = sorted(
        (n for n in names if not n.startswith(("float", "bfloat"))),
        key=lambda n: KV_ORDER.index(n) if n in KV_ORDER else len(KV_ORDER),
    )
    return [(None, None), *((n, n) for n in quantized)]


def _weights(geometry: ModelGeometry, asked: Settings) -> tuple[str | None, ...]:
    fixed = asked.weights is not None or geometry.stored_weight_bytes is not None or geometry.parameters is None
    return (asked.weights,) if fixed else WEIGHTS


def fit(
    geometry: ModelGeometry, profile: Profile, asked: Settings, device: Device, devices: int | None, most: int = 5
) -> tuple[Found, ...]:
    """Settings under which the asked sequences and context fit, best first: the least loss of quality, then the fewest
    devices, then the fastest step. devices: how many; None: the fewest of 1, 2, 4, ... that do."""
    counts = [devices] if devices else [2**i for i in range(MOST_DEVICES.bit_length())]
    for count in counts:
        found = []
        for loss, (words, settings) in enumerate(_candidates(geometry, profile, asked)):
            for split in splits(count):
                plan = _plan(geometry, profile, replace(settings, tp=split[0], pp=split[1], dp=split[2]), device)
                if plan is not None and plan.verdict == "fits":
                    found.append((loss, -(plan.time.tokens_per_s or 0.0), Found(_words(words, split), plan)))
        if found:
            found.sort(key=lambda entry: entry[:2])
            return tuple(entry[2] for entry in found[:most])
    return ()


def _candidates(
    geometry: ModelGeometry, profile: Profile, asked: Settings
) -> Iterator[tuple[tuple[str, ...], Settings]]:
    """KV formats and weight formats, by rising loss."""
    pairs = [(k, w) for k in enumerate(_kv_formats(profile, asked)) for w in enumerate(_weights(geometry, asked))]
    for (_, kv), (_, weights) in sorted(pairs, key=lambda p: (p[0][0] + p[1][0], p[1][0])):
        words = tuple(w for w in (f"--weights {weights}" if weights else "", f"--kv {kv[0]}" if kv[0] else "") if w)
        yield words, replace(asked, kv_k=kv[0], kv_v=kv[1], weights=weights)


def _plan(geometry: ModelGeometry, profile: Profile, settings: Settings, device: Device) -> Plan | None:
    try:
        return make_plan(build_case(geometry, profile, settings), device)
    except KvarnError:
        return None


def _words(words: tuple[str, ...], split: tuple[int, int, int]) -> str:
    sizes = [f"--{name} {n}" for name, n in zip(("tp", "pp", "dp"), split, strict=True) if n > 1]
    return " ".join([*sizes, *words]) or "as it is"


def fit_lines(found: tuple[Found, ...], target: str) -> list[str]:
    """The settings found as a table."""
    if not found:
        return [f"Nothing tried reaches {target}."]
    rows = [("settings", "devices", "cache left", "users", "longest context", "time per token", "tokens/s")]
    for f in found:
        p = f.plan
        step, rate = p.time.decode_s_per_token, p.time.tokens_per_s
        rows.append(
            (
                f.words,
                f"{p.tp * p.pp * p.dp}",
                f"{(p.cache_bytes or 0) / 2**30:,.1f} GiB",
                f"{(p.capacity.concurrency or 0) * p.dp:,.1f}",
                show_tokens(p.capacity.max_context or 0),
                show_seconds(step) if step else "?",
                f"{rate:,.0f}" if rate else "?",
            )
        )
    return [f"Settings that reach {target}, the least loss of quality first", *table(rows)]
