"""Tokens that were important stay important."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from kvarn.kv.policies.base import GroupView, ScoredPolicy, SequenceView, Signal


@dataclass(frozen=True)
class Scissorhands(ScoredPolicy):
    """Scissorhands (Liu et al. 2023, arXiv 2305.17118, algorithm 2): over a history of the last `query_tokens` queries,
    count for each token how often its attention weight was below the average 1 / t; drop those with the highest count,
    never the `recent` newest.

    Here: query heads that share a KV head count together, each for itself; tokens with equal counts are told apart by
    their summed weight. t is the number of tokens that the query could see.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.RECENT_QUERIES})
    query_tokens: int = field(default=32, kw_only=True)

    def scores(self, group: GroupView, view: SequenceView) -> np.ndarray:
        return np.stack([_persistence(group.recent_weights(r), group.positions[r], view.length) for r in _rows(group)])


def _rows(group: GroupView) -> range:
    return range(len(group.positions))


def _persistence(weights: np.ndarray, positions: np.ndarray, length: int) -> np.ndarray:
    """weights [w, G, S]; returns [S]: minus the times a token was below average, plus less than 1 for its weight."""
    asked = np.arange(length - len(weights), length)[:, None]
    seen = (positions >= 0) & (positions <= asked)  # [w, S]
    average = 1.0 / np.maximum(seen.sum(1), 1)
    low = (weights < average[:, None, None]) & seen[:, None]
    total = weights.sum((0, 1))
    return total / (total.sum() + 1.0) - low.sum((0, 1))


POLICY = Scissorhands
