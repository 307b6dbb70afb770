"""Block tables of one group."""

from __future__ import annotations

import numpy as np
import pytest

from kvarn.kv.table import BlockTables


def filled(rows_per_seq: int = 1) -> tuple[BlockTables, int]:
    tables = BlockTables(3, 5, rows_per_seq)
    row = tables.take_row()
    assert row is not None
    tables.append(row, 0, [7, 8])
    tables.append(row, 1, [3, 4])
    tables.fill[row] = 15
    return tables, row


@pytest.mark.parametrize("rows_per_seq", [1, 3])
def test_rows_come_and_go(rows_per_seq: int) -> None:
    tables = BlockTables(2, 4, rows_per_seq)
    rows = [tables.take_row(), tables.take_row()]
    assert rows == [0, rows_per_seq] and tables.sequences == 2
    assert tables.take_row() is None
    tables.append(rows_per_seq, 0, [1])
    tables.fill[rows_per_seq:] = 3
    tables.give_back_row(rows_per_seq)
    assert tables.sequences == 1 and not tables.length.any() and not tables.fill.any()
    assert tables.take_row() == rows_per_seq


def test_entries_in_order() -> None:
    tables, row = filled()
    assert tables.entries(row) == ([0, 0, 1, 1], [7, 8, 3, 4])


def test_drop_moves_the_others_up() -> None:
    tables, row = filled()
    tables.drop(row, np.array([0, 2]), block_size=4)
    assert tables.entries(row) == ([0, 1], [8, 4]) and tables.fill[row] == 15 - 8
    tables.drop_front(row, 1, block_size=4)
    assert tables.entries(row) == ([1], [4]) and tables.fill[row] == 3


def test_replace_one_place() -> None:
    tables, row = filled()
    tables.replace(row, 1, 1, 9)
    assert tables.entries(row) == ([0, 1, 1, 1], [7, 9, 3, 4])


@pytest.mark.parametrize("rows_per_seq", [1, 2])
def test_copy_all_rows_of_a_sequence(rows_per_seq: int) -> None:
    tables, row = filled(rows_per_seq)
    other = tables.take_row()
    assert other is not None
    tables.copy_row(row, other)
    for offset in range(rows_per_seq):
        assert tables.entries(other + offset) == tables.entries(row + offset)
        assert tables.fill[other + offset] == tables.fill[row + offset]
