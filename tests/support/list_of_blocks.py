"""A cache for one model out of the reference kernels and a plain list of blocks, free slots poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kvarn.core.formats import parse_kv_format
from kvarn.kernels.api import AttendParams, PoolView, Rope, StepRows, TableView
from kvarn.kernels.reference import BACKEND
from kvarn.kv.view import StepInputs
from kvarn.models.base import CausalLM

BLOCK = 4


class ListOfBlocks:
    """A cache for tests: a pool a layer, blocks handed out in reverse, free slots poisoned with NaN."""

    def __init__(self, model: CausalLM, n_sequences: int, max_tokens: int) -> None:
        self.backend, self.format = BACKEND(), parse_kv_format("float32")
        self.columns = -(-max_tokens // BLOCK)
        n_blocks = n_sequences * self.columns
        self.table = torch.arange(n_blocks - 1, -1, -1, dtype=torch.int32).view(n_sequences, self.columns)
        self.pools = [self._pool(n_blocks, spec.kv_heads, spec.k_dim, spec.v_dim) for spec in model.layers]
        self.owners = [i if s.shares_layer is None else s.shares_layer for i, s in enumerate(model.layers)]
        self.lengths = [0] * n_sequences

    def _pool(self, n_blocks: int, heads: int, k_dim: int, v_dim: int) -> PoolView:
        return PoolView(
            self.format,
            BLOCK,
            (torch.full((n_blocks, 1, heads, k_dim, BLOCK), float("nan")),),
            (torch.full((n_blocks, 1, heads, BLOCK, v_dim), float("nan")),),
            torch.full((n_blocks, BLOCK), -1, dtype=torch.int32),
        )

    def step(self, rows: list[tuple[int, int]]) -> Step:
        """rows: (sequence, new tokens) of each sequence that takes part."""
        positions, slots, starts = [], [], [0]
        for sequence, count in rows:
            for position in range(self.lengths[sequence], self.lengths[sequence] + count):
                block = int(self.table[sequence, position // BLOCK])
                positions.append(position)
                slots.append(block * BLOCK + position % BLOCK)
            self.lengths[sequence] += count
            starts.append(len(positions))
        at = torch.tensor(positions)
        for pool in self.pools:
            pool.positions.view(-1)[torch.tensor(slots)] = at.int()
        used = torch.tensor([-(-self.lengths[s] // BLOCK) for s, _ in rows], dtype=torch.int32)
        table = self.table[[s for s, _ in rows]]
        view = TableView(
            torch.zeros_like(table, dtype=torch.uint8), table, used, torch.arange(len(rows), dtype=torch.int32), 0, 0
        )
        longest = max(count for _, count in rows)
        step_rows = StepRows(torch.tensor(starts, dtype=torch.int32), at.int(), longest)
        return Step(self, at, torch.tensor(slots).view(-1, 1, 1), view, step_rows)


@dataclass
class Step:
    cache: ListOfBlocks
    positions: Tensor
    slots: Tensor
    table: TableView
    rows: StepRows

    def layer(self, index: int) -> LayerView:
        owner = self.cache.owners[index]
        return LayerView(self, self.cache.pools[owner], owner == index)

    def plain(self) -> None:
        return None


@dataclass
class LayerView:
    step: Step
    pool: PoolView
    writes: bool

    def append_and_attend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, rope: Rope | None, params: AttendParams
    ) -> Tensor:
        assert rope is not None and (k is not None) == (v is not None) == self.writes
        backend = self.step.cache.backend
        if k is not None and v is not None:
            backend.write(backend.rope(k, rope), v, self.step.slots, self.pool, 0)
        q = backend.rope(q, rope)
        return backend.attend(q, self.step.rows, self.step.table, [self.pool], 0, params).out


def run(
    model: CausalLM,
    cache: ListOfBlocks,
    rows: list[tuple[int, Tensor]],
    spans: dict[int, int] | None = None,
    cuts: Sequence[int] | None = None,
) -> Tensor:
    """Logits of every row of one step. rows: (sequence, its new ids); spans: each sequence's final length; cuts: the
    layers before which the step is interrupted, None: it goes through all of them in one call."""
    kv = cache.step([(sequence, len(ids)) for sequence, ids in rows])
    span = None
    if spans:
        span = torch.cat([torch.full((len(ids),), spans[sequence]) for sequence, ids in rows])
    step = StepInputs(torch.cat([ids for _, ids in rows]), kv.positions, cache.backend, span)
    with torch.inference_mode():
        if cuts is None:
            return model.logits(model.forward(step, kv))
        x = None
        for begin, end in pairwise((0, *cuts, len(model.layers))):
            x = model.forward_layers(x, step, kv, range(begin, end))
        assert x is not None
        return model.logits(x)
