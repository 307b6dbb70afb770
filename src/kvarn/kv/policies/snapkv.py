"""What the end of the prompt looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvarn.core.errors import IncompatiblePlan
from kvarn.kv.policies.base import GroupView, ScoredPolicy, SequenceView, Signal


@dataclass(frozen=True)
class SnapKV(ScoredPolicy):
    """SnapKV (Li et al. 2024, arXiv 2404.14469, section 4): by layer and head, sum the attention weights of the last
    `query_tokens` queries, smooth them over `pool` neighbouring positions, keep the highest and those last tokens.

    Here: smoothing is a running maximum, as in the authors' code; query heads that share a KV head add up. The paper
    cuts the prompt once and lets the answer grow; here the same rule with the newest queries holds the budget while the
    answer grows.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.RECENT_QUERIES})
    query_tokens: int = 32
    pool: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool < 1 or self.pool % 2 == 0:
            raise IncompatiblePlan(f"pool is {self.pool}; use an odd number of positions, 1 for no smoothing")

    def protected(self, group: GroupView, view: SequenceView) -> np.ndarray:
        at = group.positions
        newest = max(self.recent, self.query_tokens)
        return (at >= 0) & ((at < self.sinks) | (at >= view.length - newest))

    def scores(self, group: GroupView, view: SequenceView) -> np.ndarray:
        return smoothed(group.recent_mass(), group, self.pool)


def smoothed(scores: np.ndarray, group: GroupView, pool: int) -> np.ndarray:
    """[R, S]: each place's score becomes the maximum over `pool` places around it in logical order."""
    order = group.order
    ordered = np.take_along_axis(np.where(group.positions < 0, 0.0, scores), order, axis=1)
    padded = np.pad(ordered, ((0, 0), (pool // 2, pool // 2)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, pool, axis=1).max(-1)
    out = np.empty_like(windows)
    np.put_along_axis(out, order, windows, axis=1)
    return out


POLICY = SnapKV
