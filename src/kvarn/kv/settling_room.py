"""Room in further formats for what settles there: each open block of a sequence whose blocks all come to rest in a tier
finds one, so that what is settled never hangs on who else is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvarn.core.ledger import NoRoom
from kvarn.kv.governing import governed
from kvarn.kv.group import CacheGroup
from kvarn.kv.policies.base import KVPolicy
from kvarn.kv.sizing import blocks_for
from kvarn.kv.state import SequenceState
from kvarn.kv.table import OPEN


class SettlingRoom:
    """sequences: the manager's own, to read."""

    def __init__(self, groups: Sequence[CacheGroup], sequences: Mapping[int, SequenceState]) -> None:
        self._groups, self._sequences = groups, sequences

    def short_for_tokens(self, policy: KVPolicy | None, tokens: int) -> NoRoom | None:
        """Whether a new sequence of so many tokens would lack blocks to settle in."""
        return self._short(policy, [blocks_for(tokens, g.block_size) * g.rows_per_seq for g in self._groups])

    def short_for_blocks(self, policy: KVPolicy | None, wants: Sequence[int]) -> NoRoom | None:
        """Whether so many more open blocks in each group would."""
        return self._short(policy, wants)

    def short_for_child(self, parent: SequenceState) -> NoRoom | None:
        """Whether a fork would."""
        return self._short(parent.policy, [_open_blocks(g, r) for g, r in zip(self._groups, parent.rows, strict=True)])

    def _short(self, policy: KVPolicy | None, wants: Sequence[int]) -> NoRoom | None:
        if policy is None or (name := policy.settles_in) is None:
            return None
        for index, (group, want) in enumerate(zip(self._groups, wants, strict=True)):
            if want and governed(group.spec) and (pool := _tier(group, name)) is not None:
                missing = want + self._owed(index, name) - group.pools[pool].free_blocks
                if missing > 0:
                    return NoRoom(missing, f"{group.describe(index)}, {name}")
        return None

    def owed(self, index: int, pool: int) -> int:
        """Blocks of a further pool that open ones of the group will settle in."""
        return self._owed(index, self._groups[index].views[pool].format.name) if pool > self._groups[index].home else 0

    def _owed(self, index: int, name: str) -> int:
        """Open blocks of the group that will settle in this format."""
        mine = [s for s in self._sequences.values() if s.policy is not None and s.policy.settles_in == name]
        return sum(_open_blocks(self._groups[index], s.rows[index]) for s in mine)


def _tier(group: CacheGroup, name: str) -> int | None:
    names = [v.format.name for v in group.views]
    return names.index(name, group.home + 1) if name in names[group.home + 1 :] else None


def _open_blocks(group: CacheGroup, row: int) -> int:
    """How often the sequence's rows name an open block."""
    rows = slice(row, row + group.rows_per_seq)
    pools, lengths = group.tables.pool[rows], group.tables.length[rows]
    return int(((pools == OPEN) & (np.arange(pools.shape[1]) < lengths[:, None])).sum())
