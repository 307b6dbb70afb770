"""Turning the keys of a sequence's first blocks ahead, so that they seem nearer to the tokens that come.

RoPE makes a score depend on the distance between query and key alone. So moving everything behind a dropped stretch
back by its length, as StreamingLLM does (Xiao et al. 2023, arXiv 2309.17453, section 3.2), equals moving the sinks
ahead by it: a few blocks are turned instead of the whole window, and each time from a copy of what was first written,
so that errors do not add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn.kernels.api import Rope
from kvarn.kv.group import CacheGroup
from kvarn.kv.table import OPEN

Turn = Callable[[Tensor], Rope]
"""positions [n] int64 -> cos, sin [n, R/2] float32, without any attention scaling."""


@dataclass(frozen=True, slots=True)
class Written:
    """The first blocks of one group of a sequence as they were written: k [R, n, L, H, D, B], v [R, n, L, H, B, E]."""

    k: Tensor
    v: Tensor


def turn_first_blocks(
    group: CacheGroup, row: int, blocks: int, tokens: int, turn: Turn, written: Written | None
) -> Written:
    """Turn the keys of the first `blocks` blocks of each row by `tokens` positions from how they were written. Returns
    that. The caller made sure that copies of the blocks in `shared_first_blocks` fit."""
    places = _first_blocks(group, row, blocks)
    group.own_blocks(shared_first_blocks(group, row, blocks))
    written = written or _read(group, places, blocks)
    rope = turn(torch.tensor([tokens]))
    k = _turned(written.k, rope).flatten(0, 1)
    for at, (pool, each, column) in enumerate(places):
        _write(group, pool, int(group.tables.block[each, column]), k[at], written.v.flatten(0, 1)[at])
    return written


def shared_first_blocks(group: CacheGroup, row: int, blocks: int) -> list[tuple[int, int, int]]:
    """(pool, row, column) of those of the first blocks that others hold too."""
    places = _first_blocks(group, row, blocks)
    return [p for p in places if group.pools[p[0]].refs[group.tables.block[p[1], p[2]]] > 1]


def _first_blocks(group: CacheGroup, row: int, blocks: int) -> list[tuple[int, int, int]]:
    rows = range(row, row + group.rows_per_seq)
    return [(int(group.tables.pool[r, c]), r, c) for r in rows for c in range(blocks)]


def _read(group: CacheGroup, places: list[tuple[int, int, int]], blocks: int) -> Written:
    both = [
        group.backend.decode(group.views[pool], torch.tensor([int(group.tables.block[row, column])]))
        for pool, row, column in places
    ]
    k, v = (torch.cat(side).unflatten(0, (-1, blocks)).clone() for side in zip(*both, strict=True))
    return Written(k, v)


def _turned(k: Tensor, rope: Rope) -> Tensor:
    """k [..., D, B] rotated by one rotation, cos, sin [1, R/2]."""
    half = rope.cos.shape[-1]
    cos, sin = rope.cos[0, :, None], rope.sin[0, :, None]
    x1, x2 = k[..., :half, :], k[..., half : 2 * half, :]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, k[..., 2 * half :, :]), dim=-2)


def _write(group: CacheGroup, pool: int, block: int, k: Tensor, v: Tensor) -> None:
    """Write one block's numbers, k [L, H, D, B] and v [L, H, B, E]; a sealed one is encoded anew."""
    target, view = block, group.views[OPEN]
    if pool != OPEN:
        ledger, view = group.scratch(1)
        ledger.adopt(group.pools[pool], [target], [0])
        block = 0
    for stored, numbers in zip((view.k[0], view.v[0]), (k, v), strict=True):
        into = stored[block]
        for axis in (0, 1):  # where a block has no layer or head axis, all of them are one
            if into.stride(axis) == 0:
                into, numbers = into.narrow(axis, 0, 1), numbers.narrow(axis, 0, 1)
        into.copy_(numbers)
    if pool != OPEN:
        group.backend.seal(view, torch.tensor([0]), group.views[pool], torch.tensor([target]))
