"""One cache group: its pools, their tensors and its block tables, kept in step with each other."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from kvarn.core.options import CachePlan, GroupPlan
from kvarn.kernels.api import Backend, PoolView, TableView
from kvarn.kv.pool import BlockPool
from kvarn.kv.sizing import blocks_for, sequence_blocks, table_columns
from kvarn.kv.storage import PoolStorage
from kvarn.kv.table import OPEN, BlockTables

SEALED = 1


class CacheGroup:
    """pools[0] is open: float blocks that steps write into. pools[1], if any, holds sealed blocks of another format."""

    def __init__(
        self, planned: GroupPlan, plan: CachePlan, backend: Backend, device: torch.device, poison: bool
    ) -> None:
        self.plan, self.spec, self.layers = plan, planned.group.spec, planned.group.layers
        self.block_size, self.backend, self.poison = plan.block_size, backend, poison
        self.pools = tuple(BlockPool(p.n_blocks, plan.block_size) for p in planned.pools)
        self.stores = tuple(
            PoolStorage(planned.group, p, ledger, device) for p, ledger in zip(planned.pools, self.pools, strict=True)
        )
        self.views: tuple[PoolView, ...] = tuple(s.view for s in self.stores)
        self.pool_block_bytes = tuple(p.block_bytes for p in planned.pools)
        columns = table_columns(self.spec, plan.context_tokens, plan.step_tokens, plan.block_size)
        self.tables = BlockTables(plan.max_seqs, columns)
        self._pool_of, self._block_of = torch.from_numpy(self.tables.pool), torch.from_numpy(self.tables.block)
        self._length_of = torch.from_numpy(self.tables.length)
        self._sealed_as: dict[int, int] = {}
        self._open_columns = 0
        if poison:
            for store in self.stores:
                store.poison()

    @property
    def element_bytes(self) -> int:
        """Bytes of one number in full precision, as open blocks hold it."""
        return self.views[OPEN].k[0].element_size()

    def table_view(self, first_rows: np.ndarray) -> TableView:
        """What the kernels see of the tables; first_rows [S] int32."""
        first = torch.from_numpy(first_rows)
        return TableView(self._pool_of, self._block_of, self._length_of, first, layer_stride=0, head_stride=0)

    def describe(self, index: int) -> str:
        """The group in words, for reasons and errors."""
        window = self.spec.window_tokens
        kind = "full attention" if window is None else f"window of {window} tokens"
        return f"group {index} ({len(self.layers)} layers, {kind})"

    def peak_blocks(self, tokens: int) -> list[tuple[BlockPool, int, int]]:
        """For each pool: (pool, bytes a block, blocks that one sequence of so many tokens needs within a step)."""
        every = blocks_for(tokens, self.block_size)
        in_flight = blocks_for(min(tokens, self.plan.step_tokens), self.block_size) + 1
        held = sequence_blocks(self.spec, tokens, self.block_size)
        if self.spec.window_tokens is not None:
            held = min(every, held + in_flight)
        needs = [held]
        if len(self.pools) > 1:
            newest = blocks_for(self.plan.residual_tokens, self.block_size) + 1
            needs = [min(held, newest + in_flight), held]
        return list(zip(self.pools, self.pool_block_bytes, needs, strict=True))

    # -- rows -----------------------------------------------------------------------------------------------------
    def take_row(self) -> int:
        row = self.tables.take_row()
        assert row is not None, "more sequences than the plan has rows for"
        return row

    def share_row(self, source: int, target: int) -> None:
        """The target row names the source's blocks too."""
        self.tables.copy_row(source, target)
        for pool, block in zip(*self.tables.entries(source), strict=True):
            self.pools[pool].share((block,))
            self._open_columns += pool == OPEN

    def clear_row(self, row: int) -> None:
        """Give back all blocks of the row, and the row."""
        pools, blocks = self.tables.entries(row)
        self._give_back(pools, blocks)
        self.tables.give_back_row(row)

    def _give_back(self, pools: list[int], blocks: list[int]) -> None:
        for index, (pool, store) in enumerate(zip(self.pools, self.stores, strict=True)):
            mine = [b for p, b in zip(pools, blocks, strict=True) if p == index]
            freed = pool.give_back(mine)
            if index == OPEN:
                self._open_columns -= len(mine)
                for block in freed:
                    self._sealed_as.pop(block, None)
            if freed and self.poison:
                store.poison(freed)

    # -- room -----------------------------------------------------------------------------------------------------
    def blocks_wanted(self, row: int, new_tokens: int) -> int:
        """Blocks to take before new_tokens more can be written: new ones, and a private copy of a shared last one."""
        have, fill = int(self.tables.length[row]), int(self.tables.fill[row])
        return max(0, blocks_for(fill + new_tokens, self.block_size) - have) + self._tail_is_shared(row)

    def _tail_is_shared(self, row: int) -> bool:
        fill = int(self.tables.fill[row])
        if fill % self.block_size == 0:
            return False
        return int(self.pools[OPEN].refs[self.tables.block[row, fill // self.block_size]]) > 1

    def short_by(self, want: int) -> int:
        """How many of the wanted blocks are missing. Each open block must also find a sealed one later."""
        short = want - self.pools[OPEN].free_blocks
        if len(self.pools) > 1:
            short = max(short, want - (self.pools[SEALED].free_blocks - self._open_columns))
        return max(0, short)

    def take(self, row: int, new_tokens: int) -> tuple[int, ...]:
        """Take what blocks_wanted says; the caller made sure that it is there. Returns the new blocks."""
        copied = self._own_tail(row) if self._tail_is_shared(row) else ()
        want = self.blocks_wanted(row, new_tokens)
        taken = self.pools[OPEN].take(want)
        assert taken is not None, "took without asking short_by first"
        self.tables.append(row, OPEN, taken)
        self._open_columns += want
        return (*copied, *taken)

    def _own_tail(self, row: int) -> tuple[int, ...]:
        """Copy-on-write of the partly filled last block."""
        column = int(self.tables.fill[row]) // self.block_size
        shared = int(self.tables.block[row, column])
        taken = self.pools[OPEN].take(1)
        assert taken is not None, "took without asking short_by first"
        self.backend.copy_blocks(self.views[OPEN], torch.tensor([shared]), torch.tensor(taken))
        self.pools[OPEN].copy([shared], taken)
        self.pools[OPEN].give_back([shared])
        self.tables.replace(row, column, OPEN, taken[0])
        return tuple(taken)

    def reserve_run(self, row: int, blocks: int) -> bool:
        """Take `blocks` consecutive blocks for a new row (contiguous baseline)."""
        taken = self.pools[OPEN].take_run(blocks)
        if taken is None:
            return False
        self.tables.append(row, OPEN, taken)
        self._open_columns += blocks
        return True

    # -- after a step ---------------------------------------------------------------------------------------------
    def slots(self, row: int, begin: int, end: int) -> np.ndarray:
        """Slots (block * block_size + slot) of the row's physical places fill + begin .. fill + end."""
        at = int(self.tables.fill[row]) + np.arange(begin, end)
        return self.tables.block[row, at // self.block_size].astype(np.int64) * self.block_size + at % self.block_size

    def empty_slots(self, row: int, begin: int, end: int) -> None:
        """Slots that were written ahead of `fill` hold nothing again."""
        slots = self.slots(row, begin, end)
        self.pools[OPEN].empty(slots)
        if self.poison:
            self.stores[OPEN].poison_slots(torch.from_numpy(slots))

    def advance(self, row: int, tokens: int) -> bool:
        """The row has so many more tokens; True where that filled a block."""
        fill = int(self.tables.fill[row])
        self.tables.fill[row] = fill + tokens
        return (fill + tokens) // self.block_size > fill // self.block_size

    def drop_behind_window(self, row: int, length: int) -> tuple[int, ...]:
        """Give back the leading blocks that no later query can see. length: logical tokens in the sequence."""
        if self.spec.window_tokens is None or self.plan.mode != "paged":
            return ()
        oldest_seen = length - self.spec.window_tokens + 1
        pools, blocks = self.tables.entries(row)
        n = 0
        full = int(self.tables.fill[row]) // self.block_size
        while n < full and int(self.pools[pools[n]].positions[blocks[n]].max()) < oldest_seen:
            n += 1
        if n:
            self._give_back(pools[:n], blocks[:n])
            self.tables.drop_front(row, n, self.block_size)
        return tuple(blocks[:n])

    def seal_row(self, row: int) -> None:
        """Re-encode the row's full open blocks that are older than the residual."""
        if len(self.pools) == 1:
            return
        settled = (int(self.tables.fill[row]) - self.plan.residual_tokens) // self.block_size
        columns = [c for c in range(max(0, settled)) if self.tables.pool[row, c] == OPEN]
        if not columns:
            return
        sources = [int(self.tables.block[row, c]) for c in columns]
        fresh = [b for b in sources if b not in self._sealed_as]
        targets = self.pools[SEALED].take(len(fresh))
        assert targets is not None, "an open block had no sealed block promised"
        if fresh:
            self.backend.seal(self.views[OPEN], torch.tensor(fresh), self.views[SEALED], torch.tensor(targets))
            self.pools[SEALED].adopt(self.pools[OPEN], fresh, targets)
        made = dict(zip(fresh, targets, strict=True))
        for column, source in zip(columns, sources, strict=True):
            if source in made:
                target = made[source]
            else:
                target = self._sealed_as[source]
                self.pools[SEALED].share((target,))
            self.tables.replace(row, column, SEALED, target)
            if int(self.pools[OPEN].refs[source]) > 1:
                self._sealed_as[source] = target
        self._give_back([OPEN] * len(sources), sources)

    def check(self, rows: list[int]) -> None:
        """References equal what the tables of these rows name (and the ledgers balance)."""
        named = [Counter() for _ in self.pools]
        for row in rows:
            for pool, block in zip(*self.tables.entries(row), strict=True):
                named[pool][block] += 1
        for pool, count in zip(self.pools, named, strict=True):
            pool.check()
            held = {int(b): int(pool.refs[b]) for b in np.flatnonzero(pool.refs)}
            assert held == dict(count), f"references {held} but tables name {dict(count)}"
        assert self._open_columns == named[OPEN].total(), "open columns miscounted"
