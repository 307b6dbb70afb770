"""Requests of one batch in different formats: an engine whose own format is a float one has a pool for each further
format that requests may ask for, and a sequence's blocks settle in the pool of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from kvarn.core.cache_params import CacheParams
from kvarn.core.errors import IncompatiblePlan
from kvarn.core.options import CachePlan
from kvarn.kv.choice import policy_of
from kvarn.kv.governing import governed
from kvarn.kv.policies.base import Decision, GroupView, KVPolicy, SequenceView


@dataclass(frozen=True)
class SettleIn(KVPolicy):
    """Keeps everything; full blocks older than the residual are encoded in `format`, once the prompt is complete. Until
    then its blocks are the engine's own: it finds prompts that others computed, and leaves its own to them."""

    prefix_pure: ClassVar[bool] = True
    leaves_prompt: ClassVar[bool] = True
    format: str = field(kw_only=True)
    residual_tokens: int = field(kw_only=True)

    @property
    def tiers(self) -> tuple[str, ...]:
        return (self.format,)

    @property
    def settles_in(self) -> str:
        return self.format

    def due(self, length: int, prompt_tokens: int, longest_row: int, block_size: int, bytes_per_token: int) -> bool:
        return length >= self.residual_tokens + block_size

    def decide(self, view: SequenceView) -> Decision | None:
        seal = tuple(None if g is None else self._columns(g, view.block_size) for g in view.groups)
        pools = tuple(0 if g is None else g.pool_of(self.format) for g in view.groups)
        nothing = (None,) * len(view.groups)
        return Decision(nothing, f"settled in {self.format}", seal=seal, seal_into=pools)

    def _columns(self, group: GroupView, block_size: int) -> np.ndarray:
        """bool [R, C]: full open blocks that are old enough."""
        assert group.pools is not None, "the view says which pool holds a place"
        settled = np.maximum(group.fill - self.residual_tokens, 0) // block_size
        columns = np.arange(group.pools.shape[1] // block_size)
        open_ = group.pools[:, : len(columns) * block_size : block_size] == 0
        return open_ & (columns < settled[:, None])


def formats_of(plan: CachePlan) -> tuple[str, ...]:
    """The formats that a request may ask for: the engine's own first, then those with a pool of their own."""
    home = [g.pools[g.home].format for g in plan.groups]
    further = [p.format for g in plan.groups if governed(g.group.spec) for p in g.pools[g.home + 1 :]]
    return tuple(dict.fromkeys((*home, *further)))


def settles_apart(params: CacheParams | None, plan: CachePlan) -> bool:
    """Whether a choice names a format that is not the engine's own."""
    own = {g.pools[g.home].format for g in plan.groups}
    return bool(own) and params is not None and params.format is not None and own != {params.format}


def policy_for(params: CacheParams, plan: CachePlan, own: KVPolicy | None) -> KVPolicy | None:
    """What a request's choice of cache means under this plan; own: the engine's policy, where the choice names none.
    Raises IncompatiblePlan for a format that this engine has no pool for, or only without a policy."""
    if params.format is None or not settles_apart(params, plan):
        policy = policy_of(params) or own
        if params.residual_tokens not in (None, plan.residual_tokens):
            raise IncompatiblePlan(
                f"residual of {params.residual_tokens} tokens; this engine's is {plan.residual_tokens}",
                fixes=("leave it", f"start the engine with --residual-tokens {params.residual_tokens}"),
            )
        return policy
    if params.format not in formats_of(plan):
        known = ", ".join(formats_of(plan))
        raise IncompatiblePlan(
            f"no pool of {params.format}; this engine has {known}",
            fixes=(f"start it with {params.format!r} in `also`", f"one of {known}"),
        )
    policy = policy_of(params)
    if policy is not None and policy.decides:
        raise IncompatiblePlan(
            f"{params.text}: in a batch with other formats, {params.format} goes with the policy full",
            fixes=(f"start an engine with {params.text!r}", params.format),
        )
    residual = plan.residual_tokens if params.residual_tokens is None else params.residual_tokens
    return SettleIn(format=params.format, residual_tokens=residual)
