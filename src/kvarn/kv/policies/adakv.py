"""More for the heads that spread their attention, less for those that focus."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvarn.core.errors import IncompatiblePlan
from kvarn.kv.policies.base import GroupView, top_places
from kvarn.kv.policies.snapkv import SnapKV


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """Ada-KV (Feng et al. 2024, arXiv 2407.11550, algorithm 1): SnapKV's scores; a layer's budget goes to its heads by
    how many of the layer's highest scores each has, and `floor` of it is divided evenly first.

    Here: heads' blocks are their own, so what a head does not get is really freed.
    """

    floor: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.floor <= 1:
            raise IncompatiblePlan(f"floor is {self.floor}; it is a share, 0 to 1")

    def counts(self, group: GroupView, scores: np.ndarray, fixed: np.ndarray, tokens: int) -> np.ndarray:
        protected = fixed.sum(1)
        free = np.where(fixed, -np.inf, scores).reshape(len(group.layers), -1)
        spare = np.maximum(tokens * group.heads - protected.reshape(-1, group.heads).sum(1), 0)
        even = np.floor(spare * self.floor / group.heads).astype(np.int64)
        best = top_places(free, spare - even * group.heads).reshape(len(scores), -1)
        return protected + best.sum(1) + np.repeat(even, group.heads)


POLICY = AdaKV
