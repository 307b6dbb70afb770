"""What the end of the prompt looks at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from kvarn.core.errors import IncompatiblePlan
from kvarn.kv.policies.base import GroupView, ScoredPolicy, SequenceView, Signal


@dataclass(frozen=True)
class SnapKV(ScoredPolicy):
    """SnapKV (Li et al. 2024, arXiv 2404.14469, section 4): by layer and head, sum the attention weights of the last
    `query_tokens` queries, smooth them over `pool` neighbouring positions, keep the highest and those last tokens.

    Here: smoothing is a running maximum over the tokens before the last ones, as in the authors' code; query heads that
    share a KV head add up. The paper cuts the prompt once and lets the answer grow; here the same rule with the newest
    queries holds the budget while the answer grows.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.RECENT_QUERIES})
    query_tokens: int = field(default=32, kw_only=True)
    recent: int = 0
    pool: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool < 1 or self.pool % 2 == 0:
            raise IncompatiblePlan(f"pool is {self.pool}; use an odd number of positions, 1 for no smoothing")

    @property
    def newest(self) -> int:
        return max(self.recent, self.query_tokens)

    def scores(self, group: GroupView, view: SequenceView) -> np.ndarray:
        asking = group.positions >= view.length - self.query_tokens
        return smoothed(np.where(asking, 0.0, group.recent_mass()), group, self.pool)


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
