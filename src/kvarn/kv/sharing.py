"""Between the prefix index, which decides, and the groups, which hold: taking over found blocks, feeding the index with
new ones, and giving back what it lets go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvarn.kv.group import CacheGroup
from kvarn.kv.identity import Identity
from kvarn.kv.policies.base import KVPolicy
from kvarn.kv.prefix import Eviction, Match, PrefixIndex
from kvarn.kv.prefix_node import Node, Part
from kvarn.kv.prefix_why import PrefixStats, Unused
from kvarn.kv.state import SequenceState
from kvarn.kv.table import OPEN

MOST_FOUND = 256  # lookups of waiting sequences that are kept


class _Found(NamedTuple):
    """A lookup, and what it saw of the index."""

    match: Match
    stamp: tuple[int, ...]


def why_unused(policy: KVPolicy | None, reuse: bool) -> Unused | None:
    """Why a request's prompt is computed anew whatever the index holds; None where it is not."""
    if not reuse:
        return Unused(0, "every token of the prompt was asked for")
    if policy is not None and not policy.prefix_pure:
        name = type(policy).__name__.lower()
        return Unused(0, f"the policy {name} reads what the whole prompt attends to, so all of it is computed")
    return None


class PrefixSharing:
    """The prefix index of one manager. model: fingerprint of the weights and of how they are computed."""

    def __init__(self, groups: Sequence[CacheGroup], block_size: int, model: str) -> None:
        self.index = PrefixIndex(block_size, [g.spec.window_tokens for g in groups])
        self.stats = PrefixStats()
        self._found: dict[int, _Found] = {}
        self._groups, self._size, self._model = groups, block_size, model
        self._format = ",".join(g.views[g.home].format.name for g in groups)
        self._copies = all(g.home == OPEN for g in groups)

    def identity(self, salt: bytes) -> Identity:
        return Identity(self._model, self._size, self._format, salt=salt)

    def lookup(self, seq_id: int, token_ids: Sequence[int], salt: bytes) -> Match:
        """What the index holds of a sequence's text. A sequence that waits asks again at each step: what was found is
        kept until the index changes where it ends."""
        identity, found = self.identity(salt), self._found.get(seq_id)
        if found is not None and (found.match.identity, found.match.asked_tokens) == (identity, len(token_ids)):
            match, stamp = found
            if stamp == self.index.stamp(match):
                return match
        match = self.index.lookup(identity, token_ids, partial=self._copies)
        if len(self._found) >= MOST_FOUND:
            self._found.clear()
        self._found[seq_id] = _Found(match, self.index.stamp(match))
        return match

    # -- a sequence comes, grows, forks, leaves ---------------------------------------------------------------------
    def take_over(self, state: SequenceState, match: Match) -> int:
        """The sequence's rows name what was found; a block that fits only in part is copied if one is free. Returns the
        tokens that are now cached. The match was acquired: state.place is pinned."""
        self._found.pop(state.seq_id, None)
        for index, (group, row) in enumerate(zip(self._groups, state.rows, strict=True)):
            for part in self.index.parts(match, index):
                for offset, (pool, block) in enumerate(part):
                    group.adopt_block(row + offset, pool, block)
        state.length = match.tokens
        if match.partial is not None:
            state.length += self._copy_part(state, match.partial, match.partial_tokens)
        self.stats.note(match.asked_tokens, state.length, match.why)
        return state.length

    def _copy_part(self, state: SequenceState, node: Node, tokens: int) -> int:
        """Copy the node's blocks, of which the first `tokens` slots count; 0 where blocks for that are not free."""
        if any(g.pools[OPEN].free_blocks < g.rows_per_seq for g in self._groups):
            return 0
        for group, row, part in zip(self._groups, state.rows, node.parts, strict=True):
            assert part is not None, "a partial match needs the blocks of every group"
            group.copy_blocks_to(row, [block for _, block in part], tokens)
        return tokens

    def feed(self, state: SequenceState) -> None:
        """Give the index the sequence's blocks that are complete and at rest since last time."""
        while state.place is not None and (state.indexed + 1) * self._size <= state.length:
            parts = [self._part(g, r, state) for g, r in zip(self._groups, state.rows, strict=True)]
            if any(p is None and g.spec.window_tokens is None for p, g in zip(parts, self._groups, strict=True)):
                return
            begin = state.indexed * self._size
            span = state.token_ids[begin : begin + self._size]
            inserted = self.index.extend(state.place, span, parts, switches=True)
            if inserted is None:
                self.leave(state)
                return
            for index, part in enumerate(parts):
                if index in inserted.adopted:
                    for pool, block in part or ():
                        self._groups[index].pools[pool].share((block,))
                elif part is not None:
                    self._switch(index, state, part, inserted.node.parts[index])
            state.place = inserted.node
            state.indexed += 1

    def _switch(self, index: int, state: SequenceState, own: Part, known: Part | None) -> None:
        """The sequence computed what the index holds already: it goes on with those blocks and gives its own back."""
        group, row = self._groups[index], state.rows[index]
        assert known is not None, "the index neither adopted the blocks nor has any"
        column = self._column(group, row, state)
        for offset, ((pool, mine), (known_pool, theirs)) in enumerate(zip(own, known, strict=True)):
            if (pool, mine) != (known_pool, theirs):
                assert pool == known_pool, "blocks of one identity lie in one pool"
                group.pools[pool].share((theirs,))
                group.tables.replace(row + offset, column, pool, theirs)
                group.free_reference(pool, mine)

    def _column(self, group: CacheGroup, row: int, state: SequenceState) -> int:
        """Where block number state.indexed of the text stands in the tables; negative where it was dropped."""
        return state.indexed - (state.length - int(group.tables.fill[row])) // self._size

    def _part(self, group: CacheGroup, row: int, state: SequenceState) -> Part | None:
        """The group's blocks that hold block number state.indexed of the text; None while not sealed, or dropped."""
        tables, rest = group.tables, group.home
        column = self._column(group, row, state)
        rows = range(row, row + group.rows_per_seq)
        if column < 0 or any(tables.pool[r, column] != rest for r in rows):
            return None
        return tuple((rest, int(tables.block[r, column])) for r in rows)

    def fork(self, parent: SequenceState, child: SequenceState) -> None:
        if parent.place is not None:
            child.place, child.indexed = self.index.pin(parent.place), parent.indexed

    def leave(self, state: SequenceState) -> None:
        """The sequence uses and feeds the index no more."""
        if state.place is not None:
            self.index.unpin(state.place)
            state.place = None

    # -- room ---------------------------------------------------------------------------------------------------------
    def spare_blocks(self, group: int, pool: int) -> int:
        """Blocks that only the index holds and nobody uses."""
        return self.index.evictable_blocks(group, pool)

    def make_room(self, group: int, pool: int, n_blocks: int) -> tuple[Eviction, ...]:
        """Evict until n_blocks of a pool are free that were not, or there is no more. What a sequence holds that has
        left the index (its policy decides) is not freed by that."""
        ledger, gone = self._groups[group].pools[pool], list[Eviction]()
        wanted = ledger.free_blocks + n_blocks
        while ledger.free_blocks < wanted and (some := self.index.evict(group, pool, wanted - ledger.free_blocks)):
            for eviction in some:
                self._give_back(eviction.blocks)
            gone += some
        self.stats.evicted_blocks += sum(len(e.blocks) for e in gone)
        return tuple(gone)

    def reset(self) -> None:
        """Forget everything that is cached."""
        self._give_back(self.index.reset())

    def _give_back(self, blocks: Sequence[tuple[tuple[int, int], int]]) -> None:
        for (group, pool), block in blocks:
            self._groups[group].free_reference(pool, block)

    def named(self, group: int) -> list[Counter[int]]:
        return self.index.named(group, len(self._groups[group].pools))
