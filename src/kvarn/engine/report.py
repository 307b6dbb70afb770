"""What the cache cost so far, in the words of the command line's `kv` object."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvarn.kv.manager import CacheManager
from kvarn.kv.recompute import RecomputeCache


@dataclass(frozen=True, slots=True)
class KVReport:
    """The cache at its fullest moment so far, in bytes unless the name says otherwise.

    bytes_per_token: what a token adds while every layer holds it. blocks_peak, physical_bytes_peak: blocks held.
    logical_bytes: tokens x full precision, in every layer. reserved_bytes: what sequences kept from others.
    utilisation: tokens stored over tokens reserved, 0 to 1. scratch_bytes_peak: with `--cache none`, one layer's keys
    and values of a step, which nothing keeps.
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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


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
    )
