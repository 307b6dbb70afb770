"""Sealing within a step, so that what a query reads does not depend on how its prompt was cut into chunks.

Token by token, the query at position p reads as sealed exactly the blocks that were full and older than the residual
before p came. A chunk that crosses such a border holds queries on both sides of it. Here the chunk's span is split
there: each part gets a table of its own, in which the blocks that are sealed by then stand in their sealed form. Every
layer writes its keys and values, seals those blocks for itself, then attends part by part.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvarn.kernels.api import Backend, PoolView, StepRows, TableView
from kvarn.kv.group import CacheGroup
from kvarn.kv.seals import SEALED
from kvarn.kv.table import OPEN


@dataclass(frozen=True, slots=True)
class _Part:
    """Token rows [begin, begin + n) of the step: queries of one sequence that read the same blocks as sealed. columns:
    how many of its row's leading columns are sealed by then."""

    row: int
    begin: int
    n: int
    columns: int


@dataclass(frozen=True, slots=True)
class StepSeals:
    """What a group seals within a step. rows, table: the step split into parts. blocks: for each layer (one entry for
    all at grain `group`), open and sealed blocks, pairwise."""

    rows: StepRows
    table: TableView
    blocks: tuple[tuple[Tensor, Tensor], ...]
    by_layer: bool

    def seal_layer(self, backend: Backend, pools: Sequence[PoolView], layer: int) -> None:
        """Encode this layer's part of the blocks; its keys and values are written."""
        source, target = self.blocks[layer if self.by_layer else 0]
        if not len(source):
            return
        if self.by_layer:
            backend.seal(pools[OPEN], source, pools[SEALED], target)
        else:
            backend.seal(_one_layer(pools[OPEN], layer), source, _one_layer(pools[SEALED], layer), target)


def _one_layer(pool: PoolView, layer: int) -> PoolView:
    return replace(
        pool,
        k=tuple(t.narrow(1, layer, 1) for t in pool.k),
        v=tuple(t.narrow(1, layer, 1) for t in pool.v),
    )


def seals_of_step(
    group: CacheGroup, first_rows: np.ndarray, counts: np.ndarray, rows: StepRows, table: TableView
) -> StepSeals | None:
    """None where no span crosses a border: then every query reads what the tables say."""
    if group.home == OPEN or counts.max(initial=0) < 2:
        return None
    parts = _parts(group, first_rows, counts)
    if len(parts) == len(counts):
        return None
    for part in parts:
        group.seals.promise_seals(part.row, part.columns)
    starts = torch.tensor([p.begin for p in parts] + [int(counts.sum())], dtype=torch.int32)
    split = StepRows(starts, rows.positions, max(p.n for p in parts))
    layered = group.grain != "group"
    return StepSeals(split, _table(group, parts, table), _blocks(group, parts, layered), layered)


def _parts(group: CacheGroup, first_rows: np.ndarray, counts: np.ndarray) -> list[_Part]:
    parts: list[_Part] = []
    begin = 0
    for row, n in zip(first_rows.tolist(), counts.tolist(), strict=True):
        offsets = [0, *group.seals.seal_borders(row, n), n]
        for at, end in itertools.pairwise(offsets):
            # what is sealed before the step stands in the tables; rows of unequal length have no borders
            parts.append(_Part(row, begin + at, end - at, group.seals.sealed_columns(row, at) if at else 0))
        begin += n
    return parts


def _table(group: CacheGroup, parts: Sequence[_Part], table: TableView) -> TableView:
    """Rows of the group's tables, one set a part, with what is sealed by then in its sealed form."""
    rows_per_seq = group.rows_per_seq
    rows = np.concatenate([np.arange(p.row, p.row + rows_per_seq) for p in parts])
    pool, block = group.tables.pool[rows].copy(), group.tables.block[rows].copy()
    for index, part in enumerate(parts):
        for offset in range(rows_per_seq):
            at = index * rows_per_seq + offset
            for column, made in group.seals.promised(part.row + offset, part.columns).items():
                pool[at, column], block[at, column] = SEALED, made.block
    first = torch.arange(0, len(rows), rows_per_seq, dtype=torch.int32)
    return TableView(
        torch.from_numpy(pool),
        torch.from_numpy(block),
        torch.from_numpy(group.tables.length[rows]),
        first,
        table.layer_stride,
        table.head_stride,
    )


def _blocks(group: CacheGroup, parts: Sequence[_Part], layered: bool) -> tuple[tuple[Tensor, Tensor], ...]:
    """The promised blocks that are to be encoded, by layer where blocks are cut finer than the group."""
    layers = len(group.layers) if layered else 1
    found: list[dict[int, int]] = [{} for _ in range(layers)]
    for part in parts:
        for offset in range(group.rows_per_seq):
            row = part.row + offset
            for column, made in group.seals.promised(row, part.columns).items():
                if not made.encoded:
                    found[offset * layers // group.rows_per_seq][int(group.tables.block[row, column])] = made.block
    return tuple(
        (torch.tensor(list(f), dtype=torch.int64), torch.tensor(list(f.values()), dtype=torch.int64)) for f in found
    )
