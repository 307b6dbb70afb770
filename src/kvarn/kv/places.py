"""Where each model layer's cache stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvarn.core.options import CachePlan
from kvarn.core.specs import LayerKind, LayerSpec


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """group, and index within the group; writes: False where the layer shares another's cache."""

    group: int
    index: int
    writes: bool


class LayerPlaces(tuple[LayerPlace | None, ...]):
    """One for each model layer; None where it has no cache."""

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...] | None:
        """(group, index within it) of every layer; None where some layer has no cache."""
        found = tuple((p.group, p.index) for p in self if p is not None)
        return found if len(found) == len(self) else None


def layer_places(layers: Sequence[LayerSpec], plan: CachePlan) -> LayerPlaces:
    """For each model layer: where its cache stands, or None where it has none."""
    where = {layer: (g, i) for g, group in enumerate(plan.groups) for i, layer in enumerate(group.group.layers)}
    places: list[LayerPlace | None] = []
    for index in range(len(layers)):
        owner = index
        while layers[owner].kind is LayerKind.SHARED:
            owner = layers[owner].shares_layer or 0
        at = where.get(owner)
        places.append(LayerPlace(*at, owner == index) if at else None)
    return LayerPlaces(places)
