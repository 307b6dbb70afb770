"""Builds what a policy sees of one sequence: arrays of positions and mass, tensors only where it asks for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvarn.kernels.api import PoolView, StepRows
from kvarn.kv.group import CacheGroup
from kvarn.kv.moments import QueryMoments
from kvarn.kv.policies.base import GroupView
from kvarn.kv.pool import EMPTY
from kvarn.kv.signals import QueryRing
from kvarn.kv.turning import Turn

DECODED_BLOCKS = 1024  # at a time, so that what is in between stays small


@dataclass(frozen=True)
class TensorReader:
    """See `kvarn.kv.policies.base.GroupReader`. row: the sequence's first table row; length: its logical tokens."""

    group: CacheGroup
    row: int
    length: int
    ring: QueryRing | None
    moments: QueryMoments | None = None

    def keys(self) -> Tensor:
        return self._decoded()[0]

    def values(self) -> Tensor:
        return self._decoded()[1]

    def _decoded(self) -> tuple[Tensor, Tensor]:
        """k [R, S, D], v [R, S, E] float32. Rows that stand for several layers or heads are read as their mean."""
        rows, tables = np.array(self.group.rows(self.row)), self.group.tables
        longest = int(tables.fill[rows].max(initial=0))
        k, v = decoded(self.group, rows, 0, int(tables.length[rows].max(initial=0)))
        return k[:, :longest], v[:, :longest]

    def queries(self) -> Tensor:
        kept, _ = self._ring()
        layers, w, heads, dim = kept.shape
        grouped = kept.view(layers, w, self.group.spec.kv_heads, heads // self.group.spec.kv_heads, dim)
        return grouped.permute(0, 2, 1, 3, 4).flatten(0, 1)

    def query_moments(self) -> tuple[Tensor, Tensor]:
        assert self.moments is not None, "the policy did not ask for the moments of its queries"
        heads = self.group.spec.kv_heads
        mean, covariance = (t.unflatten(1, (heads, -1)).flatten(0, 1) for t in self.moments.read())
        return mean, covariance

    def recent_mass(self) -> np.ndarray:
        kept, ring = self._ring()
        group = self.group
        w = kept.shape[1]
        rows = StepRows(
            torch.tensor([0, w], dtype=torch.int32), torch.arange(self.length - w, self.length, dtype=torch.int32), w
        )
        table = group.table_view(np.array([self.row], dtype=np.int32))
        mass = torch.zeros((len(group.layers), 1, group.spec.kv_heads, group.tables.columns, group.block_size))
        assert ring.params is not None
        for layer, q in enumerate(kept):
            lse = group.backend.attend(q, rows, table, group.views, layer, ring.params).lse
            group.backend.add_mass(q, lse, rows, table, group.views, layer, ring.params, mass[layer])
        per_row = mass[:, 0].flatten(0, 1).flatten(1, 2).numpy()
        longest = int(group.tables.fill[group.rows(self.row)].max(initial=0))
        return per_row.reshape(group.rows_per_seq, -1, per_row.shape[-1]).sum(1)[:, :longest]

    def recent_weights(self, row: int) -> np.ndarray:
        group, (kept, ring) = self.group, self._ring()
        assert group.grain == "head" and ring.params is not None, "weights of single queries are read a layer and head"
        layer, head = divmod(row, group.spec.kv_heads)
        size = kept.shape[2] // group.spec.kv_heads
        q = kept[layer, :, head * size : (head + 1) * size]
        longest = int(group.tables.fill[group.rows(self.row)].max(initial=0))
        at, k = self._row(row, longest)
        scores = torch.einsum("wgd,sd->wgs", q, k) * ring.params.scale
        if ring.params.soft_cap:
            scores = ring.params.soft_cap * torch.tanh(scores / ring.params.soft_cap)
        asked = torch.arange(self.length - len(q), self.length)
        seen = (at >= 0) & (at <= asked[:, None])
        return torch.softmax(scores.masked_fill(~seen[:, None], -torch.inf), dim=-1).numpy()

    def _row(self, row: int, places: int) -> tuple[Tensor, Tensor]:
        """Positions [places] and keys [places, D] float32 of one row at grain `head`; -1 and 0 where nothing is."""
        group = self.group
        assert group.grain == "head", "a block is one layer's and head's"
        pools, blocks = group.tables.entries(self.row + row)
        positions = torch.full((len(blocks), group.block_size), EMPTY, dtype=torch.int32)
        k = torch.zeros((len(blocks), group.block_size, group.spec.k_dim))
        for index, view in enumerate(group.views):
            at = [c for c, p in enumerate(pools) if p == index]
            if at:
                ids = torch.tensor([blocks[c] for c in at])
                positions[at] = view.positions[ids]
                k[at] = group.backend.decode(own_axes(view), ids)[0][:, 0, 0].transpose(-1, -2)
        k = k.masked_fill(positions[..., None] < 0, 0.0).flatten(0, 1)[:places]
        short = places - len(k)
        padded = torch.nn.functional.pad(positions.flatten()[:places], (0, short), value=EMPTY)
        return padded, torch.nn.functional.pad(k, (0, 0, 0, short))

    def _ring(self) -> tuple[Tensor, QueryRing]:
        assert self.ring is not None and self.ring.kept is not None, "the policy did not ask for recent queries"
        return self.ring.kept, self.ring


def decoded(group: CacheGroup, rows: np.ndarray, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """k [R, n, D] and v [R, n, E] float32 of the blocks in columns [begin, end) of these table rows; 0 where a row is
    shorter. Blocks of several layers or heads are read as their mean."""
    k = torch.zeros((len(rows), end - begin, group.block_size, group.spec.k_dim))
    v = torch.zeros((len(rows), end - begin, group.block_size, group.spec.v_dim))
    held = np.arange(begin, end) < group.tables.length[rows][:, None]
    for index, view in enumerate(group.views):
        at, column = np.nonzero(held & (group.tables.pool[rows, begin:end] == index))
        blocks, own = torch.from_numpy(group.tables.block[rows[at], begin + column].astype(np.int64)), own_axes(view)
        sides = (blocks, torch.from_numpy(at), torch.from_numpy(column))
        for part, n, c in zip(*(x.split(DECODED_BLOCKS) for x in sides), strict=True):
            if len(part):
                block_k, block_v = group.backend.decode(own, part)
                k[n, c], v[n, c] = block_k.mean((1, 2)).transpose(-1, -2), block_v.mean((1, 2))
    return k.flatten(1, 2), v.flatten(1, 2)


def own_axes(view: PoolView) -> PoolView:
    """The pool with one layer or head where its blocks have no such axis (stride 0), so that each number of a block is
    decoded once."""
    axes = [a for a in (1, 2) if view.k[0].stride(a) == 0]
    if not axes:
        return view
    one = tuple(slice(0, 1) if a in axes else slice(None) for a in range(3))
    return replace(view, k=tuple(t[one] for t in view.k), v=tuple(t[one] for t in view.v))


def group_view(
    group: CacheGroup,
    row: int,
    length: int,
    ring: QueryRing | None,
    turn: Turn | None = None,
    moments: QueryMoments | None = None,
    reread: np.ndarray | None = None,
) -> GroupView:
    """The view of the sequence whose first table row is `row`. reread [R, n]: see GroupView.reconstruction."""
    rows = group.rows(row)
    fill = group.tables.fill[rows].copy()
    longest = int(fill.max(initial=0))
    positions = _gathered(group, rows, [p.positions for p in group.pools], EMPTY)
    positions[np.arange(positions.shape[1]) >= fill[:, None]] = EMPTY
    mass = None
    if any(p.mass is not None for p in group.pools):
        stores = [p.mass if p.mass is not None else np.zeros(p.positions.shape, np.float32) for p in group.pools]
        mass = _gathered(group, rows, stores, 0.0)[:, :longest]
    heads = group.spec.kv_heads if group.grain == "head" else 1
    reader = TensorReader(group, row, length, ring, moments)
    columns = int(group.tables.length[rows].max(initial=0))
    pools = np.repeat(group.tables.pool[rows, :columns], group.block_size, axis=1)
    return GroupView(
        group.spec,
        group.layers,
        heads,
        positions[:, :longest],
        fill,
        mass,
        reader,
        turn,
        pools[:, :longest],
        tuple(v.format.name for v in group.views),
        group.pool_block_bytes,
        None if reread is None else _by_place(reread, positions[:, :longest]),
    )


def _by_place(by_token: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[R, S] of by_token [R, n], through positions [R, S]; NaN where there is no token or none of the n."""
    known = (positions >= 0) & (positions < by_token.shape[1])
    picked = np.take_along_axis(by_token, np.where(known, positions, 0).astype(np.int64), axis=1)
    return np.where(known, picked, np.float32(np.nan))


def _gathered(group: CacheGroup, rows: np.ndarray, stores: list[np.ndarray], empty: float) -> np.ndarray:
    """[R, C * B] of per-slot arrays [N, B], one a pool, through the rows' tables."""
    columns = int(group.tables.length[rows].max(initial=0))
    pool, block = group.tables.pool[rows, :columns], group.tables.block[rows, :columns]
    out = np.full((*block.shape, group.block_size), empty, dtype=stores[0].dtype)
    held = np.arange(columns) < group.tables.length[rows][:, None]
    for index, store in enumerate(stores):
        mine = held & (pool == index)
        out[mine] = store[block[mine]]
    return out.reshape(len(rows), -1)
