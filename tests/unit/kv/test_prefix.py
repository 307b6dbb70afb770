"""The prefix index on hand-made texts. Block size 4; each block's id is given in order."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from itertools import count

import pytest

from kvarn.kv.identity import Identity, block_key
from kvarn.kv.prefix import Inserted, PrefixIndex
from kvarn.kv.prefix_node import Node
from kvarn.kv.prefix_why import Complete, Evicted, Mismatch, NeverSeen, OtherIdentity, PrefixStats, WindowGone

SIZE = 4
ME = Identity("model", SIZE, "bfloat16", salt=b"me")


class Sealer:
    """Puts whole texts into an index, as a manager would, and leaves."""

    def __init__(self, windows: Sequence[int | None] = (None,), **more) -> None:
        self.index = PrefixIndex(SIZE, windows, **more)
        self.windows, self._ids = windows, count()

    def enter(self, tokens: Sequence[int], identity: Identity = ME) -> Node:
        """The place of a sequence that computed all full blocks of `tokens`."""
        match = self.index.lookup(identity, [*tokens, 0])
        place = self.index.acquire(match)
        for begin in range(match.tokens, len(tokens) - SIZE + 1, SIZE):
            inserted = self.extend(place, tokens[begin : begin + SIZE])
            assert inserted is not None
            place = inserted.node
        self.index.check()
        return place

    def extend(self, place: Node, tokens: Sequence[int]) -> Inserted | None:
        return self.index.extend(place, tokens, [((0, next(self._ids)),) for _ in self.windows], switches=True)

    def store(self, tokens: Sequence[int], identity: Identity = ME) -> None:
        self.index.unpin(self.enter(tokens, identity))
        self.index.check()

    def cached(self, tokens: Sequence[int], identity: Identity = ME, **more) -> int:
        return self.index.lookup(identity, tokens, **more).tokens


def text(n: int, last: int | None = None) -> list[int]:
    return [*range(100, 100 + n - (last is not None))] + ([] if last is None else [last])


def test_whole_blocks_are_found_and_the_last_token_is_left_to_compute():
    sealer = Sealer()
    sealer.store(text(12))
    assert [sealer.cached(text(n)) for n in (1, 4, 5, 8, 9, 12, 13, 20)] == [0, 0, 4, 4, 8, 8, 12, 12]
    match = sealer.index.lookup(ME, text(13))
    assert sealer.index.parts(match, 0) == (((0, 0),), ((0, 1),), ((0, 2),))
    assert match.why == Complete(12)


def test_a_block_is_found_only_after_the_same_beginning():
    sealer = Sealer()
    sealer.store(text(8))
    assert sealer.cached([1, 2, 3, 4, *text(8)[4:], 0]) == 0
    assert sealer.cached([*text(8)[4:], 0]) == 0


@pytest.mark.parametrize(
    "other",
    [
        Identity("other model", SIZE, "bfloat16", salt=b"me"),
        Identity("model", SIZE, "int8", salt=b"me"),
        Identity("model", SIZE, "bfloat16", policy="h2o(64)", salt=b"me"),
        Identity("model", SIZE, "bfloat16", adapter="lora", salt=b"me"),
        Identity("model", SIZE, "bfloat16", salt=b"you"),
        Identity("model", SIZE, "bfloat16"),
    ],
)
def test_identities_share_nothing(other: Identity):
    sealer = Sealer()
    sealer.store(text(8))
    match = sealer.index.lookup(other, text(9))
    assert (match.tokens, match.partial_tokens, match.why) == (0, 0, NeverSeen(0))
    assert other.root_key() != ME.root_key()
    sealer.store(text(8), other)
    assert len(sealer.index) == 4


def test_fields_of_an_identity_do_not_run_into_each_other():
    shifted = (Identity("m", 4, "ab", "c"), Identity("m", 4, "a", "bc"), Identity("ma", 4, "b", "c"))
    assert len({identity.root_key() for identity in shifted}) == 3
    assert block_key(b"p", [1, 2]) != block_key(b"p", [2, 1])
    assert block_key(b"p", [1, 2]) != block_key(b"p", [1])


def test_the_partial_match_is_the_longest():
    sealer = Sealer()
    for last in ([1, 1, 1, 1], [1, 2, 3, 4], [1, 2, 5, 5], [7, 7, 7, 7]):
        sealer.store([*text(4), *last])
    match = sealer.index.lookup(ME, [*text(4), 1, 2, 3, 9, 9])
    assert (match.tokens, match.partial_tokens) == (4, 3)
    assert match.partial is not None and match.partial.tokens == (1, 2, 3, 4)
    assert sealer.index.lookup(ME, [*text(4), 9, 9]).partial is None
    assert sealer.index.lookup(ME, [*text(4), 1, 2, 3, 9, 9], partial=False).partial is None


def test_a_prompt_of_whole_blocks_reuses_all_but_its_last_token():
    sealer = Sealer()
    sealer.store(text(8))
    match = sealer.index.lookup(ME, text(8))
    assert (match.tokens, match.partial_tokens) == (4, 3)


def test_what_was_used_last_stays_longest_and_leaves_go_first():
    sealer = Sealer()
    sealer.store(text(8, last=1))
    sealer.store(text(8, last=2))
    sealer.store(text(12, last=3))
    sealer.store(text(8, last=1))
    gone = [e.tokens for _ in range(5) for e in sealer.index.evict(0, 0, 1)]
    assert gone == [8, 12, 8, 8, 4]  # the 2, the 3 and its parent, the 1, and last what all share
    assert len(sealer.index) == 0


def test_what_is_in_use_is_not_evicted():
    sealer = Sealer()
    place = sealer.enter(text(8))
    sealer.store(text(12))
    assert sealer.index.evictable_blocks(0, 0) == 1
    assert [e.tokens for e in sealer.index.evict(0, 0, 10)] == [12]
    assert sealer.cached(text(12)) == 8
    sealer.index.pin(place)
    sealer.index.unpin(place)
    assert sealer.index.evict(0, 0, 10) == ()
    sealer.index.unpin(place)
    assert sealer.index.evictable_blocks(0, 0) == 2


def test_evictions_say_what_and_why():
    sealer = Sealer()
    sealer.store(text(8))
    sealer.store(text(8, last=1))
    (gone,) = sealer.index.evict(0, 0, 1)
    assert gone.blocks == (((0, 0), 1),)
    assert str(gone) == "prefix block ending at token 8: least recently used, 2 uses ago"


def test_a_second_sequence_with_the_same_text_switches_to_the_first_ones_blocks_or_goes_on_alone():
    sealer = Sealer()
    first, second = (sealer.index.acquire(sealer.index.lookup(ME, text(5))) for _ in range(2))
    one = sealer.extend(first, text(4))
    assert one is not None and one.adopted == (0,)
    assert sealer.index.extend(second, text(4), [((0, 8),)]) is None
    two = sealer.index.extend(second, text(4), [((0, 8),)], switches=True)
    assert two is not None and two.node is one.node and two.adopted == ()
    assert sealer.index.named(0, 1) == [{0: 1}]
    sealer.index.unpin(one.node)
    assert sealer.index.evictable_blocks(0, 0) == 0
    sealer.index.unpin(two.node)
    assert sealer.index.evictable_blocks(0, 0) == 1


def test_windows_need_only_their_last_blocks():
    sealer = Sealer((None, 6))  # the next token sees 5 before it: two blocks
    sealer.store(text(16))
    match = sealer.index.lookup(ME, text(17))
    assert sealer.index.parts(match, 0) == tuple(((0, 2 * i),) for i in range(4))
    assert sealer.index.parts(match, 1) == (((0, 5),), ((0, 7),))
    assert [e.blocks for e in sealer.index.evict(1, 0, 2)] == [(((1, 0), 1),), (((1, 0), 3),)]
    assert sealer.cached(text(17)) == 16
    match = sealer.index.lookup(ME, text(9))
    assert (match.tokens, match.why) == (0, WindowGone(0, 1))
    sealer.index.check()


def test_a_lost_window_part_comes_back_with_the_next_sequence_that_computes_it():
    sealer = Sealer((None, 6))
    sealer.store(text(8))
    sealer.index.evict(1, 0, 2)
    place = sealer.index.acquire(sealer.index.lookup(ME, text(9)))
    for begin in (0, 4):
        inserted = sealer.extend(place, text(8)[begin : begin + 4])
        assert inserted is not None and inserted.adopted == (1,)
        place = inserted.node
    assert sealer.cached(text(9)) == 8
    sealer.index.unpin(place)
    sealer.index.check()


def test_a_model_of_windows_only_keeps_the_end_of_a_long_text():
    sealer = Sealer((6,))
    sealer.store(text(32))
    assert len(sealer.index.evict(0, 0, 6)) == 6
    assert sealer.cached(text(33)) == 32
    sealer.index.evict(0, 0, 1)
    sealer.index.check()
    assert sealer.cached(text(33)) == 0
    sealer.index.evict(0, 0, 1)
    assert len(sealer.index) == 0


def test_two_windows_and_the_smallest():
    sealer = Sealer((None, 1, 9))
    sealer.store(text(12))
    match = sealer.index.lookup(ME, text(13))
    assert [len(sealer.index.parts(match, group)) for group in range(3)] == [3, 0, 2]
    assert sealer.index.evictable_blocks(1, 0) == 3


def test_why_a_lookup_ends():
    sealer = Sealer()
    sealer.store(text(12))
    sealer.index.evict(0, 0, 1)
    lookup = sealer.index.lookup
    assert lookup(ME, text(13)).why == Evicted(8)
    assert lookup(ME, text(9)).why == Complete(8)
    assert str(lookup(ME, text(4)).why) == "there is no full block before the last token"
    assert lookup(ME, [*text(4), 9, 9, 9, 9, 9]).why == NeverSeen(4)
    sealer.index.evict(0, 0, 10)
    assert lookup(ME, text(13)).why == Evicted(0)
    sealer.store(text(12))
    assert lookup(ME, text(13)).why == Complete(12)


def test_explain_names_another_format_but_never_another_salt():
    sealer = Sealer()
    lossy = Identity("model", SIZE, "int8", salt=b"me")
    sealer.store(text(12), lossy)
    sealer.store(text(16), Identity("model", SIZE, "bfloat16", salt=b"you"))
    match = sealer.index.lookup(ME, text(20))
    assert match.why == NeverSeen(0)
    assert sealer.index.explain(match, text(20)) == OtherIdentity(0, 12, lossy)
    assert "int8 (12 tokens)" in str(sealer.index.explain(match, text(20)))
    you = sealer.index.lookup(Identity("model", SIZE, "int8", salt=b"you"), text(20))
    assert sealer.index.explain(you, text(20)) == OtherIdentity(0, 16, Identity("model", SIZE, "bfloat16", salt=b"you"))


def test_equal_keys_of_different_texts_are_never_mixed_up():
    sealer = Sealer(digest=lambda data: b"all alike")
    sealer.store(text(4))
    match = sealer.index.lookup(ME, [1, 2, 3, 4, 5])
    assert (match.tokens, match.why) == (0, Mismatch(0))
    place = sealer.index.acquire(match)
    assert sealer.extend(place, [1, 2, 3, 4]) is None
    sealer.index.unpin(place)
    assert sealer.cached([*text(4), *text(4), 0]) == 4  # the same tokens, but not after the same block
    you = Identity("model", SIZE, "bfloat16", salt=b"you")
    sealer.index.acquire(sealer.index.lookup(you, text(5)))
    assert sealer.cached(text(5), you) == 0
    sealer.index.check()


def test_reset_gives_every_block_back_and_lets_running_sequences_end():
    sealer = Sealer((None, 6))
    place = sealer.enter(text(8))
    sealer.store(text(12))
    assert sorted(sealer.index.reset()) == [
        ((0, 0), 0),
        ((0, 0), 2),
        ((0, 0), 4),
        ((1, 0), 1),
        ((1, 0), 3),
        ((1, 0), 5),
    ]
    assert sealer.cached(text(12)) == 0
    sealer.index.pin(place)
    assert sealer.extend(place, text(4)) is None
    sealer.store(text(4))
    sealer.index.unpin(place)
    sealer.index.unpin(place)
    sealer.index.check()
    assert len(sealer.index) == 1


def test_formats_side_by_side_are_evicted_where_it_helps():
    index = PrefixIndex(SIZE, (None,))
    for pool, kv_format in enumerate(("bfloat16", "int8")):
        place = index.acquire(index.lookup(Identity("model", SIZE, kv_format), text(5)))
        inserted = index.extend(place, text(4), [((pool, 7),)])
        assert inserted is not None
        index.unpin(inserted.node)
    assert [index.evictable_blocks(0, pool) for pool in range(3)] == [1, 1, 0]
    assert index.evict(0, 2, 1) == ()
    (gone,) = index.evict(0, 1, 5)  # the younger one: the older lies in another pool
    assert gone.blocks == (((0, 1), 7),)
    index.check()


def test_tables_of_several_rows():
    index = PrefixIndex(SIZE, (None,))
    place = index.acquire(index.lookup(ME, text(5)))
    inserted = index.extend(place, text(4), [((0, 3), (0, 4), (1, 9))])
    assert inserted is not None
    index.unpin(inserted.node)
    assert (index.evictable_blocks(0, 0), index.evictable_blocks(0, 1)) == (2, 1)
    assert index.named(0, 2) == [{3: 1, 4: 1}, {9: 1}]


def test_stats_are_counted_apart():
    sealer, stats = Sealer(), PrefixStats()
    sealer.store(text(8))
    for _ in range(3):
        match = sealer.index.lookup(ME, text(13))
    stats.note(match.asked_tokens, match.tokens, match.why)
    assert (stats.lookups, stats.asked_tokens, stats.hit_tokens) == (1, 13, 8)
    assert stats.endings == {"NeverSeen": 1}


def test_no_torch_where_integers_decide():
    found = "sorted({'torch', 'transformers'} & set(sys.modules))"
    code = f"import sys, kvarn.engine.scheduler, kvarn.kv.prefix; print({found})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"
