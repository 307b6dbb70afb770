"""The one place that decides whether a request's wish for a cache can be met, and says what it got."""

from __future__ import annotations

from collections.abc import Sequence

from kvarn.core.formats import format_names, parse_kv_format
from kvarn.core.options import CachePlan
from kvarn.core.requests import RequestOutput
from kvarn.server.errors import ApiError
from kvarn.server.schema.common import KVChoice

FULL = "full"  # the policy that keeps every token


def running_format(plan: CachePlan) -> str:
    """The format in which tokens end up."""
    return plan.groups[0].pools[-1].format if plan.groups else "none"


def running_policy(plan: CachePlan) -> str:
    return FULL


def check_choice(asked: KVChoice | None, plan: CachePlan) -> None:
    """Raises ApiError 400 where this server's cache is another one, with what there is."""
    if asked is None:
        return
    if asked.format is not None and _canonical(asked.format) != running_format(plan):
        _refuse("format", asked.format, running_format(plan))
    if asked.policy is not None and asked.policy != running_policy(plan):
        _refuse("policy", asked.policy, running_policy(plan))


def _canonical(name: str) -> str:
    try:
        return parse_kv_format(name).name
    except ValueError as error:
        known = ", ".join(format_names())
        raise ApiError(400, f"kv.format: {error}; known: {known}", code="unknown_name", param="kv.format") from error


def _refuse(what: str, asked: str, available: str) -> None:
    raise ApiError(
        400,
        f"kv.{what} {asked!r} is not available: this server's cache has {available!r}",
        code="kv_unavailable",
        param=f"kv.{what}",
        fixes=(f"kv.{what}: {available}", f"start a server with --kv {asked}" if what == "format" else "leave it out"),
    )


def report(plan: CachePlan, outputs: Sequence[RequestOutput]) -> dict[str, object]:
    """What the requests' answers got of the cache; the body of `KvarnReport`."""
    traces = [c.trace for o in outputs for c in o.completions if c.trace is not None]
    physical, logical = (sum(getattr(t, f"{k}_bytes") for t in traces) for k in ("physical", "logical"))
    return {
        "cached_tokens": sum(o.cached_tokens for o in outputs),
        "kv": {
            "cache": plan.mode,
            "format": running_format(plan),
            "policy": running_policy(plan),
            "block_size": plan.block_size,
            "bytes": physical,
            "logical_bytes": logical,
            "ratio": round(logical / physical, 4) if physical else None,
        },
        "waits": [w for t in traces for w in t.waits],
        "preemptions": [p for t in traces for p in t.preemptions],
        "timings": [
            {n: round(getattr(o.timings, n), 6) for n in ("queue_s", "prefill_s", "ttft_s", "decode_s")}
            for o in outputs
        ],
    }
