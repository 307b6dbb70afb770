"""The ledger of one pool."""

from __future__ import annotations

import numpy as np
import pytest

from kvarn.kv.pool import EMPTY, BlockPool


def test_take_all_or_nothing() -> None:
    pool = BlockPool(4, 2)
    first = pool.take(3)
    assert first is not None and len(set(first)) == 3
    assert (pool.free_blocks, pool.held_blocks) == (1, 3)
    assert pool.take(2) is None and pool.free_blocks == 1
    assert pool.take(0) == []
    pool.check()


def test_lower_blocks_first_and_freed_ones_again() -> None:
    pool = BlockPool(5, 2)
    assert pool.take(3) == [0, 1, 2]
    assert pool.give_back([1, 0]) == [1, 0]
    assert pool.take(2) == [1, 0]


def test_a_shared_block_is_free_when_the_last_lets_go() -> None:
    pool = BlockPool(2, 2)
    pool.take(1)
    pool.share([0])
    assert pool.give_back([0]) == []
    assert pool.give_back([0]) == [0]
    with pytest.raises(AssertionError, match="more often than taken"):
        pool.give_back([0])


def test_freed_blocks_hold_nothing() -> None:
    pool = BlockPool(3, 4)
    taken = pool.take(2)
    assert taken is not None
    pool.fill(np.array([0, 1, 5]), np.array([10, 11, 12]))
    assert pool.stored_slots == 3 and pool.positions[0].tolist() == [10, 11, EMPTY, EMPTY]
    pool.empty(np.array([1, 2]))  # one of them held nothing
    assert pool.stored_slots == 2
    pool.give_back(taken)
    assert pool.stored_slots == 0 and (pool.positions == EMPTY).all()
    pool.check()


def test_copy_and_adopt_count_what_they_bring() -> None:
    pool, other = BlockPool(4, 2), BlockPool(4, 2)
    pool.take(3)
    other.take(1)
    pool.fill(np.array([0, 1, 2]), np.array([7, 8, 9]))
    pool.copy([1], [2])
    other.adopt(pool, [0], [0])
    assert pool.positions[2].tolist() == [9, EMPTY] and other.positions[0].tolist() == [7, 8]
    assert (pool.stored_slots, other.stored_slots) == (4, 2)
    pool.check()
    other.check()


def test_runs_are_consecutive_first_fit() -> None:
    pool = BlockPool(8, 2)
    assert pool.take_run(3) == [0, 1, 2]
    assert pool.take_run(3) == [3, 4, 5]
    pool.give_back([0, 1, 2])
    assert pool.take_run(4) is None, "5 are free, but no 4 side by side"
    assert pool.free_blocks == 5
    assert pool.take_run(2) == [0, 1]
    assert pool.take_run(1) == [2]
    assert pool.take_run(2) == [6, 7]
    assert pool.take_run(1) is None
    pool.check()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda p: p._free.append(p._free[0]), "twice"),
        (lambda p: p._free.pop(), "disagree"),
        (lambda p: p.refs.__setitem__(0, 0), "disagree"),
        (lambda p: setattr(p, "stored_slots", 1), "miscounted"),
        (lambda p: (p.positions.__setitem__((3, 0), 5), setattr(p, "stored_slots", 1)), "free block"),
    ],
)
def test_check_finds_every_kind_of_imbalance(spoil, words: str) -> None:
    pool = BlockPool(4, 2)
    pool.take(2)
    pool.check()
    spoil(pool)
    with pytest.raises(AssertionError, match=words):
        pool.check()
