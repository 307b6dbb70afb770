"""Heavy hitters: the tokens that got the most attention so far, beside the newest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvarn.core.errors import IncompatiblePlan
from kvarn.kv.policies.base import GroupView, ScoredPolicy, SequenceView, Signal


@dataclass(frozen=True)
class H2O(ScoredPolicy):
    """H2O (Zhang et al. 2023, arXiv 2306.14048, algorithm 1): by layer and head, keep the largest sums of attention
    weights over all queries so far, and the newest tokens; the paper's usual split gives each half of the budget.

    Here: query heads that share a KV head add up (the paper has no GQA). A token's sum ends when it is dropped. The
    prompt is attended in full and cut when it is complete, as in the authors' code.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION_MASS})
    recent: int = 0
    recent_share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.recent_share <= 1:
            raise IncompatiblePlan(f"recent_share is {self.recent_share}; it is a share, 0 to 1")

    def protected(self, group: GroupView, view: SequenceView) -> np.ndarray:
        tokens = self.budget.tokens_at(view.length, view.bytes_per_token)
        newest = max(self.recent, int(tokens * self.recent_share))
        at = group.positions
        return (at >= 0) & ((at < self.sinks) | (at >= view.length - newest))

    def scores(self, group: GroupView, view: SequenceView) -> np.ndarray:
        assert group.mass is not None, "attention mass was asked for"
        return group.mass


POLICY = H2O
