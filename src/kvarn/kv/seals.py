"""Sealed blocks set aside for open ones, and what was sealed as what: the book of one cache group.

A step that seals on its way (`kvarn.kv.sealing`) has blocks *promised*: taken, maybe encoded already, but not in the
tables until the step is committed; an aborted step gives them back.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kvarn.kv.blocks import GroupBlocks
from kvarn.kv.table import OPEN

SEALED = 1
Sealed = tuple[tuple[int, ...], tuple[int, ...]]  # open blocks, and what they were sealed as


class Promise(NamedTuple):
    """A sealed block set aside for an open one. encoded: it holds its numbers already."""

    block: int
    encoded: bool


class SealBook:
    """Seals the blocks of one group."""

    def __init__(self, blocks: GroupBlocks) -> None:
        self._blocks, self._tables, self._pools, self._views = blocks, blocks.tables, blocks.pools, blocks.views
        self._size, self._rows_per_seq = blocks.block_size, blocks.rows_per_seq
        self._residual_tokens = blocks.plan.residual_tokens
        self._sealed_as: dict[int, int] = {}
        self._promised: dict[tuple[int, int], Promise] = {}

    def seal_rows(self, row: int, grown: int) -> Sealed:
        """Re-encode the rows' full open blocks that are older than the residual, where the last `grown` tokens made
        some so. What is sealed hangs on the length alone, not on the chunks in which it came. Returns the open blocks
        and what they were sealed as."""
        if self._blocks.home == OPEN:
            return (), ()
        settled = self._tables.fill[row : row + self._rows_per_seq] - self._residual_tokens
        if (settled // self._size == (settled - grown) // self._size).all():
            return (), ()
        places: list[tuple[int, int]] = []
        for each in range(row, row + self._rows_per_seq):
            settled = max(0, (int(self._tables.fill[each]) - self._residual_tokens) // self._size)
            places += self._open_places(each, settled)
        sealed = self._seal(places) if places else ((), ())
        self.break_promises(row)
        return sealed

    def _open_places(self, row: int, columns: int) -> list[tuple[int, int]]:
        """(row, column) of the open blocks among a row's first columns."""
        leading = self._tables.pool[row, : min(columns, int(self._tables.length[row]))]
        return [(row, int(c)) for c in np.flatnonzero(leading == OPEN)]

    def _seal(self, places: list[tuple[int, int]]) -> Sealed:
        """Seal the open blocks at these (row, column), as far as a step has not done so already."""
        self._promise([p for p in places if p not in self._promised])
        fresh = [(p, self._promised[p]) for p in places if not self._promised[p].encoded]
        if fresh:
            sources = torch.tensor([int(self._tables.block[p]) for p, _ in fresh])
            targets = torch.tensor([made.block for _, made in fresh])
            self._blocks.backend.seal(self._views[OPEN], sources, self._views[SEALED], targets)
        sources_left = []
        for row, column in places:
            source, target = int(self._tables.block[row, column]), self._promised.pop((row, column)).block
            self._tables.replace(row, column, SEALED, target)
            if int(self._pools[OPEN].refs[source]) > 1:
                self._sealed_as[source] = target
            sources_left.append(source)
        self._blocks.give_back([OPEN] * len(places), sources_left)
        return tuple(sources_left), tuple(int(self._tables.block[p]) for p in places)

    def seal_columns(self, row: int, columns: np.ndarray, pool: int) -> Sealed:
        """Encode full open blocks, columns [R, C] bool, in a tier's pool, as many as it has free blocks for: the others
        stay as they are. Returns the open blocks and what they became."""
        offsets, chosen = np.nonzero(columns)
        n = min(len(chosen), self._pools[pool].free_blocks)
        places = list(zip((row + offsets[:n]).tolist(), chosen[:n].tolist(), strict=True))
        sources, targets = [int(self._tables.block[p]) for p in places], self._pools[pool].take(n)
        assert targets is not None, "no more than there are were asked for"
        if n:
            self._blocks.backend.seal(
                self._views[OPEN], torch.tensor(sources), self._views[pool], torch.tensor(targets)
            )
            self._pools[pool].adopt(self._pools[OPEN], sources, targets)
            for (each, column), target in zip(places, targets, strict=True):
                self._tables.replace(each, column, pool, target)
            self._blocks.give_back([OPEN] * n, sources)
        return tuple(sources), tuple(targets)

    # -- ahead, within a step -------------------------------------------------------------------------------------
    def sealed_columns(self, row: int, ahead: int) -> int:
        """How many of the sequence's leading blocks are sealed once `ahead` more tokens are there."""
        return max(0, (int(self._tables.fill[row]) + ahead - self._residual_tokens) // self._size)

    def seal_borders(self, row: int, n_tokens: int) -> list[int]:
        """At which of the next tokens (1 .. n_tokens - 1) one more block is sealed."""
        fill = self._tables.fill[row : row + self._rows_per_seq]
        if self._blocks.home == OPEN or (fill != fill[0]).any():
            return []
        past = int(fill[0]) - self._residual_tokens
        return [at for at in range(-past % self._size, n_tokens, self._size) if at > 0 and past + at > 0]

    def promise_seals(self, row: int, columns: int) -> None:
        """Set sealed blocks aside for the open ones among the sequence's leading columns; they are full by now."""
        places = [p for each in range(row, row + self._rows_per_seq) for p in self._open_places(each, columns)]
        self._promise([p for p in places if p not in self._promised])

    def _promise(self, places: list[tuple[int, int]]) -> None:
        """A sealed block for each place; one that another sequence sealed already is shared."""
        known = [(p, self._sealed_as[s]) for p in places if (s := int(self._tables.block[p])) in self._sealed_as]
        self._pools[SEALED].share([target for _, target in known])
        self._promised.update((p, Promise(target, True)) for p, target in known)
        fresh = [p for p in places if p not in self._promised]
        targets = self._pools[SEALED].take(len(fresh))
        assert targets is not None, "an open block had no sealed block promised"
        self._pools[SEALED].adopt(self._pools[OPEN], [int(self._tables.block[p]) for p in fresh], targets)
        self._promised.update((p, Promise(t, False)) for p, t in zip(fresh, targets, strict=True))

    def promised(self, row: int, columns: int) -> dict[int, Promise]:
        """For one row: column -> the sealed block set aside for it, among its first columns."""
        return {c: self._promised[row, c] for c in range(columns) if (row, c) in self._promised}

    def note_encoded(self) -> None:
        """Every layer has encoded the blocks set aside."""
        self._promised = {place: Promise(made.block, True) for place, made in self._promised.items()}

    def break_promises(self, row: int) -> None:
        """Give back what was set aside for a sequence and not used."""
        rows = range(row, row + self._rows_per_seq)
        for place in [p for p in self._promised if p[0] in rows]:
            self._blocks.free_reference(SEALED, self._promised.pop(place).block)

    @property
    def n_promised(self) -> int:
        """How many open blocks have a sealed one set aside."""
        return len(self._promised)

    def promised_blocks(self) -> list[int]:
        """The sealed blocks set aside now."""
        return [made.block for made in self._promised.values()]

    def forget(self, pool: int, freed: list[int]) -> None:
        """Freed blocks are no longer what another was sealed as, nor sealed as another."""
        if pool == OPEN:
            for block in freed:
                self._sealed_as.pop(block, None)
        elif freed and self._sealed_as:
            gone = set(freed)
            self._sealed_as = {source: made for source, made in self._sealed_as.items() if made not in gone}
