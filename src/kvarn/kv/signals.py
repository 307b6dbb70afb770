"""What policies read beside positions, collected while a step runs: attention mass a slot, and the last queries.

Only sequences whose policy asks pay. The mass needs a second pass over their keys a layer, and a counter of 4 bytes for
each slot, layer and KV head that a sequence's table rows could hold; the queries need w rows of them a layer, their
mean and covariance D + D * D numbers a layer and query head.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvarn.kernels.api import AttendParams, Backend, PoolView, Rope, StepKernel, StepRows, TableView
from kvarn.kv.moments import QueryMoments
from kvarn.kv.pool import BlockPool
from kvarn.kv.table import BlockTables


class Wants(NamedTuple):
    """What one span of a step must bring. queries: where its last queries go, moments: where all are summed up; None:
    nowhere."""

    mass: bool
    queries: QueryRing | None
    moments: QueryMoments | None = None


NOTHING = Wants(False, None)


@dataclass(slots=True)
class QueryRing:
    """The last w queries of a sequence in every layer of a group. stored [L, w, Hq, D] float32, query number i at
    i % w; seen: queries so far. pushed: a step's newest queries by layer, and how many the step had, until it counts.
    """

    w: int
    stored: Tensor | None = None
    params: AttendParams | None = None
    seen: int = 0
    layers: int = 0
    pushed: dict[int, Tensor] = field(default_factory=dict)
    pushed_queries: int = 0

    def push(self, layer: int, layers: int, q: Tensor, params: AttendParams) -> None:
        """q [t, Hq, D], rotated: the newest queries of this layer."""
        self.layers = layers
        self.pushed[layer] = q[-self.w :].to(torch.float32, copy=True)
        self.pushed_queries, self.params = len(q), params

    def commit(self, queries: int) -> None:
        """The first `queries` of those pushed count."""
        self.seen += queries
        for layer, newest in self.pushed.items():
            kept = newest[: len(newest) - (self.pushed_queries - queries)]
            if self.stored is None:
                self.stored = torch.zeros((self.layers, self.w, *kept.shape[1:]))
            self.stored[layer, torch.arange(self.seen - len(kept), self.seen) % self.w] = kept
        self.pushed.clear()

    def abort(self) -> None:
        """Nothing of what was pushed counts."""
        self.pushed.clear()

    @property
    def kept(self) -> Tensor | None:
        """[L, up to w, Hq, D], oldest first."""
        if self.stored is None:
            return None
        if self.seen <= self.w:
            return self.stored[:, : self.seen]
        return self.stored.roll(-(self.seen % self.w), dims=1)

    def copy(self) -> QueryRing:
        return QueryRing(self.w, None if self.stored is None else self.stored.clone(), self.params, self.seen)


class MassBook:
    """Attention mass of one group that is not yet in the slots' counters. The kernels count by table row and column,
    which stay what they are while a sequence only grows; so as long as the same sequences step together, one array
    serves many steps, and `settle` empties it before anybody reads or moves anything."""

    def __init__(self) -> None:
        self._first_rows: tuple[int, ...] = ()
        self._mass = torch.zeros(0)

    def open(self, first_rows: tuple[int, ...], shape: tuple[int, ...]) -> Tensor | None:
        """[L, S, H, C, B] for sequences with these first rows, or None where others' counts must be settled first."""
        if first_rows == self._first_rows:
            return self._mass
        if self._first_rows:
            return None
        self._first_rows, self._mass = first_rows, torch.zeros(shape)
        return self._mass

    def settle(self, pools: Sequence[BlockPool], tables: BlockTables) -> None:
        """Add what was counted to the slots' counters. At grain `group` the heads and layers of a slot add up."""
        mass = self._mass.numpy()
        for index, first in enumerate(self._first_rows):
            rows = np.arange(first, first + tables.rows_per_seq)
            columns = int(tables.length[rows].max(initial=0))
            by_row = mass[:, index, :, :columns].reshape(len(rows), -1, columns, mass.shape[-1]).sum(1)
            held = np.arange(columns) < tables.length[rows][:, None]
            for pool_index, pool in enumerate(pools):
                mine = held & (tables.pool[rows, :columns] == pool_index)
                if mine.any():
                    pool.add_mass(tables.block[rows, :columns][mine], by_row[mine])
        self._first_rows, self._mass = (), torch.zeros(0)


class GroupSignals:
    """Collects for one group in one step."""

    def __init__(
        self,
        wants: Sequence[Wants],
        rows: StepRows,
        table: TableView,
        pools: Sequence[PoolView],
        layers: int,
        kernel: StepKernel,
        backend: Backend,
    ) -> None:
        """kernel: of the whole step."""
        self._starts = rows.query_start.tolist()
        self._rings = [(s, w.queries) for s, w in enumerate(wants) if w.queries is not None]
        self._moments = [(s, w.moments) for s, w in enumerate(wants) if w.moments is not None]
        self._massed = [s for s, w in enumerate(wants) if w.mass]
        self._layers, self._kernel, self._step_kernel, self._take = layers, kernel, kernel, None
        self._mass: Tensor | None = None
        if self._massed and len(self._massed) < len(wants):
            chosen, self._take, seen = self._subset(rows, table)
            self._kernel = backend.begin_step(chosen, seen, pools)
        self.first_rows = tuple(table.first_row[self._massed].tolist())

    @property
    def wants_mass(self) -> bool:
        return bool(self._massed)

    def use(self, mass: Tensor) -> None:
        """Count into mass [L, S', H, C, B], S' the sequences that want it."""
        self._mass = mass

    def _subset(self, rows: StepRows, table: TableView) -> tuple[StepRows, Tensor, TableView]:
        """The step as only the sequences that want their mass see it."""
        spans = [range(self._starts[s], self._starts[s + 1]) for s in self._massed]
        take = torch.tensor(list(itertools.chain.from_iterable(spans)), dtype=torch.int64)
        start = torch.tensor(list(itertools.accumulate(map(len, spans), initial=0)), dtype=torch.int32)
        chosen = torch.tensor(self._massed, dtype=torch.int64)
        first = TableView(
            table.pool, table.block, table.length, table.first_row[chosen], table.layer_stride, table.head_stride
        )
        return StepRows(start, rows.positions[take], max(map(len, spans), default=0)), take, first

    def collect(self, plain: Tensor, rope: Rope | None, lse: Tensor, layer: int, params: AttendParams) -> None:
        """plain [T, Hq, D], which rope rotates (None: it is, or is not to be), and lse [T, Hq] of one layer."""
        q = plain if rope is None else self._step_kernel.rope(plain, rope)
        for s, moments in self._moments:
            mine = slice(self._starts[s], self._starts[s + 1])
            moments.push(layer, plain[mine], None if rope is None else Rope(rope.cos[mine], rope.sin[mine]))
        for s, ring in self._rings:
            ring.push(layer, self._layers, q[self._starts[s] : self._starts[s + 1]], params)
        if self._mass is not None:
            if self._take is not None:
                q, lse = q[self._take], lse[self._take]
            self._kernel.add_mass(q, lse, layer, params, self._mass[layer])
