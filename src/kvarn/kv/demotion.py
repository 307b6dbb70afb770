"""Storing some of a sequence's tokens in fewer bits: they are gathered into whole blocks and encoded in another pool.

A row's columns stay sorted by pool, the open blocks last, so that the row goes on growing at its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvarn.kv.group import CacheGroup
from kvarn.kv.table import OPEN


@dataclass(frozen=True, slots=True)
class Demoted:
    """New blocks of one table row, not in its table yet."""

    row: int
    pool: int
    blocks: tuple[int, ...]


def encode_demoted(
    group: CacheGroup, row: int, to: np.ndarray, positions: np.ndarray, numbers: tuple[Tensor, Tensor]
) -> list[Demoted] | None:
    """Encode the places of each row whose `to` [R, S] is a pool above OPEN: whole blocks of them, in the order of the
    text. numbers: keys [R, S, D] and values [R, S, E] float32. None (and nothing changed) where blocks are missing."""
    size = group.block_size
    for pool in range(1, len(group.pools)):
        if int((to == pool).sum()) // size > group.pools[pool].free_blocks:
            return None
    most = max((int((to[r] == p).sum()) for r in range(len(to)) for p in range(1, len(group.pools))), default=0)
    if most // size > group.pools[OPEN].free_blocks:
        return None
    made: list[Demoted] = []
    for offset in range(len(to)):
        for pool in range(1, len(group.pools)):
            places = np.flatnonzero(to[offset] == pool)
            assert len(places) % size == 0, "blocks are demoted whole"
            if len(places):
                places = places[np.argsort(positions[offset, places])]
                k, v = (side[offset, torch.from_numpy(places)] for side in numbers)
                made.append(Demoted(row + offset, pool, _encode(group, pool, positions[offset, places], k, v)))
    return made


def _encode(group: CacheGroup, pool: int, positions: np.ndarray, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """New blocks of `pool` that hold k [n, D] and v [n, E], by way of as many free open blocks."""
    size, ledger = group.block_size, group.pools[OPEN]
    n = len(positions) // size
    scratch, targets = ledger.take(n), group.pools[pool].take(n)
    assert scratch is not None and targets is not None, "asked for room before"
    group.views[OPEN].k[0][:, 0, 0].index_copy_(
        0, torch.tensor(scratch), k.view(n, size, -1).transpose(1, 2).to(group.views[OPEN].k[0].dtype)
    )
    group.views[OPEN].v[0][:, 0, 0].index_copy_(
        0, torch.tensor(scratch), v.view(n, size, -1).to(group.views[OPEN].v[0].dtype)
    )
    slots = np.asarray(scratch)[:, None] * size + np.arange(size)
    ledger.fill(slots, positions.reshape(n, size))
    group.backend.seal(group.views[OPEN], torch.tensor(scratch), group.views[pool], torch.tensor(targets))
    group.pools[pool].adopt(ledger, scratch, targets)
    freed = ledger.give_back(scratch)
    if group.poison:
        group.stores[OPEN].poison(freed)
    return tuple(targets)


def insert(group: CacheGroup, made: list[Demoted], mass: dict[int, np.ndarray]) -> None:
    """Put the new blocks into their rows' tables, before the open ones. mass: of a new block's slots, by its index in
    `made`, [n, B]."""
    tables = group.tables
    for index, new in enumerate(made):
        tables.append(new.row, new.pool, new.blocks)
        n = int(tables.length[new.row])
        order = np.argsort(-tables.pool[new.row, :n].astype(np.int64), kind="stable")
        tables.pool[new.row, :n] = tables.pool[new.row, :n][order]
        tables.block[new.row, :n] = tables.block[new.row, :n][order]
        tables.fill[new.row] += len(new.blocks) * group.block_size
        if index in mass:
            group.pools[new.pool].add_mass(np.asarray(new.blocks), mass[index])
