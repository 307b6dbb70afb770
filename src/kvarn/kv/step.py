"""One step of the cache as the kernels and the model layers see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvarn.kernels.api import AttendParams, Backend, PoolView, Rope, StepRows, TableView
from kvarn.kv.group import CacheGroup
from kvarn.kv.places import LayerPlace
from kvarn.kv.signals import NOTHING, GroupSignals, Wants
from kvarn.kv.table import OPEN


class Span(NamedTuple):
    """Token rows of one sequence in a step: logical tokens [start, start + n_tokens)."""

    seq_id: int
    start: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class GroupStep:
    """One group's operands of the step. slots [T, 1 or L, 1 or H] int64."""

    table: TableView
    pools: tuple[PoolView, ...]
    slots: Tensor
    signals: GroupSignals | None = None


@dataclass(frozen=True, slots=True)
class PagedLayerKV:
    """A layer's cache in one step; see `kvarn.kv.view.LayerKV`."""

    backend: Backend
    rows: StepRows
    group: GroupStep
    place: LayerPlace

    def append_and_attend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, rope: Rope | None, params: AttendParams
    ) -> Tensor:
        if rope is not None:
            q = self.backend.rope(q, rope)
            k = None if k is None else self.backend.rope(k, rope)
        if self.place.writes:
            assert k is not None and v is not None, "a layer with a cache of its own must bring keys and values"
            self.backend.write(k, v, self.group.slots, self.group.pools[OPEN], self.place.index)
        group, layer = self.group, self.place.index
        attended = self.backend.attend(q, self.rows, group.table, group.pools, layer, params)
        if group.signals is not None and self.place.writes:
            group.signals.collect(self.backend, q, attended.lse, group.pools, layer, params)
        return attended.out


@dataclass(frozen=True, slots=True)
class CacheStep:
    """The cache of one step. positions [T] int64."""

    rows: StepRows
    positions: Tensor
    groups: tuple[GroupStep, ...]
    places: tuple[LayerPlace | None, ...]
    backend: Backend

    def layer(self, index: int) -> PagedLayerKV:
        place = self.places[index]
        assert place is not None, f"layer {index} has no cache"
        return PagedLayerKV(self.backend, self.rows, self.groups[place.group], place)


def step_rows(spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(counts [S], query_start [S + 1], positions [T]) of the ragged step, all int64."""
    counts = np.fromiter((s.n_tokens for s in spans), np.int64, len(spans))
    starts = np.fromiter((s.start for s in spans), np.int64, len(spans))
    query_start = np.concatenate(([0], np.cumsum(counts)))
    positions = np.repeat(starts - query_start[:-1], counts) + np.arange(query_start[-1])
    return counts, query_start, positions


def build_step(
    spans: Sequence[Span],
    rows: Sequence[tuple[int, ...]],
    groups: Sequence[CacheGroup],
    places: tuple[LayerPlace | None, ...],
    backend: Backend,
    wants: Sequence[Sequence[Wants]],
) -> CacheStep:
    """Give the step's slots their positions and put the operands together. rows[s][g]: first table row. wants[g][s]:
    signals that span s must bring for group g."""
    counts, query_start, positions = step_rows(spans)
    view = StepRows(
        torch.from_numpy(query_start.astype(np.int32)),
        torch.from_numpy(positions.astype(np.int32)),
        int(counts.max(initial=0)),
    )
    steps = []
    for index, group in enumerate(groups):
        first = np.fromiter((r[index] for r in rows), np.int32, len(spans))
        slots = group.place(first, counts, positions)
        table = group.table_view(first)
        signals = None
        if any(w != NOTHING for w in wants[index]):
            spec = group.spec
            signals = GroupSignals(wants[index], view, table, len(group.layers), spec.kv_heads, group.block_size)
        steps.append(GroupStep(table, group.views, slots, signals))
    return CacheStep(view, torch.from_numpy(positions), tuple(steps), places, backend)
