"""One step of the cache as the kernels and the model layers see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvarn.kernels.api import AttendParams, Backend, PlainStep, PoolView, Rope, StepKernel, StepRows, TableView
from kvarn.kv.group import CacheGroup
from kvarn.kv.places import LayerPlace, LayerPlaces
from kvarn.kv.sealing import StepSeals, seals_of_step
from kvarn.kv.signals import NOTHING, GroupSignals, Wants
from kvarn.kv.table import OPEN


class Span(NamedTuple):
    """Token rows of one sequence in a step: logical tokens [start, start + n_tokens)."""

    seq_id: int
    start: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class SealedAttention:
    """A step in which blocks are sealed on the way. kernel: over the parts' rows and tables; slots as in `write`."""

    seals: StepSeals
    kernel: StepKernel
    slots: Tensor


@dataclass(frozen=True, slots=True)
class GroupStep:
    """One group's operands of the step; `kernel` holds them as the backend wants them."""

    kernel: StepKernel
    table: TableView
    pools: tuple[PoolView, ...]
    signals: GroupSignals | None = None
    seals: SealedAttention | None = None


@dataclass(frozen=True, slots=True)
class PagedLayerKV:
    """A layer's cache in one step; see `kvarn.kv.view.LayerKV`."""

    backend: Backend
    group: GroupStep
    place: LayerPlace

    def append_and_attend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, rope: Rope | None, params: AttendParams
    ) -> Tensor:
        assert (k is not None) == self.place.writes, "keys and values come from the layer whose cache it is"
        if self.group.seals is not None:
            return self._sealing(self.group.seals, q, k, v, rope, params)
        if self.group.signals is not None and self.place.writes:
            return self._watched(self.group.signals, q, k, v, rope, params)
        return self.group.kernel.append_and_attend(q, k, v, rope, self.place.index, params)

    def _sealing(
        self,
        sealed: SealedAttention,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rope: Rope | None,
        params: AttendParams,
    ) -> Tensor:
        """Write, seal this layer's part of what is full and old enough, attend part by part."""
        layer, pools = self.place.index, self.group.pools
        if k is not None and v is not None:
            rotated = k if rope is None else self.backend.rope(k, rope)
            self.backend.write(rotated, v, sealed.slots, pools[OPEN], layer)
            sealed.seals.seal_layer(self.backend, pools, layer)
        signals = self.group.signals if self.place.writes else None
        lse = torch.empty(q.shape[:2], dtype=torch.float32) if signals is not None else None
        out = sealed.kernel.append_and_attend(q, None, None, rope, layer, params, lse)
        if signals is not None and lse is not None:
            signals.collect(q, rope, lse, layer, params)
        return out

    def _watched(
        self,
        signals: GroupSignals,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rope: Rope | None,
        params: AttendParams,
    ) -> Tensor:
        """As above, and what policies want to know is collected."""
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        kernel, layer = self.group.kernel, self.place.index
        out = kernel.append_and_attend(q, k, v, rope, layer, params, lse)
        signals.collect(q, rope, lse, layer, params)
        return out


@dataclass(frozen=True, slots=True)
class CacheStep:
    """The cache of one step. positions [T] int64."""

    rows: StepRows
    positions: Tensor
    groups: tuple[GroupStep, ...]
    places: LayerPlaces
    backend: Backend

    def layer(self, index: int) -> PagedLayerKV:
        place = self.places[index]
        assert place is not None, f"layer {index} has no cache"
        return PagedLayerKV(self.backend, self.groups[place.group], place)

    def plain(self) -> PlainStep | None:
        """See `kvarn.kv.view.StepKV`."""
        if self.places.pairs is None or any(g.signals is not None or g.seals is not None for g in self.groups):
            return None
        return PlainStep(tuple(g.kernel for g in self.groups), self.places.pairs)


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
    places: LayerPlaces,
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
        kernel = backend.begin_step(view, table, group.views, slots)
        signals = None
        if any(w != NOTHING for w in wants[index]):
            signals = GroupSignals(wants[index], view, table, group.views, len(group.layers), kernel, backend)
            if signals.wants_mass:
                signals.use(group.open_mass(signals.first_rows))
        seals = None
        if found := seals_of_step(group, first, counts, view, table):
            parts = backend.begin_step(found.rows, found.table, group.views)
            seals = SealedAttention(found, parts, slots)
        steps.append(GroupStep(kernel, table, group.views, signals, seals))
    return CacheStep(view, torch.from_numpy(positions), tuple(steps), places, backend)
