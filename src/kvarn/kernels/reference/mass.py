"""Attention mass: how much softmax weight each slot gets from some queries. A second tiled pass over the blocks, given
the log-sum-exp of the first, so no N x N matrix is held (as FlashAttention's backward pass recomputes its tiles)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from kvarn.kernels.api import AttendParams, PoolView, StepRows, TableView
from kvarn.kernels.reference.attend import QUERY_TILE, read_blocks, runs_of, visible


def add_mass(
    q: Tensor,
    lse: Tensor,
    rows: StepRows,
    table: TableView,
    pools: Sequence[PoolView],
    layer: int,
    params: AttendParams,
    mass: Tensor,
) -> None:
    """See `Backend.add_mass`."""
    group = q.shape[1] // pools[0].k[0].shape[2]
    starts = rows.query_start.tolist()
    for s, (begin, end) in enumerate(itertools.pairwise(starts)):
        for head in range(pools[0].k[0].shape[2]):
            row = int(table.first_row[s]) + layer * table.layer_stride + head * table.head_stride
            columns = slice(head * group, (head + 1) * group)
            flat = mass[s, head].view(-1)
            for at in range(begin, end, QUERY_TILE):
                span = slice(at, min(at + QUERY_TILE, end))
                slot = 0
                for index, blocks in runs_of(table, row):
                    k, _, positions = read_blocks(pools[index], blocks, layer, [head], torch.float32)
                    scores = torch.einsum("tgd,ds->tgs", q[span, columns].float(), k[0]) * params.scale
                    if params.soft_cap:
                        scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
                    weights = torch.exp(scores - lse[span, columns, None].float())
                    seen = visible(rows.positions[span], positions, params)
                    total = weights.masked_fill(~seen[:, None], 0.0).sum((0, 1))
                    flat[slot : slot + total.numel()] += total
                    slot += total.numel()
