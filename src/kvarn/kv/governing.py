"""Which cache groups a policy decides over, and whether a cache allows what it does. Looked up before any token."""

from __future__ import annotations

from collections.abc import Sequence

from kvarn.core.errors import IncompatiblePlan
from kvarn.core.formats import parse_kv_format
from kvarn.core.options import CachePlan
from kvarn.core.specs import LayerSpec
from kvarn.kv.policies.base import KVPolicy, Signal


def governed(spec: LayerSpec) -> bool:
    """A policy shrinks groups that keep everything; a layer with a window of its own keeps little already."""
    return spec.window_tokens is None and spec.chunk_tokens is None


def check_policy(policy: KVPolicy, plan: CachePlan) -> None:
    """Raises IncompatiblePlan where the cache's mode, grain or format does not allow what the policy does."""
    name = type(policy).__name__
    if plan.mode != "paged" and policy.decides:
        raise IncompatiblePlan(f"--cache {plan.mode} has no blocks that {name} could drop", fixes=("--cache paged",))
    for group in plan.groups:
        if not governed(group.group.spec):
            continue
        if policy.grain != "group" and group.grain != policy.grain:
            raise IncompatiblePlan(
                f"{name} cuts the cache by {policy.grain}; this engine's tables are cut by {group.grain}",
                fixes=("start the engine with this policy, or allow it in `also`", f"grain={policy.grain!r}"),
            )
        if missing := set(policy.tiers) - {p.format for p in group.pools[group.home + 1 :]}:
            raise IncompatiblePlan(
                f"{name} moves tokens into {', '.join(sorted(missing))}; this engine has no such pools",
                fixes=("start the engine with this policy, or allow it in `also`",),
            )
        for pool in group.pools[: group.home + 1]:
            if policy.rewrites and not parse_kv_format(pool.format).rewritable:
                raise IncompatiblePlan(
                    f"{name} drops single tokens; a {pool.format} block cannot be rewritten",
                    fixes=("--kv int8", "--kv bfloat16", "a policy that drops whole blocks, such as window"),
                )


def check_rotation(policy: KVPolicy, turns: Sequence[object | None]) -> None:
    """Raises IncompatiblePlan where the policy turns keys and a model's rotation is none, or hangs on the length."""
    if Signal.ROTATION in policy.signals and any(t is None for t in turns):
        raise IncompatiblePlan(
            f"{type(policy).__name__} turns keys, and this model's rotation depends on how long the text may become",
            fixes=("positions=original", "a policy that does not turn keys"),
        )
