"""Storing some of a sequence's tokens in fewer bits: they are gathered into whole blocks and encoded in another pool.

A row's columns stay sorted by pool, the open blocks last, so that the row goes on growing at its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvarn.kv.group import CacheGroup


@dataclass(frozen=True, slots=True)
class Demoted:
    """New blocks of one table row, not in its table yet."""

    row: int
    pool: int
    blocks: tuple[int, ...]


def encode_demoted(
    group: CacheGroup, row: int, to: np.ndarray, positions: np.ndarray, numbers: tuple[Tensor, Tensor]
) -> list[Demoted]:
    """Encode the places of each row whose `to` [R, S] is a pool above OPEN: whole blocks of them, in the order of the
    text. numbers: keys [R, S, D] and values [R, S, E] float32. The caller made sure that `blocks_wanted` are free."""
    size = group.block_size
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


def blocks_wanted(group: CacheGroup, to: np.ndarray) -> dict[int, int]:
    """By pool: the blocks that encode_demoted takes."""
    return {pool: int((to == pool).sum()) // group.block_size for pool in range(1, len(group.pools))}


def _encode(group: CacheGroup, pool: int, positions: np.ndarray, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """New blocks of `pool` that hold k [n, D] and v [n, E]."""
    size = group.block_size
    n = len(positions) // size
    targets = group.pools[pool].take(n)
    assert targets is not None, "took without asking for room first"
    ledger, view = group.scratch(n)
    view.k[0][:, 0, 0].copy_(k.view(n, size, -1).transpose(1, 2))
    view.v[0][:, 0, 0].copy_(v.view(n, size, -1))
    ledger.fill(np.arange(n * size), positions)
    group.backend.seal(view, torch.arange(n), group.views[pool], torch.tensor(targets))
    group.pools[pool].adopt(ledger, range(n), targets)
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
