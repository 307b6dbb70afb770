"""Block tables of one cache group: for each sequence, its blocks in the order in which they were filled.

A sequence owns `rows_per_seq` consecutive rows (1 where the grain is the group). `fill` counts the physical slots that
a row has filled, holes included, so the next token goes to column fill // block_size, slot fill % block_size.
The arrays are what the kernels read; nothing is copied for a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

OPEN = 0  # index of the open pool among a group's pools


class BlockTables:
    """Rows for max_seqs sequences of at most `columns` blocks each."""

    def __init__(self, max_seqs: int, columns: int, rows_per_seq: int = 1) -> None:
        rows = max_seqs * rows_per_seq
        self.rows_per_seq, self.columns = rows_per_seq, columns
        self.pool = np.zeros((rows, columns), dtype=np.uint8)
        self.block = np.zeros((rows, columns), dtype=np.int32)
        self.length = np.zeros(rows, dtype=np.int32)
        self.fill = np.zeros(rows, dtype=np.int32)
        self._free = list(range(rows - rows_per_seq, -1, -rows_per_seq))

    def take_row(self) -> int | None:
        """The first row of a new sequence, or None where all are in use."""
        return self._free.pop() if self._free else None

    def give_back_row(self, first: int) -> None:
        """Forget a sequence's rows (its blocks must have been given back)."""
        rows = slice(first, first + self.rows_per_seq)
        self.length[rows] = 0
        self.fill[rows] = 0
        self._free.append(first)

    @property
    def sequences(self) -> int:
        return len(self.length) // self.rows_per_seq - len(self._free)

    def entries(self, row: int) -> tuple[list[int], list[int]]:
        """(pool indices, block ids) of the row, in order."""
        n = self.length[row]
        return self.pool[row, :n].tolist(), self.block[row, :n].tolist()

    def append(self, row: int, pool: int, blocks: Sequence[int]) -> None:
        n = int(self.length[row])
        self.pool[row, n : n + len(blocks)] = pool
        self.block[row, n : n + len(blocks)] = blocks
        self.length[row] = n + len(blocks)

    def drop_front(self, row: int, n: int, block_size: int) -> None:
        """Forget the row's first n blocks; the others move up."""
        self.drop(row, np.arange(n), block_size)

    def drop(self, row: int, columns: np.ndarray, block_size: int) -> None:
        """Forget the full blocks at these columns; the others move up and keep their order."""
        n = int(self.length[row])
        keep = np.ones(n, dtype=bool)
        keep[columns] = False
        left = int(keep.sum())
        self.pool[row, :left] = self.pool[row, :n][keep]
        self.block[row, :left] = self.block[row, :n][keep]
        self.length[row] = left
        self.fill[row] -= (n - left) * block_size

    def replace(self, row: int, column: int, pool: int, block: int) -> None:
        self.pool[row, column] = pool
        self.block[row, column] = block

    def copy_row(self, source: int, target: int) -> None:
        for array in (self.pool, self.block, self.length, self.fill):
            array[target : target + self.rows_per_seq] = array[source : source + self.rows_per_seq]
