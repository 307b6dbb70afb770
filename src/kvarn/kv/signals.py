"""What policies read beside positions, collected while a step runs: attention mass a slot, and the last queries.

Only sequences whose policy asks pay: the mass needs a second pass over their blocks, the queries a copy of a few rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvarn.kernels.api import AttendParams, Backend, PoolView, StepRows, TableView
from kvarn.kv.pool import BlockPool
from kvarn.kv.table import BlockTables


class Wants(NamedTuple):
    """What one span of a step must bring. queries: where its last queries go, None: nowhere."""

    mass: bool
    queries: QueryRing | None


NOTHING = Wants(False, None)


@dataclass(slots=True)
class QueryRing:
    """The last w queries of a sequence in every layer of a group, oldest first: kept [L, w, Hq, D], float32."""

    w: int
    kept: Tensor | None = None
    params: AttendParams | None = None

    def push(self, layer: int, layers: int, q: Tensor, params: AttendParams) -> None:
        """q [t, Hq, D], rotated: the newest queries of this layer."""
        newest = q[-self.w :].float()
        if self.kept is None:
            self.kept = newest.new_zeros((layers, 0, *newest.shape[1:]))
        if layer == 0:
            self._make_room(len(newest))
        self.kept[layer, self.kept.shape[1] - len(newest) :] = newest
        self.params = params

    def _make_room(self, n: int) -> None:
        assert self.kept is not None
        old = self.kept[:, max(0, self.kept.shape[1] + n - self.w) :]
        fresh = old.new_zeros((old.shape[0], old.shape[1] + n, *old.shape[2:]))
        fresh[:, : old.shape[1]] = old
        self.kept = fresh

    def copy(self) -> QueryRing:
        return QueryRing(self.w, None if self.kept is None else self.kept.clone(), self.params)


class GroupSignals:
    """Collects for one group in one step. mass [L, S', H, C, B] for the S' sequences that want it."""

    def __init__(
        self, wants: Sequence[Wants], rows: StepRows, table: TableView, n_layers: int, heads: int, block_size: int
    ) -> None:
        self._starts = rows.query_start.tolist()
        self._rings = [(s, w.queries) for s, w in enumerate(wants) if w.queries is not None]
        self.massed = [s for s, w in enumerate(wants) if w.mass]
        self._layers = n_layers
        self._rows, self._take, self._table = self._subset(rows, table)
        shape = (n_layers, len(self.massed), heads, table.block.shape[1], block_size)
        self.mass = torch.zeros(shape) if self.massed else torch.zeros(0)

    def _subset(self, rows: StepRows, table: TableView) -> tuple[StepRows, Tensor | None, TableView]:
        """The step as only the sequences that want their mass see it."""
        if len(self.massed) == len(self._starts) - 1:
            return rows, None, table
        spans = [range(self._starts[s], self._starts[s + 1]) for s in self.massed]
        take = torch.tensor(list(itertools.chain.from_iterable(spans)), dtype=torch.int64)
        start = torch.tensor(list(itertools.accumulate(map(len, spans), initial=0)), dtype=torch.int32)
        chosen = torch.tensor(self.massed, dtype=torch.int64)
        first = TableView(
            table.pool, table.block, table.length, table.first_row[chosen], table.layer_stride, table.head_stride
        )
        return StepRows(start, rows.positions[take], max(map(len, spans), default=0)), take, first

    def collect(
        self, backend: Backend, q: Tensor, lse: Tensor, pools: Sequence[PoolView], layer: int, params: AttendParams
    ) -> None:
        """q [T, Hq, D], rotated, and lse [T, Hq] of one layer of the step."""
        for s, ring in self._rings:
            ring.push(layer, self._layers, q[self._starts[s] : self._starts[s + 1]], params)
        if self.massed:
            if self._take is not None:
                q, lse = q[self._take], lse[self._take]
            backend.add_mass(q, lse, self._rows, self._table, pools, layer, params, self.mass[layer])

    def settle(self, pools: Sequence[BlockPool], tables: BlockTables, first_rows: np.ndarray) -> None:
        """Add what was collected to the slots' own counters. At grain `group` the heads and layers of a slot add up."""
        mass = self.mass.numpy()
        for index, s in enumerate(self.massed):
            per_row = mass[:, index].reshape(-1, *mass.shape[3:])  # [L * H, C, B]
            rows = tables.rows_per_seq
            per_row = per_row.reshape(rows, -1, *per_row.shape[1:]).sum(1)
            for offset in range(rows):
                row = int(first_rows[s]) + offset
                n = int(tables.length[row])
                for pool_index, pool in enumerate(pools):
                    mine = np.flatnonzero(tables.pool[row, :n] == pool_index)
                    pool.add_mass(tables.block[row, mine], per_row[offset, mine])
