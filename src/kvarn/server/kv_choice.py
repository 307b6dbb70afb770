"""The one place that decides whether a request's wish for a cache can be met, and says what it got."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvarn.core.cache_params import CacheParams
from kvarn.core.options import CachePlan
from kvarn.core.requests import CompletionTrace, RequestOutput
from kvarn.kv.choice import check_context, parse_choice, policy_text
from kvarn.kv.policies.base import KVPolicy
from kvarn.kv.settling import formats_of, settles_apart
from kvarn.server.errors import ApiError, invalid
from kvarn.server.schema.common import KVChoice

FULL = "full"
_START = {"format": "--kv {0}, or --also {0}", "residual_tokens": "--residual-tokens {0}"}


@dataclass(frozen=True, slots=True)
class KVGot:
    """The cache of a request, as a choice says it: the format in which its tokens end up, and the policy over them."""

    format: str
    policy: str


def got(chosen: CacheParams | None, plan: CachePlan, own: KVPolicy | None) -> KVGot:
    """What a request gets for its choice, None for none; own: the engine's policy. A format beside the engine's goes
    with the policy full, whatever the engine's is."""
    if chosen is not None and settles_apart(chosen, plan):
        return KVGot(str(chosen.format), FULL)
    policy = chosen.policy if chosen is not None else None
    return KVGot(running_format(plan), policy or (FULL if own is None else policy_text(own)))


def running_format(plan: CachePlan) -> str:
    """The format in which the tokens of a request end up that does not name one."""
    return formats_of(plan)[0] if plan.groups else "none"


def chosen_cache(asked: KVChoice | str | None, plan: CachePlan) -> CacheParams | None:
    """The choice in the engine's words; None: nothing was chosen. Raises ApiError 400 where this server's cache is
    another one, UnknownName, IncompatiblePlan; the engine checks the rest when it takes the request."""
    if asked is None:
        return None
    chosen = _parsed(asked)
    _among("format", chosen.format, formats_of(plan))
    if not settles_apart(chosen, plan):
        _among("residual_tokens", chosen.residual_tokens, (plan.residual_tokens,))
    check_context(chosen, plan.context_tokens)
    return chosen


def _parsed(asked: KVChoice | str) -> CacheParams:
    """An object says less than a text: without a policy it leaves the engine's, where a text means `full`."""
    if isinstance(asked, str):
        return parse_choice(asked)
    kv = parse_choice(asked.format) if asked.format is not None else CacheParams()
    if asked.format is not None and kv.format is None:
        raise invalid(f"kv.format {asked.format!r} is no format", param="kv.format", code="unknown_name")
    policy = parse_choice(asked.policy) if asked.policy is not None else CacheParams()
    if policy.format is not None:
        raise invalid(f"kv.policy {asked.policy!r} names a format", param="kv.policy", code="unknown_name")
    residual = kv.residual_tokens if asked.residual_tokens is None else asked.residual_tokens
    return CacheParams(kv.format, policy.policy, residual)


def _among(what: str, asked: str | int | None, available: Sequence[str | int]) -> None:
    if asked is not None and asked not in available:
        has = ", ".join(map(repr, available)) or "none"
        raise ApiError(
            400,
            f"kv.{what} {asked!r} is not available: this server's cache has {has}",
            code="kv_unavailable",
            param=f"kv.{what}",
            fixes=(f"kv.{what}: {has}", f"a server started with it: {_START[what].format(asked)}"),
        )


def _by_format(traces: Sequence[CompletionTrace]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for trace in traces:
        found.update(dict(trace.bytes_by_format))
    return dict(found)


def report(plan: CachePlan, cache: KVGot, outputs: Sequence[RequestOutput]) -> dict[str, object]:
    """What the requests' answers got of the cache; the body of `KvarnReport`."""
    traces = [c.trace for o in outputs for c in o.completions if c.trace is not None]
    physical, logical = (sum(getattr(t, f"{k}_bytes") for t in traces) for k in ("physical", "logical"))
    return {
        "cached_tokens": sum(o.cached_tokens for o in outputs),
        "kv": {
            "cache": plan.mode,
            "format": cache.format,
            "policy": cache.policy,
            "block_size": plan.block_size,
            "bytes": physical,
            "bytes_by_format": _by_format(traces),
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
