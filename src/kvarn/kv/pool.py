"""The ledger of one pool: which blocks are free, how often each held one is referenced, what each slot holds.

Integers only: the numbers live in tensors that `kvarn.kv.storage` allocates; the kernels read `positions` in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

EMPTY = -1


class BlockPool:
    """n_blocks blocks of block_size slots. A block is free (reference count 0) or held.

    positions [n_blocks, block_size] int32: the logical position in each slot, EMPTY where it holds nothing.
    fresh: from this block on, none was ever taken. stored_slots: how many slots hold a token. mass
    [n_blocks, block_size] float32: attention that each slot got, where a policy asked for it.
    """

    def __init__(self, n_blocks: int, block_size: int) -> None:
        self.n_blocks, self.block_size = n_blocks, block_size
        self.positions = np.full((n_blocks, block_size), EMPTY, dtype=np.int32)
        self.flat_positions = self.positions.reshape(-1)
        self.refs = np.zeros(n_blocks, dtype=np.int32)
        self._free = list(range(n_blocks - 1, -1, -1))
        self.fresh = self.stored_slots = 0
        self.mass: np.ndarray | None = None

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def held_blocks(self) -> int:
        return self.n_blocks - len(self._free)

    def take(self, n: int) -> list[int] | None:
        """n free blocks, each now referenced once; None (and nothing changed) where fewer are free."""
        if n > len(self._free):
            return None
        cut = len(self._free) - n
        taken = self._free[cut:][::-1]
        del self._free[cut:]
        return self._took(taken)

    def take_run(self, n: int) -> list[int] | None:
        """n free blocks with consecutive ids, first fit; None where there is no such run (contiguous allocation)."""
        run = _first_run(self.refs == 0, n)
        if run is None:
            return None
        taken = list(range(run, run + n))
        gone = set(taken)
        self._free = [b for b in self._free if b not in gone]
        return self._took(taken)

    def _took(self, taken: list[int]) -> list[int]:
        self.refs[taken] = 1
        self.fresh = max(self.fresh, max(taken, default=-1) + 1)
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference to each of these held blocks."""
        self.refs[list(blocks)] += 1

    def give_back(self, blocks: Sequence[int]) -> list[int]:
        """One reference less to each; returns those that became free, their slots emptied."""
        freed = []
        for block in blocks:
            count = int(self.refs[block]) - 1
            assert count >= 0, f"block {block} given back more often than taken"
            self.refs[block] = count
            if count == 0:
                freed.append(block)
        if freed:
            self.stored_slots -= int(np.count_nonzero(self.positions[freed] >= 0))
            self.positions[freed] = EMPTY
            if self.mass is not None:
                self.mass[freed] = 0.0
            self._free.extend(reversed(freed))
        return freed

    def fill(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """These empty slots (block * block_size + slot, any shape) now hold the tokens at these logical positions (a
        shape that broadcasts)."""
        self.flat_positions[slots] = positions
        self.stored_slots += slots.size

    def empty(self, slots: np.ndarray) -> None:
        """These slots hold nothing any more."""
        self.stored_slots -= int(np.count_nonzero(self.flat_positions[slots] >= 0))
        self.flat_positions[slots] = EMPTY
        if self.mass is not None:
            self.mass.reshape(-1)[slots] = 0.0

    def add_mass(self, blocks: np.ndarray, mass: np.ndarray) -> None:
        """Add mass [n, block_size] to the slots of these different blocks."""
        if self.mass is None:
            self.mass = np.zeros(self.positions.shape, dtype=np.float32)
        self.mass[blocks] += mass

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Tokens move from the source slots to the target slots; all other sources become empty."""
        self.flat_positions[targets] = self.flat_positions[sources]
        self.flat_positions[sources] = EMPTY
        if self.mass is not None:
            flat = self.mass.reshape(-1)
            flat[targets] = flat[sources]
            flat[sources] = 0.0

    def copy_slots(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """The target slots, empty so far, hold what the source slots go on holding."""
        self.flat_positions[targets] = self.flat_positions[sources]
        self.stored_slots += sources.size
        if self.mass is not None:
            flat = self.mass.reshape(-1)
            flat[targets] = flat[sources]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """The target blocks, empty so far, hold what the sources hold."""
        self.adopt(self, sources, targets)

    def adopt(self, other: BlockPool, sources: Sequence[int], targets: Sequence[int]) -> None:
        """The target blocks, empty so far, hold what other's source blocks hold."""
        positions = other.positions[list(sources)]
        self.positions[list(targets)] = positions
        self.stored_slots += int(np.count_nonzero(positions >= 0))
        if other.mass is not None:
            self.add_mass(np.asarray(targets, dtype=np.int64), other.mass[list(sources)])

    def check(self) -> None:
        """The ledger balances: free + held == total, free exactly where unreferenced, and free slots hold nothing."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block stands in the free list twice"
        assert free == set(np.flatnonzero(self.refs == 0).tolist()), "free list and reference counts disagree"
        assert self.stored_slots == np.count_nonzero(self.positions >= 0), "stored slots miscounted"
        assert bool((self.positions[sorted(free)] == EMPTY).all()), "a free block has a slot that holds something"


def _first_run(free: np.ndarray, n: int) -> int | None:
    """Index of the first n consecutive True values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], free.astype(np.int8), [0]))))
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        if end - begin >= n:
            return int(begin)
    return None
