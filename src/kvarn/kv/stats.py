"""What the cache holds, measured from its ledgers: bytes and tokens, never a ratio of something not freed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvarn.kv.manager import CacheManager


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """logical_bytes: tokens of all sequences x what one takes in full precision in every layer. physical_bytes: blocks
    held, each counted once however many sequences share it. pool_bytes: all blocks, held or free. stored_slots and
    reserved_slots: slots that hold a token, and slots of the held blocks, over all groups. tokens: of all sequences."""

    tokens: int
    sequences: int
    blocks: int
    logical_bytes: int
    physical_bytes: int
    pool_bytes: int
    stored_slots: int
    reserved_slots: int

    @property
    def utilisation(self) -> float:
        """Tokens stored over tokens reserved; 0 where nothing is reserved."""
        return self.stored_slots / self.reserved_slots if self.reserved_slots else 0.0


def _full_token_bytes(manager: CacheManager) -> int:
    """One token in full precision in every layer."""
    return sum(
        g.spec.kv_heads * (g.spec.k_dim + g.spec.v_dim) * len(g.layers) * g.element_bytes for g in manager.groups
    )


def measure_sequence(manager: CacheManager, seq_id: int) -> tuple[int, int]:
    """(physical, logical) bytes of one sequence, as in CacheMemory; shared blocks count. (0, 0) where it has none."""
    if (state := manager.sequences.get(seq_id)) is None:
        return 0, 0
    return sum(bytes_by_format(manager, seq_id).values()), state.length * _full_token_bytes(manager)


def bytes_by_format(manager: CacheManager, seq_id: int) -> dict[str, int]:
    """Physical bytes of one sequence now, by the format of its blocks; shared blocks count. Empty where it has none."""
    found: dict[str, int] = {}
    if (state := manager.sequences.get(seq_id)) is None:
        return found
    for group, plan, row in zip(manager.groups, manager.plan.groups, state.rows, strict=True):
        for pool, named, size in zip(plan.pools, group.named([row]), group.pool_block_bytes, strict=True):
            if blocks := named.total():
                found[pool.format] = found.get(pool.format, 0) + blocks * size
    return found


def measure(manager: CacheManager, in_flight_tokens: int = 0) -> CacheMemory:
    """Counted from the ledgers; O(sequences). in_flight_tokens: those of a step that is not committed yet."""
    tokens = sum(s.length for s in manager.sequences.values()) + in_flight_tokens
    full = _full_token_bytes(manager)
    pools = [(p, b) for g in manager.groups for p, b in zip(g.pools, g.pool_block_bytes, strict=True)]
    blocks = sum(p.held_blocks for p, _ in pools)
    return CacheMemory(
        tokens=tokens,
        sequences=len(manager.sequences),
        blocks=blocks,
        logical_bytes=tokens * full,
        physical_bytes=sum(p.held_blocks * b for p, b in pools),
        pool_bytes=sum(p.n_blocks * b for p, b in pools),
        stored_slots=sum(p.stored_slots for p, _ in pools),
        reserved_slots=blocks * manager.plan.block_size,
    )
