"""Acting on a decision: kept tokens move together, blocks that are no longer needed are given back.

Within a row, kept tokens behind the new end move into the holes before it, so as few as possible move; physical order
then differs from logical order, which attention does not mind. Sealed and open blocks are packed apart.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from kvarn.kv.group import CacheGroup
from kvarn.kv.pool import BlockPool
from kvarn.kv.table import OPEN

Gone = list[tuple[int, int]]  # (pool, block)


def keep_places(group: CacheGroup, row: int, keep: np.ndarray) -> Gone:
    """Of the sequence whose first row is `row`, keep the places of keep [R, S] bool. Returns the blocks given back. The
    caller made sure that copies of the blocks in `shared_that_change` fit."""
    group.own_blocks(shared_that_change(group, row, keep))
    moves: list[tuple[int, np.ndarray, np.ndarray]] = []
    dropped: list[tuple[int, np.ndarray]] = []
    for offset in range(group.rows_per_seq):
        _pack_row(group, row + offset, keep[offset], moves, dropped)
    for pool in range(len(group.pools)):
        sources = np.concatenate([s for p, s, _ in moves if p == pool] or [np.empty(0, np.int64)])
        targets = np.concatenate([t for p, _, t in moves if p == pool] or [np.empty(0, np.int64)])
        gone = np.concatenate([d for p, d in dropped if p == pool] or [np.empty(0, np.int64)])
        ledger = group.pools[pool]
        gone = gone[_alone(ledger, gone)]
        ledger.empty(gone)
        alone = _alone(ledger, sources)
        if sources.size:
            group.backend.move_slots(group.views[pool], torch.from_numpy(sources), torch.from_numpy(targets))
            ledger.move(sources[alone], targets[alone])
            ledger.copy_slots(sources[~alone], targets[~alone])
        if group.poison and pool == OPEN:
            emptied = np.concatenate((sources[alone], gone[~np.isin(gone, targets)]))
            group.stores[pool].poison_slots(torch.from_numpy(emptied))
    return _shorten(group, row, keep)


def _alone(ledger: BlockPool, slots: np.ndarray) -> np.ndarray:
    """Which slots lie in blocks of this sequence alone: what others hold too stays as it is for them."""
    return ledger.refs[slots // ledger.block_size] == 1


def drop_blocks(group: CacheGroup, row: int, keep: np.ndarray) -> Gone:
    """Give back the full blocks of which keep [R, S] keeps no place; all others stay whole. Returns the blocks."""
    gone: Gone = []
    for offset in range(group.rows_per_seq):
        full = int(group.tables.fill[row + offset]) // group.block_size
        kept = keep[offset, : full * group.block_size].reshape(full, group.block_size).any(1)
        columns = np.flatnonzero(~kept)
        if columns.size:
            pools = group.tables.pool[row + offset, columns].tolist()
            gone += zip(pools, group.drop_columns(row + offset, columns), strict=True)
    return gone


def _regions(group: CacheGroup, row: int) -> list[tuple[int, int, int]]:
    """(pool, first place, end place) of the row's blocks of each pool; those of one pool stand side by side, the open
    ones last."""
    fill, n = int(group.tables.fill[row]), int(group.tables.length[row])
    pools = group.tables.pool[row, :n]
    starts = [0, *(np.flatnonzero(np.diff(pools.astype(np.int64))) + 1).tolist(), n]
    regions = [
        (int(pools[a]), a * group.block_size, max(a * group.block_size, min(b * group.block_size, fill)))
        for a, b in itertools.pairwise(starts)
        if b > a
    ]
    assert len({pool for pool, _, _ in regions}) == len(regions), "blocks of one pool stand side by side"
    return regions


def _rewritable(group: CacheGroup, pool: int) -> bool:
    return group.views[pool].format.rewritable


def _slots_of(group: CacheGroup, row: int, places: np.ndarray) -> np.ndarray:
    size = group.block_size
    return group.tables.block[row, places // size].astype(np.int64) * size + places % size


def _pack_row(
    group: CacheGroup,
    row: int,
    keep: np.ndarray,
    moves: list[tuple[int, np.ndarray, np.ndarray]],
    dropped: list[tuple[int, np.ndarray]],
) -> None:
    """Write down which slots of one row move where, and which hold nothing any more."""
    for pool, begin, end in _regions(group, row):
        kept = keep[begin:end]
        places = np.arange(begin, end)
        if not _rewritable(group, pool):  # nothing moves: a block stays or goes as a whole
            dropped.append((pool, _slots_of(group, row, places[~kept])))
            continue
        count = int(kept.sum())
        holes, movers = places[:count][~kept[:count]], places[count:][kept[count:]]
        moves.append((pool, _slots_of(group, row, movers), _slots_of(group, row, holes)))
        dropped.append((pool, _slots_of(group, row, places[~kept])))


def _shorten(group: CacheGroup, row: int, keep: np.ndarray) -> Gone:
    """Give back the blocks behind each region's new end; a row's fill is what is left."""
    size = group.block_size
    gone: Gone = []
    for offset in range(group.rows_per_seq):
        each, left = row + offset, 0
        columns: list[np.ndarray] = []
        for pool, begin, end in _regions(group, each):
            if not _rewritable(group, pool):
                stays = keep[offset, begin:end].reshape(-1, size).any(1)
                columns.append(begin // size + np.flatnonzero(~stays))
                left += int(stays.sum()) * size
                continue
            count = int(keep[offset, begin:end].sum())
            used = -(-count // size)
            columns.append(np.arange(begin // size + used, -(-end // size)))
            left += used * size if pool != OPEN else count
        spare = np.concatenate(columns) if columns else np.empty(0, np.int64)
        pools, blocks = group.tables.entries(each)
        group.give_back([pools[c] for c in spare], [blocks[c] for c in spare])
        gone += [(pools[c], blocks[c]) for c in spare]
        group.tables.drop(each, spare, 0)
        group.tables.fill[each] = left
    return gone


def shared_that_change(group: CacheGroup, row: int, keep: np.ndarray) -> list[tuple[int, int, int]]:
    """(pool, row, column) of the blocks that stay but change, and that others hold too: they must become the
    sequence's own first."""
    shared: list[tuple[int, int, int]] = []
    for offset in range(group.rows_per_seq):
        each = row + offset
        for pool, begin, end in _regions(group, each):
            for column in _changed_columns(group, pool, begin, end, keep[offset]):
                if group.pools[pool].refs[group.tables.block[each, column]] > 1:
                    shared.append((pool, each, column))
    return shared


def _changed_columns(group: CacheGroup, pool: int, begin: int, end: int, keep: np.ndarray) -> list[int]:
    """Of a region's blocks that stay, those that lose a token: it is dropped, or moves to a hole before the new end."""
    size, moves = group.block_size, _rewritable(group, pool)
    left = begin + int(keep[begin:end].sum()) if moves else end
    changed = []
    for column in range(begin // size, -(-left // size)):
        places = slice(column * size, min((column + 1) * size, end))
        kept = keep[places]
        if not (kept.all() and places.stop <= left) and (moves or kept.any()):
            changed.append(column)
    return changed
