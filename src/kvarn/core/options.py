"""What was asked (`EngineOptions`) and what was decided (`CachePlan`): two types, both frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvarn.core.specs import GroupSpec

CacheMode = Literal["paged", "contiguous", "none"]
CACHE_MODES: tuple[CacheMode, ...] = ("paged", "contiguous", "none")


@dataclass(frozen=True)
class EngineOptions:
    """What a user asks of an engine. None: decide for me.

    weights: float32 | bfloat16 | native. kv: a KV format's name, or k=NAME,v=NAME. kv_memory_bytes: budget of all
    pools. context_tokens: longest sequence to allow. step_tokens: token rows of one step at most (prefill chunks
    and decode rows together). residual_tokens: newest tokens that stay in full precision before a quantized format
    seals them. poison: fill free slots with NaN, so that reading one shows (tests).
    """

    weights: str = "native"
    kv: str | None = None
    cache: CacheMode = "paged"
    block_size: int = 32
    kv_memory_bytes: int | None = None
    context_tokens: int | None = None
    max_seqs: int = 64
    step_tokens: int = 512
    residual_tokens: int = 32
    backend: str | None = None
    threads: int | None = None
    poison: bool = False


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pool: `n_blocks` blocks of one format for one group. block_bytes counts all layers and KV heads."""

    format: str
    n_blocks: int
    block_bytes: int

    @property
    def nbytes(self) -> int:
        return self.n_blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A cache group's pools; the first is the open pool."""

    group: GroupSpec
    pools: tuple[PoolPlan, ...]


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What was decided before any tensor exists. Pool bytes equal the allocated tensors' bytes (rule 1)."""

    mode: CacheMode
    block_size: int
    context_tokens: int
    max_seqs: int
    step_tokens: int
    residual_tokens: int
    groups: tuple[GroupPlan, ...]
    bytes_per_token: int
    reasons: tuple[str, ...] = field(default=())

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for g in self.groups for p in g.pools)
