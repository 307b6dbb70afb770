"""Attention over a bag of blocks: tiles of queries by tiles of blocks, merged by a running log-sum-exp.

The online softmax is Milakov & Gimelshein 2018; the tiling over keys without an N x N matrix is FlashAttention
(Dao et al. 2022, algorithm 1); blocks found through tables is PagedAttention (Kwon et al. 2023).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvarn.kernels.api import Attended, AttendParams, PoolView, StepRows, TableView
from kvarn.kernels.reference.codecs import decode

QUERY_TILE = 128
BLOCK_TILE = 16


def attend(
    q: Tensor, rows: StepRows, table: TableView, pools: Sequence[PoolView], layer: int, params: AttendParams
) -> Attended:
    """See `Backend.attend`. Shapes as there; the peak extra memory is a tile of scores."""
    tokens, query_heads, _ = q.shape
    kv_heads = pools[0].k[0].shape[2]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros((tokens, query_heads, value_dim(pools[0])))
    lse = torch.full((tokens, query_heads), -torch.inf, dtype=wide, device=q.device)
    starts = rows.query_start.tolist()
    per_head = table.head_stride != 0
    for s, (begin, end) in enumerate(itertools.pairwise(starts)):
        for heads in ([h] for h in range(kv_heads)) if per_head else (list(range(kv_heads)),):
            row = int(table.first_row[s]) + layer * table.layer_stride + heads[0] * table.head_stride
            for at in range(begin, end, QUERY_TILE):
                span = slice(at, min(at + QUERY_TILE, end))
                group = query_heads // kv_heads
                columns = slice(heads[0] * group, (heads[-1] + 1) * group)
                part, part_lse = _attend_rows(
                    q[span, columns].to(wide),
                    rows.positions[span],
                    runs_of(table, row),
                    pools,
                    layer,
                    heads,
                    params,
                    columns,
                )
                out[span, columns] = part.to(q.dtype)
                lse[span, columns] = part_lse
    return Attended(out, lse)


def runs_of(table: TableView, row: int) -> Iterator[tuple[int, Tensor]]:
    """The row's blocks in order, cut into runs of one pool and at most BLOCK_TILE blocks: (pool index, blocks [n])."""
    length = int(table.length[row])
    pool, block = table.pool[row, :length].tolist(), table.block[row, :length]
    begin = 0
    for end in range(1, length + 1):
        if end == length or end - begin == BLOCK_TILE or pool[end] != pool[begin]:
            yield pool[begin], block[begin:end].long()
            begin = end


def _attend_rows(
    q: Tensor,
    positions: Tensor,
    runs: Iterator[tuple[int, Tensor]],
    pools: Sequence[PoolView],
    layer: int,
    heads: list[int],
    params: AttendParams,
    columns: slice,
) -> tuple[Tensor, Tensor]:
    """One query tile of one sequence: q [t, h * G, D] wide. Returns out [t, h * G, E] and lse [t, h * G], wide."""
    tile, query_heads, dim = q.shape
    grouped = q.reshape(tile, len(heads), -1, dim).permute(1, 2, 0, 3)  # [h, G, t, D]
    peak = q.new_full(grouped.shape[:3], -torch.inf)
    total = q.new_zeros(grouped.shape[:3])
    mixed = q.new_zeros((*grouped.shape[:3], value_dim(pools[0])))
    for index, blocks in runs:
        k, v, at = read_blocks(pools[index], blocks, layer, heads, q.dtype)
        seen = visible(positions, at, params)
        scores = (grouped @ k[:, None]) * params.scale  # [h, G, t, n * B]
        if params.soft_cap:
            scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
        scores = scores.masked_fill(~seen, -torch.inf)
        new_peak = torch.maximum(peak, scores.amax(-1))
        safe = new_peak.masked_fill(new_peak == -torch.inf, 0.0)
        weights = torch.exp(scores - safe[..., None])
        keep = torch.exp(peak - safe)
        total = total * keep + weights.sum(-1)
        mixed = mixed * keep[..., None] + weights @ v[:, None]
        peak = new_peak
    if params.sinks is not None:
        total = total + torch.exp(params.sinks[columns].to(q.dtype).view(len(heads), -1, 1) - peak)
    out = mixed / total.clamp_min(torch.finfo(q.dtype).tiny)[..., None]
    lse = peak + torch.log(total)
    return out.permute(2, 0, 1, 3).reshape(tile, query_heads, -1), lse.permute(2, 0, 1).reshape(tile, query_heads)


def read_blocks(
    pool: PoolView, blocks: Tensor, layer: int, heads: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """k [h, D, n * B], v [h, n * B, E] and positions [n * B] of some blocks. Slots that hold nothing read as zero."""
    held = pool.positions[blocks] >= 0
    k_parts, v_parts = (tuple(t[blocks, layer][:, heads] for t in side) for side in (pool.k, pool.v))
    k = decode(pool.format.k, k_parts, dtype, tokens_in_row=True).masked_fill(~held[:, None, :, None], 0.0)
    v = decode(pool.format.v, v_parts, dtype, tokens_in_row=False).masked_fill(~held[:, None, :, None], 0.0)
    k = k.permute(1, 3, 0, 2).flatten(2)
    v = v.permute(1, 0, 2, 3).flatten(1, 2)
    return k, v, pool.positions[blocks].flatten()


def value_dim(pool: PoolView) -> int:
    """Channels of a value; packed formats store fewer elements."""
    return pool.format.v.elements(pool.v[0].shape[-1])


def visible(positions: Tensor, at: Tensor, params: AttendParams) -> Tensor:
    """[t, n * B] bool: may the query at positions[t] see the key at position at[...]."""
    query, key = positions[:, None], at[None, :]
    seen = (key >= 0) & (key <= query)
    if params.window_tokens is not None:
        seen &= key > query - params.window_tokens
    if params.chunk_tokens is not None:
        seen &= key // params.chunk_tokens == query // params.chunk_tokens
    return seen
