"""One cache group: its pools, their tensors and its block tables, kept in step with each other.

A sequence has one table row at grain `group`, one a layer at grain `layer`, one a layer and KV head at grain `head`;
all of its rows are treated alike here, as arrays.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import torch

from kvarn.core.options import CachePlan, GroupPlan
from kvarn.kernels.api import Backend, PoolView, TableView
from kvarn.kv.pool import BlockPool
from kvarn.kv.signals import MassBook
from kvarn.kv.sizing import blocks_for, sequence_blocks, spec_as_held, table_columns
from kvarn.kv.storage import PoolStorage
from kvarn.kv.table import OPEN, BlockTables

SEALED = 1


class Promise(NamedTuple):
    """A sealed block set aside for an open one. encoded: it holds its numbers already."""

    block: int
    encoded: bool


class CacheGroup:
    """pools[0] is open: float blocks that steps write into. pools[1], if any, holds sealed blocks of another format."""

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
        self._held = spec_as_held(self.spec, plan.mode)
        columns = table_columns(self._held, plan.context_tokens, plan.step_tokens, plan.block_size)
        self.tables = BlockTables(plan.max_seqs, columns, self.rows_per_seq)
        self._pool_of, self._block_of = torch.from_numpy(self.tables.pool), torch.from_numpy(self.tables.block)
        self._length_of = torch.from_numpy(self.tables.length)
        self._sealed_as: dict[int, int] = {}
        self._mass_book = MassBook()
        self._promised: dict[tuple[int, int], Promise] = {}
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
        held = sequence_blocks(self._held, tokens, self.block_size)
        if self._held.window_tokens is not None:
            held = min(every, held + in_flight)
        needs = [held]
        if self.home != OPEN:
            newest = blocks_for(self.plan.residual_tokens, self.block_size) + 1
            needs = [min(held, newest + in_flight), held]
        needs += [0] * (len(self.pools) - len(needs))  # tiers: only what a policy moves there, if there is room
        scaled = [n * self.rows_per_seq for n in needs]
        return list(zip(self.pools, self.pool_block_bytes, scaled, strict=True))

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
                self._open_columns += pool == OPEN

    def copy_row(self, source: int, target: int) -> None:
        """The target's own blocks hold what the source's hold (contiguous baseline)."""
        columns = blocks_for(int(self.tables.fill[source]), self.block_size)
        taken, given = (self.tables.block[row, :columns].tolist() for row in (source, target))
        if columns:
            self.backend.copy_blocks(self.views[OPEN], torch.tensor(taken), torch.tensor(given))
            self.pools[OPEN].copy(taken, given)
        self.tables.fill[target] = self.tables.fill[source]

    def clear_row(self, row: int) -> None:
        """Give back all blocks of the sequence, and its rows."""
        self.settle_mass()
        if self._promised:
            self.break_promises(row)
        for each in range(row, row + self.rows_per_seq):
            self.give_back(*self.tables.entries(each))
        self.tables.give_back_row(row)

    def give_back(self, pools: list[int], blocks: list[int]) -> None:
        """One reference less to these table entries."""
        for index, (pool, store) in enumerate(zip(self.pools, self.stores, strict=True)):
            mine = [b for p, b in zip(pools, blocks, strict=True) if p == index]
            freed = pool.give_back(mine)
            self._open_columns -= len(mine) if index == OPEN else 0
            self._forget_seals(index, freed)
            if freed and self.poison:
                store.poison(freed)

    def _forget_seals(self, pool: int, freed: list[int]) -> None:
        """Freed blocks are no longer what another was sealed as, nor sealed as another."""
        if pool == OPEN:
            for block in freed:
                self._sealed_as.pop(block, None)
        elif freed and self._sealed_as:
            gone = set(freed)
            self._sealed_as = {source: made for source, made in self._sealed_as.items() if made not in gone}

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
        return (fill % self.block_size != 0) & (self.pools[OPEN].refs[self.tables.block[rows, column]] > 1)

    def short_by(self, want: int) -> dict[int, int]:
        """For each pool that lacks some: how many of the wanted blocks are missing. Each open block must also find a
        sealed one later."""
        short = {OPEN: want - self.pools[OPEN].free_blocks}
        if self.home != OPEN:
            short[SEALED] = want - (self.pools[SEALED].free_blocks - self._open_columns)
        return {pool: n for pool, n in short.items() if n > 0}

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
        self._open_columns += len(taken)
        return (*copied, *taken)

    def _own_tails(self, row: int) -> tuple[int, ...]:
        """Copy-on-write of the partly filled last blocks."""
        rows = self.rows(row)[self._shared_tails(row)]
        columns = self.tables.fill[rows] // self.block_size
        return tuple(self.own_block(OPEN, int(r), int(c)) for r, c in zip(rows, columns, strict=True))

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
        shared = int(self.tables.block[row, column])
        taken = self.pools[pool].take(1)
        assert taken is not None, "took without asking for room first"
        self.backend.copy_blocks(self.views[pool], torch.tensor([shared]), torch.tensor(taken))
        self.pools[pool].copy([shared], taken)
        self.pools[pool].give_back([shared])
        self.tables.replace(row, column, pool, taken[0])
        return taken[0]

    def adopt_block(self, row: int, pool: int, block: int) -> None:
        """The row goes on with a full block that is held already."""
        self.pools[pool].share((block,))
        self.tables.append(row, pool, (block,))
        self.tables.fill[row] += self.block_size
        self._open_columns += pool == OPEN

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
        self._open_columns += len(taken)

    def free_reference(self, pool: int, block: int) -> None:
        """Give back a reference that no table holds (the prefix index's)."""
        freed = self.pools[pool].give_back((block,))
        self._forget_seals(pool, freed)
        if freed and self.poison:
            self.stores[pool].poison(freed)

    def reserve_run(self, row: int, blocks: int) -> bool:
        """Take `blocks` consecutive blocks for a new row (contiguous baseline)."""
        taken = self.pools[OPEN].take_run(blocks)
        if taken is None:
            return False
        self.tables.append(row, OPEN, taken)
        self._open_columns += blocks
        return True

    # -- a step ---------------------------------------------------------------------------------------------------
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

    def advance(self, row: int, tokens: int) -> bool:
        """The rows have so many more tokens; True where that filled a block."""
        rows = slice(row, row + self.rows_per_seq)
        before = self.tables.fill[rows] // self.block_size
        self.tables.fill[rows] += tokens
        return bool((self.tables.fill[rows] // self.block_size > before).any())

    def drop_behind_window(self, row: int, length: int, grown: int) -> tuple[int, ...]:
        """Give back the leading blocks that no later query can see. length: logical tokens in the sequence, the last
        `grown` of them new since it was asked last."""
        if self._held.window_tokens is None:
            return ()
        oldest_seen = length - self._held.window_tokens + 1
        if oldest_seen // self.block_size == (oldest_seen - grown) // self.block_size:
            return ()
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

    def seal_rows(self, row: int, grown: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Re-encode the rows' full open blocks that are older than the residual, where the last `grown` tokens made
        some so. What is sealed hangs on the length alone, not on the chunks in which it came. Returns the open blocks
        and what they were sealed as."""
        if self.home == OPEN:
            return (), ()
        settled = self.tables.fill[row : row + self.rows_per_seq] - self.plan.residual_tokens
        if (settled // self.block_size == (settled - grown) // self.block_size).all():
            return (), ()
        places: list[tuple[int, int]] = []
        for each in range(row, row + self.rows_per_seq):
            settled = max(0, (int(self.tables.fill[each]) - self.plan.residual_tokens) // self.block_size)
            places += self._open_places(each, settled)
        sealed = self._seal(places) if places else ((), ())
        self.break_promises(row)
        return sealed

    def _open_places(self, row: int, columns: int) -> list[tuple[int, int]]:
        """(row, column) of the open blocks among a row's first columns."""
        leading = self.tables.pool[row, : min(columns, int(self.tables.length[row]))]
        return [(row, int(c)) for c in np.flatnonzero(leading == OPEN)]

    def _seal(self, places: list[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Seal the open blocks at these (row, column), as far as a step has not done so already."""
        self._promise([p for p in places if p not in self._promised])
        fresh = [(p, self._promised[p]) for p in places if not self._promised[p].encoded]
        if fresh:
            sources = torch.tensor([int(self.tables.block[p]) for p, _ in fresh])
            targets = torch.tensor([made.block for _, made in fresh])
            self.backend.seal(self.views[OPEN], sources, self.views[SEALED], targets)
        sources_left = []
        for row, column in places:
            source, target = int(self.tables.block[row, column]), self._promised.pop((row, column)).block
            self.tables.replace(row, column, SEALED, target)
            if int(self.pools[OPEN].refs[source]) > 1:
                self._sealed_as[source] = target
            sources_left.append(source)
        self.give_back([OPEN] * len(places), sources_left)
        return tuple(sources_left), tuple(int(self.tables.block[p]) for p in places)

    def seal_columns(self, row: int, columns: np.ndarray, pool: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Encode full open blocks, columns [R, C] bool, in a tier's pool, as many as it has free blocks for: the others
        stay as they are. Returns the open blocks and what they became."""
        offsets, chosen = np.nonzero(columns)
        n = min(len(chosen), self.pools[pool].free_blocks)
        places = list(zip((row + offsets[:n]).tolist(), chosen[:n].tolist(), strict=True))
        sources, targets = [int(self.tables.block[p]) for p in places], self.pools[pool].take(n)
        assert targets is not None, "no more than there are were asked for"
        if n:
            self.backend.seal(self.views[OPEN], torch.tensor(sources), self.views[pool], torch.tensor(targets))
            self.pools[pool].adopt(self.pools[OPEN], sources, targets)
            for (each, column), target in zip(places, targets, strict=True):
                self.tables.replace(each, column, pool, target)
            self.give_back([OPEN] * n, sources)
        return tuple(sources), tuple(targets)

    # -- sealing ahead, within a step -------------------------------------------------------------------------------
    def sealed_columns(self, row: int, ahead: int) -> int:
        """How many of the sequence's leading blocks are sealed once `ahead` more tokens are there."""
        return max(0, (int(self.tables.fill[row]) + ahead - self.plan.residual_tokens) // self.block_size)

    def seal_borders(self, row: int, n_tokens: int) -> list[int]:
        """At which of the next tokens (1 .. n_tokens - 1) one more block is sealed."""
        fill = self.tables.fill[row : row + self.rows_per_seq]
        if self.home == OPEN or (fill != fill[0]).any():
            return []
        past = int(fill[0]) - self.plan.residual_tokens
        return [at for at in range(-past % self.block_size, n_tokens, self.block_size) if at > 0 and past + at > 0]

    def promise_seals(self, row: int, columns: int) -> None:
        """Set sealed blocks aside for the open ones among the sequence's leading columns; they are full by now."""
        places = [p for each in range(row, row + self.rows_per_seq) for p in self._open_places(each, columns)]
        self._promise([p for p in places if p not in self._promised])

    def _promise(self, places: list[tuple[int, int]]) -> None:
        """A sealed block for each place; one that another sequence sealed already is shared."""
        known = [(p, self._sealed_as[s]) for p in places if (s := int(self.tables.block[p])) in self._sealed_as]
        self.pools[SEALED].share([target for _, target in known])
        self._promised.update((p, Promise(target, True)) for p, target in known)
        fresh = [p for p in places if p not in self._promised]
        targets = self.pools[SEALED].take(len(fresh))
        assert targets is not None, "an open block had no sealed block promised"
        self.pools[SEALED].adopt(self.pools[OPEN], [int(self.tables.block[p]) for p in fresh], targets)
        self._promised.update((p, Promise(t, False)) for p, t in zip(fresh, targets, strict=True))

    def promised(self, row: int, columns: int) -> dict[int, Promise]:
        """For one row: column -> the sealed block set aside for it, among its first columns."""
        return {c: self._promised[row, c] for c in range(columns) if (row, c) in self._promised}

    def note_encoded(self) -> None:
        """Every layer has encoded the blocks set aside."""
        self._promised = {place: Promise(made.block, True) for place, made in self._promised.items()}

    def break_promises(self, row: int) -> None:
        """Give back what was set aside for a sequence and not used."""
        rows = range(row, row + self.rows_per_seq)
        for place in [p for p in self._promised if p[0] in rows]:
            self.free_reference(SEALED, self._promised.pop(place).block)

    # -- attention mass ---------------------------------------------------------------------------------------------
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
            named[SEALED].update(made.block for made in self._promised.values())
        return named

    def check(self, rows: list[int], also: list[Counter[int]] | None = None) -> None:
        """References equal what the tables of these rows name, and `also` (the prefix index); the ledgers balance."""
        named = self.named(rows)
        assert self._open_columns == named[OPEN].total(), "open columns miscounted"
        for index, (pool, count) in enumerate(zip(self.pools, named, strict=True)):
            pool.check()
            expected = count + also[index] if also else count
            held = {int(b): int(pool.refs[b]) for b in np.flatnonzero(pool.refs)}
            assert held == dict(expected), f"references {held} but tables and index name {dict(expected)}"
