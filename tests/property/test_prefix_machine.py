"""Attack the prefix index: sequences look up, grow, fork and leave, blocks are evicted, in any order, against a plain
dictionary from (identity, text) to blocks."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvarn.kv.identity import Identity
from kvarn.kv.prefix import PrefixIndex
from kvarn.kv.prefix_node import Node

SIZE = 2
IDENTITIES = (
    Identity("model", SIZE, "bfloat16", salt=b"a"),
    Identity("model", SIZE, "bfloat16", salt=b"b"),
    Identity("model", SIZE, "int8", salt=b"a"),
)
TEXT = st.lists(st.integers(0, 1), min_size=1, max_size=12)
Key = tuple[Identity, tuple[int, ...]]


@dataclass
class Guest:
    """A sequence: where it stands, and the text up to there."""

    identity: Identity
    place: Node
    text: tuple[int, ...]


class PrefixMachine(RuleBasedStateMachine):
    @initialize(windows=st.lists(st.sampled_from([None, None, 1, 2, 4, 5]), min_size=1, max_size=3))
    def begin(self, windows: list[int | None]) -> None:
        self.windows = windows
        self.index = PrefixIndex(SIZE, windows)
        self.known: dict[Key, list[int | None]] = {}
        self.used: dict[tuple[Key, int], int] = {}  # when somebody last needed a group's block
        self.guests: list[Guest] = []
        self.next_block, self.clock = 0, 0

    # -- the model ----------------------------------------------------------------------------------------------------

    def reach(self, group: int) -> int:
        window = self.windows[group]
        return 1 << 30 if window is None else -(-(window - 1) // SIZE)

    def needed(self, guest: Guest, group: int) -> set[Key]:
        """The blocks of a group that the next token of a sequence can see."""
        n = len(guest.text) // SIZE
        ends = range(max(0, n - self.reach(group)) + 1, n + 1)
        return {(guest.identity, guest.text[: end * SIZE]) for end in ends}

    def in_use(self, group: int) -> set[Key]:
        return {key for guest in self.guests for key in self.needed(guest, group)}

    def usable(self, identity: Identity, text: list[int]) -> int:
        """Blocks of a text that a new sequence can take over, found the slow way."""
        best = 0
        for n in range(1, (len(text) - 1) // SIZE + 1):
            chain = [(identity, tuple(text[: end * SIZE])) for end in range(1, n + 1)]
            if any(key not in self.known for key in chain):
                break
            seen = [chain[max(0, n - self.reach(g)) :] for g in range(len(self.windows))]
            if all(self.known[key][g] is not None for g, keys in enumerate(seen) for key in keys):
                best = n
        return best

    def longest_part(self, identity: Identity, done: tuple[int, ...], wanted: tuple[int, ...]) -> int:
        """The most tokens of `wanted` that one whole known block after `done` begins with."""
        most = 0
        for (other, text), blocks in self.known.items():
            if other == identity and text[:-SIZE] == done and len(text) > 0 and None not in blocks:
                common = 0
                while common < len(wanted) and text[len(done) + common] == wanted[common]:
                    common += 1
                most = max(most, common)
        return most

    def touch(self, guest: Guest) -> None:
        self.clock += 1
        for group in range(len(self.windows)):
            for key in self.needed(guest, group):
                self.used[key, group] = self.clock

    def prune(self) -> None:
        """What holds no block, is in nobody's way and leads nowhere is not known."""
        occupied = {(g.identity, g.text[:end]) for g in self.guests for end in range(SIZE, len(g.text) + 1, SIZE)}
        while True:
            inner = {(identity, text[:-SIZE]) for identity, text in self.known}
            empty = [k for k, b in self.known.items() if not any_block(b) and k not in inner and k not in occupied]
            if not empty:
                return
            for key in empty:
                del self.known[key]

    # -- what happens -------------------------------------------------------------------------------------------------

    @rule(identity=st.sampled_from(IDENTITIES), text=TEXT)
    def arrive(self, identity: Identity, text: list[int]) -> None:
        match = self.index.lookup(identity, text)
        assert match == self.index.lookup(identity, text)
        usable = self.usable(identity, text)
        assert match.tokens == usable * SIZE == len(match.nodes) * SIZE <= len(text) - 1
        done = tuple(text[: match.tokens])
        wanted = tuple(text[match.tokens : min(match.tokens + SIZE, len(text) - 1)])
        assert match.partial_tokens == self.longest_part(identity, done, wanted)
        for group in range(len(self.windows)):
            n = min(usable, self.reach(group))
            keys = [(identity, tuple(text[: end * SIZE])) for end in range(usable - n + 1, usable + 1)]
            assert self.index.parts(match, group) == tuple(((0, self.known[k][group]),) for k in keys)
        self.guests.append(Guest(identity, self.index.acquire(match), done))

    @precondition(lambda self: self.guests)
    @rule(
        which=st.integers(0, 99), tokens=st.lists(st.integers(0, 1), min_size=SIZE, max_size=SIZE), late=st.booleans()
    )
    def grow(self, which: int, tokens: list[int], late: bool) -> None:
        guest = self.guests[which % len(self.guests)]
        blocks = list(range(self.next_block, self.next_block + len(self.windows)))
        self.next_block += len(self.windows)
        given = [b if self.windows[g] is None or not late else None for g, b in enumerate(blocks)]
        parts = [None if b is None else ((0, b),) for b in given]
        here = self.known.get((guest.identity, guest.text + tuple(tokens)), [None] * len(given))
        if any(mine is not None and theirs is not None for mine, theirs in zip(given, here, strict=True)):
            assert self.index.extend(guest.place, tokens, parts) is None
        inserted = self.index.extend(guest.place, tokens, parts, switches=True)
        assert inserted is not None
        self.touch(guest)
        guest.place, guest.text = inserted.node, guest.text + tuple(tokens)
        old = self.known.setdefault((guest.identity, guest.text), [None] * len(self.windows))
        assert inserted.adopted == tuple(g for g, b in enumerate(given) if b is not None and old[g] is None)
        for group in inserted.adopted:
            old[group] = given[group]
            self.used[(guest.identity, guest.text), group] = self.clock
        self.prune()

    @precondition(lambda self: self.guests)
    @rule(which=st.integers(0, 99))
    def fork(self, which: int) -> None:
        guest = self.guests[which % len(self.guests)]
        self.guests.append(Guest(guest.identity, self.index.pin(guest.place), guest.text))

    @precondition(lambda self: self.guests)
    @rule(which=st.integers(0, 99))
    def leave(self, which: int) -> None:
        guest = self.guests.pop(which % len(self.guests))
        self.index.unpin(guest.place)
        self.touch(guest)
        self.prune()

    @rule(group=st.integers(0, 2), n_blocks=st.integers(1, 4))
    def evict(self, group: int, n_blocks: int) -> None:
        group %= len(self.windows)
        evictable = self.index.evictable_blocks(group, 0)
        freed = 0
        for eviction in self.index.evict(group, 0, n_blocks):
            freed += sum(pool == (group, 0) for pool, _ in eviction.blocks)
            self.check_oldest(group, dict(block for block in eviction.blocks))
            for (g, _), block in eviction.blocks:
                (key,) = (k for k, blocks in self.known.items() if blocks[g] == block)
                assert key not in self.in_use(g), "evicted what is in use"
                assert len(key[1]) == eviction.tokens
                self.known[key][g] = None
            self.prune()
        assert freed == min(n_blocks, evictable)

    def check_oldest(self, group: int, evicted: dict) -> None:
        """Nothing of the group that is not in use was used longer ago (and what is whole goes from its end)."""
        busy = self.in_use(group)
        (key,) = (k for k, blocks in self.known.items() if blocks[group] == evicted[group, 0])
        free = [k for k, blocks in self.known.items() if blocks[group] is not None and k not in busy]
        assert self.used[key, group] == min(self.used[k, group] for k in free)
        if self.windows[group] is None:
            assert not any(identity == key[0] and text[:-SIZE] == key[1] for identity, text in self.known)

    @rule()
    def reset(self) -> None:
        blocks = self.index.reset()
        assert sorted(b for _, b in blocks) == sorted(b for bs in self.known.values() for b in bs if b is not None)
        for guest in self.guests:
            assert self.index.extend(guest.place, [0] * SIZE, [((0, 0),)] * len(self.windows)) is None
            self.index.unpin(guest.place)
        self.guests.clear()
        self.known.clear()

    # -- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check()
        assert len(self.index) == len(self.known)
        for group in range(len(self.windows)):
            blocks = {k: b[group] for k, b in self.known.items() if b[group] is not None}
            assert self.index.named(group, 1)[0] == dict.fromkeys(blocks.values(), 1)
            assert self.index.evictable_blocks(group, 0) == len(blocks.keys() - self.in_use(group))

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        while self.guests:
            self.leave(0)
        for group in range(len(self.windows)):
            self.index.evict(group, 0, 1 << 30)
        assert len(self.index) == 0 and not self.index._roots and not self.index._shelves


def any_block(blocks: list[int | None]) -> bool:
    return any(block is not None for block in blocks)


PrefixMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPrefixIndex = PrefixMachine.TestCase
