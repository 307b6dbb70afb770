"""What the last query looked at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from kvarn.kv.policies.base import GroupView, ScoredPolicy, SequenceView, Signal


@dataclass(frozen=True)
class TOVA(ScoredPolicy):
    """TOVA (Oren et al. 2024, arXiv 2401.06104, section 3.2): drop the tokens with the lowest attention weight of the
    last query, averaged over a layer's heads, so that all heads of a layer keep the same tokens.

    Here: decided a block of tokens at a time by the query that filled the block; nothing but that query's own token is
    protected, as in the paper.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.RECENT_QUERIES})
    recent: int = 1
    query_tokens: int = field(default=1, kw_only=True)

    def scores(self, group: GroupView, view: SequenceView) -> np.ndarray:
        mass = group.recent_mass()
        by_place = np.zeros((len(group.layers), view.length), dtype=np.float64)
        layer = np.repeat(np.arange(len(group.layers)), group.heads)[:, None]
        held = group.positions >= 0
        np.add.at(by_place, (np.broadcast_to(layer, held.shape)[held], group.positions[held]), mass[held])
        return by_place[layer, np.maximum(group.positions, 0)]


POLICY = TOVA
