"""One cache group: its blocks, and what a step, a policy and the scheduler ask of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from kvarn.core.options import CachePlan, GroupPlan
from kvarn.kernels.api import Backend, TableView
from kvarn.kv.blocks import GroupBlocks
from kvarn.kv.pool import BlockPool
from kvarn.kv.seals import SEALED, SealBook
from kvarn.kv.signals import MassBook
from kvarn.kv.sizing import blocks_for, sequence_blocks
from kvarn.kv.table import OPEN


class CacheGroup(GroupBlocks):
    """The blocks of the layers that share a table."""

    def __init__(
        self, planned: GroupPlan, plan: CachePlan, backend: Backend, device: torch.device, poison: bool
    ) -> None:
        super().__init__(planned, plan, backend, device, poison)
        self.seals = SealBook(self)
        self._pool_of, self._block_of = torch.from_numpy(self.tables.pool), torch.from_numpy(self.tables.block)
        self._length_of = torch.from_numpy(self.tables.length)
        self._mass_book = MassBook()

    def on_freed(self, pool: int, blocks: list[int]) -> None:
        self.seals.forget(pool, blocks)

    def table_view(self, first_rows: np.ndarray) -> TableView:
        """What the kernels see of the tables; first_rows [S] int32."""
        heads = self.spec.kv_heads
        layer_stride = {"group": 0, "layer": 1, "head": heads}[self.grain]
        head_stride = 1 if self.grain == "head" else 0
        first = torch.from_numpy(first_rows)
        return TableView(self._pool_of, self._block_of, self._length_of, first, layer_stride, head_stride)

    def describe(self, index: int) -> str:
        """The group in words, for reasons and errors."""
        window = self.spec.window_tokens
        kind = "full attention" if window is None else f"window of {window} tokens"
        return f"group {index} ({len(self.layers)} layers, {kind})"

    def peak_blocks(self, tokens: int) -> list[tuple[BlockPool, int, int]]:
        """For each pool: (pool, bytes a block, blocks that one sequence of so many tokens needs within a step)."""
        every = blocks_for(tokens, self.block_size)
        in_flight = blocks_for(min(tokens, self.plan.step_tokens), self.block_size) + 1
        held = sequence_blocks(self.held_spec, tokens, self.block_size)
        if self.held_spec.window_tokens is not None:
            held = min(every, held + in_flight)
        needs = [held]
        if self.home != OPEN:
            needs = [min(held, self._newest_blocks + in_flight), held]
        needs += [0] * (len(self.pools) - len(needs))  # tiers: only what a policy moves there, if there is room
        scaled = [n * self.rows_per_seq for n in needs]
        return list(zip(self.pools, self.pool_block_bytes, scaled, strict=True))

    @property
    def _newest_blocks(self) -> int:
        """Open blocks of a row whose other blocks come to rest."""
        return blocks_for(self.plan.residual_tokens, self.block_size) + 1

    def headroom_blocks(self, pool: int, tokens: int) -> int:
        """Blocks of a pool that the sequences here may still take when they grow by so many tokens in all. Where open
        blocks come to rest, they are given back as they are taken: each row needs its newest ones and no more."""
        if pool == OPEN != self.home:
            newest = self.tables.sequences * self._newest_blocks * self.rows_per_seq
            return max(0, newest - self.open_columns)
        return blocks_for(tokens, self.block_size) * self.rows_per_seq

    def clear_row(self, row: int) -> None:
        """Give back all blocks of the sequence, and its rows."""
        self.settle_mass()
        self.seals.break_promises(row)
        for each in range(row, row + self.rows_per_seq):
            self.give_back(*self.tables.entries(each))
        self.tables.give_back_row(row)

    # -- room -----------------------------------------------------------------------------------------------------
    def slack_tokens(self, row: int) -> int:
        """Tokens that can be written without taking a block."""
        rows = slice(row, row + self.rows_per_seq)
        if self._shared_tails(row).any():
            return 0
        return int((self.tables.length[rows] * self.block_size - self.tables.fill[rows]).min())

    def missing_columns(self, row: int, new_tokens: int) -> np.ndarray:
        """For each of the sequence's rows, new blocks to take before new_tokens more can be written."""
        rows = slice(row, row + self.rows_per_seq)
        need = -(-(self.tables.fill[rows] + new_tokens) // self.block_size) - self.tables.length[rows]
        return np.maximum(need, 0)

    def blocks_wanted(self, row: int, new_tokens: int) -> int:
        """Blocks to take before new_tokens more can be written: new ones, and private copies of shared last ones."""
        return int(self.missing_columns(row, new_tokens).sum() + self._shared_tails(row).sum())

    def _shared_tails(self, row: int) -> np.ndarray:
        """Which rows end in a partly filled block that others reference too."""
        rows = self.rows(row)
        fill = self.tables.fill[rows]
        column = np.minimum(fill // self.block_size, self.tables.columns - 1)
        partly = fill % self.block_size != 0
        tail = np.where(partly, self.tables.block[rows, column], 0)  # behind a full block stands what once was there
        return partly & (self.pools[OPEN].refs[tail] > 1)

    def short_by(self, want: int) -> dict[int, int]:
        """For each pool that lacks some: how many of the wanted blocks are missing. Each open block must also find a
        sealed one later; some have one already that a step under way set aside."""
        short = {OPEN: want - self.pools[OPEN].free_blocks}
        if self.home != OPEN:
            short[SEALED] = want - (self.pools[SEALED].free_blocks - self.owed_blocks)
        return {pool: n for pool, n in short.items() if n > 0}

    @property
    def owed_blocks(self) -> int:
        """Free blocks of the pool where blocks come to rest that open ones will take."""
        return 0 if self.home == OPEN else self.open_columns - self.seals.n_promised

    def take(self, row: int, new_tokens: int) -> tuple[int, ...]:
        """Take what blocks_wanted says; the caller made sure that it is there. Returns the new blocks."""
        copied = self._own_tails(row)
        counts = self.missing_columns(row, new_tokens)
        taken = self.pools[OPEN].take(int(counts.sum()))
        assert taken is not None, "took without asking short_by first"
        at = 0
        for offset in np.flatnonzero(counts):
            n = int(counts[offset])
            self.tables.append(row + int(offset), OPEN, taken[at : at + n])
            at += n
        self.open_columns += len(taken)
        return (*copied, *taken)

    def _own_tails(self, row: int) -> tuple[int, ...]:
        """Copy-on-write of the partly filled last blocks."""
        rows = self.rows(row)[self._shared_tails(row)]
        columns = self.tables.fill[rows] // self.block_size
        return tuple(self.own_block(OPEN, int(r), int(c)) for r, c in zip(rows, columns, strict=True))

    # -- a step ---------------------------------------------------------------------------------------------------
    def advance(self, first_rows: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The sequences with these first rows [S] have so many more tokens [S] each. Returns two bool [S]: for which of
        them that filled a block, and for which something else may have come to rest: sealed late, or out of sight."""
        rows, grown = first_rows[:, None] + np.arange(self.rows_per_seq), tokens[:, None]
        fill = self.tables.fill[rows] + grown
        self.tables.fill[rows] = fill
        filled = self._crosses(fill, grown)
        if self.home == OPEN or not self.plan.residual_tokens:
            return filled, np.zeros_like(filled)
        return filled, self._crosses(fill - self.plan.residual_tokens, grown)

    def _crosses(self, tokens: np.ndarray, grown: np.ndarray) -> np.ndarray:
        """bool [S]: whether a border between blocks lies within the last `grown` of tokens [S, R] in some row."""
        return np.any(tokens // self.block_size != (tokens - grown) // self.block_size, axis=1)

    def sees_less(self, length: int, grown: int) -> bool:
        """Whether the last `grown` of a sequence's tokens pushed a block border out of the window."""
        if self.held_spec.window_tokens is None:
            return False
        oldest_seen = length - self.held_spec.window_tokens + 1
        return oldest_seen // self.block_size != (oldest_seen - grown) // self.block_size

    def drop_behind_window(self, row: int, length: int, grown: int) -> tuple[int, ...]:
        """Give back the leading blocks that no later query can see. length: logical tokens in the sequence, the last
        `grown` of them new since it was asked last."""
        if self.held_spec.window_tokens is None or not self.sees_less(length, grown):
            return ()
        oldest_seen = length - self.held_spec.window_tokens + 1
        gone: list[int] = []
        for each in range(row, row + self.rows_per_seq):
            pools, blocks = self.tables.entries(each)
            n, full = 0, int(self.tables.fill[each]) // self.block_size
            while n < full and int(self.pools[pools[n]].positions[blocks[n]].max()) < oldest_seen:
                n += 1
            if n:
                self.give_back(pools[:n], blocks[:n])
                self.tables.drop_front(each, n, self.block_size)
                gone += blocks[:n]
        return tuple(gone)

    def drop_columns(self, row: int, columns: np.ndarray) -> tuple[int, ...]:
        """Give back full blocks of one row, by column."""
        pools, blocks = self.tables.entries(row)
        chosen = columns.tolist()
        self.give_back([pools[c] for c in chosen], [blocks[c] for c in chosen])
        self.tables.drop(row, columns, self.block_size)
        return tuple(blocks[c] for c in chosen)

    # -- attention mass -------------------------------------------------------------------------------------------
    def open_mass(self, first_rows: tuple[int, ...]) -> torch.Tensor:
        """Where the kernels count the mass of these sequences: [L, S, H, C, B]."""
        shape = (len(self.layers), len(first_rows), self.spec.kv_heads, self.tables.columns, self.block_size)
        if (mass := self._mass_book.open(first_rows, shape)) is None:
            self.settle_mass()
            mass = self._mass_book.open(first_rows, shape)
        assert mass is not None, "a settled book is empty"
        return mass

    def settle_mass(self) -> None:
        """What was counted goes to the slots' own counters: before a policy reads them, or tables change."""
        self._mass_book.settle(self.pools, self.tables)

    # -- looking --------------------------------------------------------------------------------------------------
    def named(self, rows: list[int]) -> list[Counter[int]]:
        """For each pool, how often the tables of the sequences with these first rows name each block."""
        named: list[Counter[int]] = [Counter() for _ in self.pools]
        for first in rows:
            for row in range(first, first + self.rows_per_seq):
                for pool, block in zip(*self.tables.entries(row), strict=True):
                    named[pool][block] += 1
        if self.home != OPEN:
            named[SEALED].update(self.seals.promised_blocks())
        return named

    def check(self, rows: list[int], also: list[Counter[int]] | None = None) -> None:
        """References equal what the tables of these rows name, and `also` (the prefix index); the ledgers balance."""
        named = self.named(rows)
        assert self.open_columns == named[OPEN].total(), "open columns miscounted"
        for index, (pool, count) in enumerate(zip(self.pools, named, strict=True)):
            pool.check()
            expected = count + also[index] if also else count
            held = {int(b): int(pool.refs[b]) for b in np.flatnonzero(pool.refs)}
            assert held == dict(expected), f"references {held} but tables and index name {dict(expected)}"
