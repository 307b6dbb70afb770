"""Operands for tests of the kernels: poisoned pools, random tables, ragged steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn.core.formats import parse_kv_format
from kvarn.kernels import backend_report, load_backend
from kvarn.kernels.api import AttendParams, Backend, PoolView, StepRows, TableView

LAYERS = 2


def backends() -> list[Backend]:
    """Every implementation that runs here but for the reference: one a backend and instruction set."""
    if not any(r.name == "cpu" and r.available for r in backend_report()):
        return []
    from kvarn.kernels.cpu.backend import CpuBackend, instruction_sets  # noqa: PLC0415

    return [CpuBackend(isa) for isa in instruction_sets()]


def backend_ids(backend: Backend) -> str:
    return f"{backend.name}-{getattr(backend, 'isa', '')}"


REFERENCE = load_backend("reference")


@dataclass(frozen=True)
class Heads:
    """kv: KV heads; group: query heads each; k_dim, v_dim; block: block size."""

    kv: int
    group: int
    k_dim: int
    v_dim: int
    block: int

    def __str__(self) -> str:
        return f"{self.kv}x{self.group}x{self.k_dim}-{self.v_dim}b{self.block}"


@dataclass(frozen=True)
class Bag:
    """One group's cache and a step over it. source: the pool that holds everything in float32."""

    heads: Heads
    rows: StepRows
    table: TableView
    source: PoolView
    blocks: Tensor

    @property
    def tokens(self) -> int:
        return self.rows.positions.shape[0]


def empty_pool(fmt: str, n_blocks: int, heads: Heads) -> PoolView:
    """A pool whose every byte is poison: NaN, or the integers' extreme."""
    kv = parse_kv_format(fmt)

    def poisoned(shape: tuple[int, ...], dtype: str) -> Tensor:
        t = torch.empty((n_blocks, LAYERS, heads.kv, *shape), dtype=getattr(torch, dtype))
        return t.fill_(float("nan") if t.is_floating_point() else torch.iinfo(t.dtype).max)

    return PoolView(
        kv,
        heads.block,
        tuple(poisoned(t.shape, t.dtype) for t in kv.k.k_layout(heads.k_dim, heads.block)),
        tuple(poisoned(t.shape, t.dtype) for t in kv.v.v_layout(heads.v_dim, heads.block)),
        torch.full((n_blocks, heads.block), -1, dtype=torch.int32),
    )


def make_bag(heads: Heads, lengths: Sequence[int], queries: Sequence[int], seed: int = 0, drop: float = 0.0) -> Bag:
    """Sequences of `lengths` tokens in randomly placed blocks, of which the last `queries` ask. drop: share of the
    older tokens that were evicted: their slots are poison again."""
    g = torch.Generator().manual_seed(seed)
    counts = [-(-n // heads.block) for n in lengths]
    total = sum(counts) + 2
    pool, places = empty_pool("float32", total, heads), torch.randperm(total, generator=g)
    columns = max(counts, default=0) + 1
    block = torch.full((len(lengths), columns), int(places[-1]), dtype=torch.int32)
    at = 0
    for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        block[s, :count] = places[at : at + count].int()
        at += count
        slots = torch.arange(length)
        kept = slots[(torch.rand(length, generator=g) >= drop) | (slots >= length - queries[s])]
        b, j = block[s, kept // heads.block].long(), kept % heads.block
        pool.positions[b, j] = kept.int()
        scale = torch.exp(torch.randn(heads.k_dim, generator=g))  # some channels are larger, as in real keys
        pool.k[0][b, ..., j] = torch.randn(len(kept), LAYERS, heads.kv, heads.k_dim, generator=g) * scale
        pool.v[0][b, :, :, j, :] = torch.randn(len(kept), LAYERS, heads.kv, heads.v_dim, generator=g)
    starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
    spans = [torch.arange(n - q, n) for n, q in zip(lengths, queries, strict=True)]
    rows = StepRows(starts, torch.cat(spans).int(), max(queries, default=0))
    table = TableView(
        torch.zeros_like(block, dtype=torch.uint8),
        block,
        torch.tensor(counts, dtype=torch.int32),
        torch.arange(len(lengths), dtype=torch.int32),
        0,
        0,
    )
    return Bag(heads, rows, table, pool, places[:-2].clone())


def sealed(bag: Bag, fmt: str, backend: Backend = REFERENCE) -> PoolView:
    """The bag's blocks in another format, at the same block ids."""
    pool = empty_pool(fmt, bag.source.positions.shape[0], bag.heads)
    pool.positions.copy_(bag.source.positions)
    backend.seal(bag.source, bag.blocks, pool, bag.blocks)
    return pool


def queries(bag: Bag, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """q [T, Hq, D]; large enough that softmax prefers some keys."""
    g = torch.Generator().manual_seed(seed)
    shape = (bag.tokens, bag.heads.kv * bag.heads.group, bag.heads.k_dim)
    return torch.randn(shape, generator=g).to(dtype)


def plain_params(bag: Bag, **changes: object) -> AttendParams:
    return AttendParams(**{"scale": bag.heads.k_dim**-0.5, **changes})  # type: ignore[arg-type]


def mixed_table(bag: Bag, n_pools: int, seed: int = 3) -> TableView:
    """The bag's table with each column's pool drawn at random."""
    t = bag.table
    pool = torch.randint(0, n_pools, t.pool.shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    return TableView(pool, t.block, t.length, t.first_row, t.layer_stride, t.head_stride)
