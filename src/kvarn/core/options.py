"""What was asked (`EngineOptions`) and what was decided (`CachePlan`): two types, both frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvarn.core.specs import GroupSpec

CacheMode = Literal["paged", "contiguous", "none"]
Grain = Literal["group", "layer", "head"]
CACHE_MODES: tuple[CacheMode, ...] = ("paged", "contiguous", "none")
Numerics = Literal["invariant", "fast"]
NUMERICS: tuple[Numerics, ...] = ("invariant", "fast")


@dataclass(frozen=True)
class EngineOptions:
    """What a user asks of an engine. None: decide for me.

    weights: float32 | bfloat16 | int8 | int4 | native. numerics: invariant, a request's numbers do not depend, bit for
    bit, on the batch around it, the chunking or the threads (with the native kernels); fast, they may, where that is
    faster: prompts of 4-bit weights go through a second form of 8 bits. fast_memory_bytes: the most memory for those
    forms, which take a byte a weight; None: all that they want. kv: a cache choice (`kvarn.kv.choice`): a KV
    format's name, k=NAME,v=NAME, a policy such as h2o:25%, or both with + between them. policy: the policy, where kv
    names none. also: further choices that single requests may ask for. tiers: formats of further pools, into which a
    policy moves tokens. share_layers: so many neighbouring layers use the first one's cache. kv_memory_bytes: budget
    of all pools. context_tokens: longest sequence to allow. step_tokens: token rows of one step at most (prefill
    chunks and decode rows together). residual_tokens: newest tokens that stay in full precision before a quantized
    format seals them; above 0, its prefixes are not shared. grain: how finely block tables are cut. prefix_caching:
    keep the blocks of finished sequences for those that begin alike. poison: fill free slots with NaN, so that
    reading one shows (tests). verify: share of the decode steps that are computed again over a full cache and
    compared; 0 for none.
    """

    weights: str = "native"
    numerics: Numerics = "invariant"
    fast_memory_bytes: int | None = None
    kv: str | None = None
    policy: str | None = None
    also: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()
    share_layers: int = 1
    cache: CacheMode = "paged"
    block_size: int = 32
    kv_memory_bytes: int | None = None
    context_tokens: int | None = None
    max_seqs: int = 64
    step_tokens: int = 512
    residual_tokens: int = 0
    backend: str | None = None
    threads: int | None = None
    grain: Grain = "group"
    prefix_caching: bool = True
    poison: bool = False
    verify: float = 0.0


def rows_per_sequence(group: GroupSpec, grain: Grain) -> int:
    """Table rows of a sequence: one, one a layer, or one a layer and KV head."""
    layers = len(group.layers)
    return {"group": 1, "layer": layers, "head": layers * group.spec.kv_heads}[grain]


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pool: `n_blocks` blocks of one format for one group. block_bytes counts the layers and KV heads of a block:
    all of the group's at grain `group`, one layer's at `layer`, one head's at `head`."""

    format: str
    n_blocks: int
    block_bytes: int

    @property
    def nbytes(self) -> int:
        return self.n_blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A cache group's pools; the first is the open pool. grain: how finely its tables, and so its blocks, are cut.
    tiers: how many of the pools, the last ones, hold only what a policy moves there."""

    group: GroupSpec
    pools: tuple[PoolPlan, ...]
    grain: Grain = "group"
    tiers: int = 0

    @property
    def home(self) -> int:
        """Index of the pool in which tokens settle: the open one, or the one that full blocks are sealed into."""
        return len(self.pools) - self.tiers - 1

    @property
    def rows_per_sequence(self) -> int:
        return rows_per_sequence(self.group, self.grain)


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
