"""What the cache cost so far, in the words of the command line's `kv` object, and what a decode step reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvarn.kv.manager import CacheManager
from kvarn.kv.recompute import RecomputeCache
from kvarn.models.base import CausalLM


@dataclass(frozen=True, slots=True)
class KVReport:
    """The cache at its fullest moment so far, in bytes unless the name says otherwise.

    bytes_per_token: what a token adds while every layer holds it. blocks_peak, physical_bytes_peak: blocks held.
    logical_bytes: tokens x full precision, in every layer. reserved_bytes: what sequences kept from others.
    utilisation: tokens stored over tokens reserved, 0 to 1. scratch_bytes_peak: with `--cache none`, one layer's keys
    and values of a step, which nothing keeps. grain: what a block holds: all layers of a cache group, one layer, or one
    KV head of one.
    """

    cache: str
    format: str
    block_size: int
    bytes_per_token: int
    blocks_peak: int
    physical_bytes_peak: int
    logical_bytes: int
    reserved_bytes: int
    utilisation: float
    pool_bytes: int
    scratch_bytes_peak: int = 0
    grain: str = "group"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class DecodeReads:
    """What a decode step reads, and how close it comes to the machine's memory. weight_bytes: once a step however many
    streams. cache_bytes: of all streams at their depth. step_s: what a step took, 0 where none ran. read_bytes_per_s:
    what the machine's memory gives; None where that is not known."""

    weight_bytes: int
    cache_bytes: int
    step_s: float
    read_bytes_per_s: float | None = None

    @property
    def step_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes

    @property
    def limit_s(self) -> float | None:
        """The least that a step can take."""
        return self.step_bytes / self.read_bytes_per_s if self.read_bytes_per_s else None

    @property
    def share(self) -> float | None:
        """Of the memory's speed, 0 to 1."""
        return self.limit_s / self.step_s if self.limit_s is not None and self.step_s > 0 else None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "step_bytes": self.step_bytes, "share": self.share}

    def line(self) -> str:
        """For people; MB and GB are 10^6 and 10^9 bytes."""
        reads = (
            f"a decode step reads {self.step_bytes / 1e6:,.1f} MB "
            f"(weights {self.weight_bytes / 1e6:,.1f}, cache {self.cache_bytes / 1e6:,.1f})"
        )
        if self.read_bytes_per_s is None:
            return f"{reads}; what this machine's memory gives is unknown"
        limit = f"{reads}; at {self.read_bytes_per_s / 1e9:.1f} GB/s that is {1e3 * (self.limit_s or 0.0):.2f} ms"
        if self.share is None:
            return limit
        return f"{limit}, it took {1e3 * self.step_s:.2f} ms: {self.share:.0%} of the memory's speed"


def decode_reads(
    model: CausalLM, cache: CacheManager | RecomputeCache, context_tokens: float, step_s: float, streams: int = 1
) -> DecodeReads:
    """For `streams` sequences of context_tokens each: no more than was ever held, for windows and policies let go."""
    held = cache.peak.physical_bytes if isinstance(cache, CacheManager) else 0
    reads = int(min(streams * context_tokens * cache.plan.bytes_per_token, held))
    return DecodeReads(model.step_weight_bytes, reads, step_s)


def kv_report(cache: CacheManager | RecomputeCache) -> KVReport:
    plan, peak = cache.plan, cache.peak
    return KVReport(
        cache=plan.mode,
        format=plan.groups[0].pools[plan.groups[0].home].format if plan.groups else "none",
        block_size=plan.block_size,
        bytes_per_token=plan.bytes_per_token,
        blocks_peak=peak.blocks,
        physical_bytes_peak=peak.physical_bytes,
        logical_bytes=peak.logical_bytes,
        reserved_bytes=peak.physical_bytes,
        utilisation=peak.utilisation,
        pool_bytes=peak.pool_bytes,
        scratch_bytes_peak=cache.scratch_bytes_peak if isinstance(cache, RecomputeCache) else 0,
        grain=plan.groups[0].grain if plan.groups else "group",
    )
