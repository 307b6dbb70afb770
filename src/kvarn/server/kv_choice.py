"""The one place that decides whether a request's wish for a cache can be met, and says what it got."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import TypeAdapter, ValidationError

from kvarn.core.formats import format_names, parse_kv_format
from kvarn.core.options import CachePlan
from kvarn.core.requests import RequestOutput
from kvarn.kv.policies.base import KVPolicy, load_policy
from kvarn.server.errors import ApiError
from kvarn.server.schema.common import KVChoice

FULL = "full"  # the name of keeping every token


def running_format(plan: CachePlan) -> str:
    """The format in which tokens end up."""
    return plan.groups[0].pools[-1].format if plan.groups else "none"


def policy_name(policy: KVPolicy | None) -> str:
    """As a request names it."""
    return FULL if policy is None else type(policy).__module__.rpartition(".")[2]


def chosen_policy(asked: KVChoice | None, plan: CachePlan) -> KVPolicy | None:
    """The policy that a request wants; None: the server's own. Raises ApiError 400 where this server's cache cannot do
    it, UnknownName; the engine checks the rest when it takes the request."""
    if asked is None:
        return None
    if asked.format is not None and _canonical(asked.format) != running_format(plan):
        _refuse_format(asked.format, running_format(plan))
    if asked.policy is None or asked.policy == FULL:
        if asked.policy_options:
            raise ApiError(400, "kv.policy_options without kv.policy", code="invalid_value", param="kv.policy_options")
        return None
    try:
        return TypeAdapter(load_policy(asked.policy)).validate_python(asked.policy_options or {})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(p) for p in ("kv", "policy_options", *first["loc"]))
        raise ApiError(400, f"{where}: {first['msg']}", code="invalid_value", param=where) from error
    except TypeError as error:
        raise ApiError(400, f"kv.policy_options: {error}", code="invalid_value", param="kv.policy_options") from error


def _canonical(name: str) -> str:
    try:
        return parse_kv_format(name).name
    except ValueError as error:
        known = ", ".join(format_names())
        raise ApiError(400, f"kv.format: {error}; known: {known}", code="unknown_name", param="kv.format") from error


def _refuse_format(asked: str, available: str) -> None:
    raise ApiError(
        400,
        f"kv.format {asked!r} is not available: this server's cache has {available!r}",
        code="kv_unavailable",
        param="kv.format",
        fixes=(f"kv.format: {available}", f"start a server with --kv {asked}"),
    )


def report(plan: CachePlan, policy: str, outputs: Sequence[RequestOutput]) -> dict[str, object]:
    """What the requests' answers got of the cache; the body of `KvarnReport`."""
    traces = [c.trace for o in outputs for c in o.completions if c.trace is not None]
    physical, logical = (sum(getattr(t, f"{k}_bytes") for t in traces) for k in ("physical", "logical"))
    return {
        "cached_tokens": sum(o.cached_tokens for o in outputs),
        "kv": {
            "cache": plan.mode,
            "format": running_format(plan),
            "policy": policy,
            "block_size": plan.block_size,
            "bytes": physical,
            "logical_bytes": logical,
            "ratio": round(logical / physical, 4) if physical else None,
        },
        "waits": [w for t in traces for w in t.waits],
        "preemptions": [p for t in traces for p in t.preemptions],
        "prefix": [t.prefix for t in traces],
        "timings": [
            {n: round(getattr(o.timings, n), 6) for n in ("queue_s", "prefill_s", "ttft_s", "decode_s")}
            for o in outputs
        ],
    }
