"""The blocks of one cache group: pools, their tensors and the block tables that name their blocks, kept in step.

A sequence has one table row at grain `group`, one a layer at grain `layer`, one a layer and KV head at grain `head`;
all of its rows are treated alike here, as arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from kvarn.core.options import CachePlan, GroupPlan
from kvarn.kernels.api import Backend, PoolView
from kvarn.kv.pool import BlockPool
from kvarn.kv.sizing import blocks_for, spec_as_held, table_columns
from kvarn.kv.storage import PoolStorage
from kvarn.kv.table import OPEN, BlockTables

COPIED_BLOCKS = 256  # at a time, so that what is in between stays small


class GroupBlocks:
    """pools[0] is open: float blocks that steps write into. pools[home] holds what has come to rest; those behind it
    what a policy moves there. open_columns: how often tables name an open block."""

    def __init__(
        self, planned: GroupPlan, plan: CachePlan, backend: Backend, device: torch.device, poison: bool
    ) -> None:
        self.plan, self.spec, self.layers = plan, planned.group.spec, planned.group.layers
        self.grain, self.rows_per_seq = planned.grain, planned.rows_per_sequence
        self.home = planned.home
        self.block_size, self.backend, self.poison = plan.block_size, backend, poison
        self.pools = tuple(BlockPool(p.n_blocks, plan.block_size) for p in planned.pools)
        self.stores = tuple(
            PoolStorage(planned, p, ledger, device) for p, ledger in zip(planned.pools, self.pools, strict=True)
        )
        self.views: tuple[PoolView, ...] = tuple(s.view for s in self.stores)
        self.pool_block_bytes = tuple(p.block_bytes for p in planned.pools)
        self.held_spec = spec_as_held(self.spec, plan.mode)
        columns = table_columns(self.held_spec, plan.context_tokens, plan.step_tokens, plan.block_size)
        self.tables = BlockTables(plan.max_seqs, columns, self.rows_per_seq)
        self.open_columns = 0
        if poison:
            for store in self.stores:
                store.poison()

    @property
    def element_bytes(self) -> int:
        """Bytes of one number in full precision, as open blocks hold it."""
        return self.views[OPEN].k[0].element_size()

    # -- rows -----------------------------------------------------------------------------------------------------
    def take_row(self) -> int:
        row = self.tables.take_row()
        assert row is not None, "more sequences than the plan has rows for"
        return row

    def rows(self, row: int) -> np.ndarray:
        """All rows of the sequence whose first one is `row`."""
        return np.arange(row, row + self.rows_per_seq)

    def share_row(self, source: int, target: int) -> None:
        """The target's rows name the source's blocks too; empty ones that the source reserved stay its own."""
        self.tables.copy_row(source, target)
        rows = slice(target, target + self.rows_per_seq)
        self.tables.length[rows] = -(-self.tables.fill[rows] // self.block_size)
        for row in range(target, target + self.rows_per_seq):
            for pool, block in zip(*self.tables.entries(row), strict=True):
                self.pools[pool].share((block,))
                self.open_columns += pool == OPEN

    def copy_row(self, source: int, target: int) -> None:
        """The target's own blocks hold what the source's hold (contiguous baseline)."""
        columns = blocks_for(int(self.tables.fill[source]), self.block_size)
        taken, given = (self.tables.block[row, :columns].tolist() for row in (source, target))
        if columns:
            self.backend.copy_blocks(self.views[OPEN], torch.tensor(taken), torch.tensor(given))
            self.pools[OPEN].copy(taken, given)
        self.tables.fill[target] = self.tables.fill[source]

    # -- references -----------------------------------------------------------------------------------------------
    def give_back(self, pools: list[int], blocks: list[int]) -> None:
        """One reference less to these table entries."""
        for index in range(len(self.pools)):
            mine = [b for p, b in zip(pools, blocks, strict=True) if p == index]
            self.open_columns -= len(mine) if index == OPEN else 0
            self._give_back(index, mine)

    def free_reference(self, pool: int, block: int) -> None:
        """Give back a reference that no table holds (the prefix index's)."""
        self._give_back(pool, [block])

    def _give_back(self, pool: int, blocks: list[int]) -> None:
        freed = self.pools[pool].give_back(blocks)
        if freed:
            self.on_freed(pool, freed)
            if self.poison:
                self.stores[pool].poison(freed)

    def on_freed(self, pool: int, blocks: list[int]) -> None:
        """These blocks of a pool are free again."""

    def shared_places(self, row: int) -> list[tuple[int, int, int]]:
        """(pool, row, column) of the sequence's blocks that others reference too."""
        found: list[tuple[int, int, int]] = []
        for each in range(row, row + self.rows_per_seq):
            for column, (pool, block) in enumerate(zip(*self.tables.entries(each), strict=True)):
                if self.pools[pool].refs[block] > 1:
                    found.append((pool, each, column))
        return found

    def own_block(self, pool: int, row: int, column: int) -> int:
        """Replace a shared block of a row by a copy of its own; the caller made sure that a block is free."""
        return self.own_blocks([(pool, row, column)])[0]

    def own_blocks(self, places: Sequence[tuple[int, int, int]]) -> list[int]:
        """Replace shared blocks, each (pool, row, column), by copies; the caller made sure that so many are free."""
        made: list[int] = []
        for begin in range(0, len(places), COPIED_BLOCKS):
            made += self._own(places[begin : begin + COPIED_BLOCKS])
        return made

    def _own(self, places: Sequence[tuple[int, int, int]]) -> list[int]:
        made = [0] * len(places)
        for pool in {p for p, _, _ in places}:
            mine = [i for i, (p, _, _) in enumerate(places) if p == pool]
            shared = [int(self.tables.block[places[i][1:]]) for i in mine]
            taken = self.pools[pool].take(len(mine))
            assert taken is not None, "took without asking for room first"
            self.backend.copy_blocks(self.views[pool], torch.tensor(shared), torch.tensor(taken))
            self.pools[pool].copy(shared, taken)
            self.pools[pool].give_back(shared)
            for i, block in zip(mine, taken, strict=True):
                self.tables.replace(places[i][1], places[i][2], pool, block)
                made[i] = block
        return made

    def adopt_block(self, row: int, pool: int, block: int) -> None:
        """The row goes on with a full block that is held already."""
        self.pools[pool].share((block,))
        self.tables.append(row, pool, (block,))
        self.tables.fill[row] += self.block_size
        self.open_columns += pool == OPEN

    def copy_blocks_to(self, row: int, blocks: list[int], tokens: int) -> None:
        """Each row of the sequence goes on with a copy of one of these open blocks, of which the first `tokens` slots
        count. The caller made sure that blocks are free."""
        taken = self.pools[OPEN].take(len(blocks))
        assert taken is not None, "took without asking for room first"
        self.backend.copy_blocks(self.views[OPEN], torch.tensor(blocks), torch.tensor(taken))
        self.pools[OPEN].copy(blocks, taken)
        for offset, block in enumerate(taken):
            self.tables.append(row + offset, OPEN, (block,))
            self.tables.fill[row + offset] += tokens
            self._empty(np.arange(block * self.block_size + tokens, (block + 1) * self.block_size))
        self.open_columns += len(taken)

    def scratch(self, n_blocks: int) -> tuple[BlockPool, PoolView]:
        """Open blocks beside the pool, all taken, for numbers on their way into another format. So what is encoded
        never needs a free block of the pool itself."""
        ledger, view = BlockPool(n_blocks, self.block_size), self.views[OPEN]
        ledger.take(n_blocks)

        def like(tensor: torch.Tensor) -> torch.Tensor:
            axes = (1 if tensor.stride(axis) == 0 else tensor.shape[axis] for axis in (1, 2))
            made = torch.empty((n_blocks, *axes, *tensor.shape[3:]), dtype=tensor.dtype, device=tensor.device)
            return made.expand(n_blocks, *tensor.shape[1:])

        k, v = (tuple(map(like, side)) for side in (view.k, view.v))
        return ledger, replace(view, k=k, v=v, positions=torch.from_numpy(ledger.positions))

    def reserve_run(self, row: int, blocks: int) -> bool:
        """Take `blocks` consecutive blocks for a new row (contiguous baseline)."""
        taken = self.pools[OPEN].take_run(blocks)
        if taken is None:
            return False
        self.tables.append(row, OPEN, taken)
        self.open_columns += blocks
        return True

    # -- slots ----------------------------------------------------------------------------------------------------
    def place(self, first_rows: np.ndarray, counts: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Give the next slots of these sequences their logical positions [T]. Returns slots [T, 1 or L, 1 or H]."""
        begin = np.cumsum(counts) - counts
        within = np.arange(len(positions)) - np.repeat(begin, counts)
        slots = self._slots(np.repeat(first_rows, counts)[:, None] + np.arange(self.rows_per_seq), within[:, None])
        self.pools[OPEN].fill(slots, positions[:, None])
        heads = self.spec.kv_heads if self.grain == "head" else 1
        return torch.from_numpy(slots).view(len(positions), -1, heads)

    def _slots(self, rows: np.ndarray, ahead: np.ndarray) -> np.ndarray:
        """Slots (block * block_size + slot) at physical place fill + ahead of each row, int64."""
        at = self.tables.fill[rows] + ahead
        return self.tables.block[rows, at // self.block_size].astype(np.int64) * self.block_size + at % self.block_size

    def empty_slots(self, row: int, begin: int, end: int) -> None:
        """Slots that were written ahead of `fill` hold nothing again."""
        self._empty(self._slots(self.rows(row)[:, None], np.arange(begin, end)[None, :]).reshape(-1))

    def _empty(self, slots: np.ndarray) -> None:
        self.pools[OPEN].empty(slots)
        if self.poison:
            self.stores[OPEN].poison_slots(torch.from_numpy(slots))
