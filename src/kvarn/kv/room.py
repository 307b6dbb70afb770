"""Room in the pools: what never fits, what does not fit now, and making room by evicting what only the prefix index
holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvarn.core.events import Event, PrefixEvicted
from kvarn.core.ledger import NoRoom
from kvarn.core.options import CachePlan
from kvarn.kv.group import CacheGroup
from kvarn.kv.prefix import Match
from kvarn.kv.settling_room import SettlingRoom
from kvarn.kv.sharing import PrefixSharing


class Room:
    """Counts blocks; takes none."""

    def __init__(
        self,
        plan: CachePlan,
        groups: Sequence[CacheGroup],
        prefixes: PrefixSharing | None,
        emit: Callable[[Event], None],
    ) -> None:
        self.plan, self.groups, self.prefixes, self._emit = plan, groups, prefixes, emit

    def never_fits(self, total_tokens: int) -> str | None:
        """Why a sequence of total_tokens cannot fit even in an empty cache, with the numbers; None if it can."""
        if total_tokens > self.plan.context_tokens:
            return f"{total_tokens} tokens; the context is {self.plan.context_tokens} tokens"
        for group in self.groups:
            for pool, block_bytes, need in group.peak_blocks(total_tokens):
                if need > pool.n_blocks:
                    whole = f"{pool.n_blocks} ({pool.n_blocks * block_bytes:,} B)"
                    return (
                        f"{total_tokens} tokens take {need} blocks of {self.plan.block_size} tokens "
                        f"({need * block_bytes:,} B); the whole pool has {whole}"
                    )
        return None

    def short_for(self, tokens: int, headroom_tokens: int, match: Match | None) -> NoRoom | None:
        """Whether the blocks of so many tokens would fit beside the headroom, not counting those that were found."""
        if self.plan.mode == "contiguous":
            return None
        for index, group in enumerate(self.groups):
            found = len(self.prefixes.index.parts(match, index)) if self.prefixes and match else 0
            for at, (pool, _, need) in enumerate(group.peak_blocks(tokens)):
                shared = found * group.rows_per_seq if at == group.home else 0
                free = pool.free_blocks + self.spare(index, at)
                short = need + group.headroom_blocks(at, headroom_tokens) - shared - free
                if short > 0:
                    return NoRoom(short, group.describe(index))
        return None

    def spare(self, group: int, pool: int) -> int:
        """Blocks that only the prefix index holds."""
        return self.prefixes.spare_blocks(group, pool) if self.prefixes else 0

    def make(self, wants: Sequence[int]) -> NoRoom | None:
        """Evict what only the prefix index holds until each group can give its wanted blocks; where that would not be
        enough in some group, evict nothing."""
        short = {(i, p): n for i, w in enumerate(wants) for p, n in self.groups[i].short_by(w).items()}
        for (index, pool), missing in short.items():
            if missing > (spare := self.spare(index, pool)):
                return NoRoom(missing - spare, self.groups[index].describe(index))
        for index, pool in short:
            assert self.prefixes is not None, "what is short has no spare blocks"
            missing = self.groups[index].short_by(wants[index]).get(pool, 0)  # another group's eviction may have helped
            for gone in self.prefixes.make_room(index, pool, missing):
                self._emit(PrefixEvicted(-1, len(gone.blocks), str(gone)))
        for index, want in enumerate(wants if short else ()):
            if left := self.groups[index].short_by(want):
                return NoRoom(max(left.values()), self.groups[index].describe(index))
        return None

    def short_by(self, wants: Mapping[tuple[int, int], int], settling: SettlingRoom) -> dict[tuple[int, int], int]:
        """For each group and pool that lacks some of the wanted blocks: how many. What others will settle in, or seal,
        is not free."""
        short: dict[tuple[int, int], int] = {}
        for (index, pool), want in wants.items():
            group = self.groups[index]
            owed = group.owed_blocks if pool == group.home else settling.owed(index, pool)
            if (missing := want + owed - group.pools[pool].free_blocks) > 0:
                short[index, pool] = missing
        return short

    def evict_for(self, short: Mapping[tuple[int, int], int]) -> bool:
        """Evict what only the prefix index holds for these groups and pools. False where there is nothing."""
        gone = []
        for (index, pool), missing in short.items():
            gone += self.prefixes.make_room(index, pool, missing) if self.prefixes else ()
        for each in gone:
            self._emit(PrefixEvicted(-1, len(each.blocks), str(each)))
        return bool(gone)

    def no_slot(self) -> NoRoom:
        """As many sequences are here as may be."""
        return NoRoom(0, f"sequence slots: all {self.plan.max_seqs} are in use")
