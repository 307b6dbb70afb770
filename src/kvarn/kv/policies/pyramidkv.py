"""More for the lower layers, less for the upper ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvarn.core.errors import IncompatiblePlan
from kvarn.kv.policies.base import GroupView
from kvarn.kv.policies.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """PyramidKV (Cai et al. 2024, arXiv 2406.02069, section 4.2): SnapKV's choice with a budget that falls linearly
    from the first layer to the last. Of m layers with k tokens on average, the last gets k / beta, the first
    2k - k / beta.

    Here: no layer gets less than the protected tokens; what that adds is taken from the layers above it, evenly.
    """

    beta: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta >= 1:
            raise IncompatiblePlan(f"beta is {self.beta}; it must be at least 1 (1: all layers alike)")

    def counts(self, group: GroupView, scores: np.ndarray, fixed: np.ndarray, tokens: int) -> np.ndarray:
        by_layer = pyramid(tokens, len(group.layers), self.beta, int(fixed.sum(1).max(initial=0)))
        return np.repeat(by_layer, group.heads)


def pyramid(tokens: int, layers: int, beta: float, least: int) -> np.ndarray:
    """[layers] int: budgets that fall linearly and sum to tokens * layers (where `least` allows it)."""
    last = tokens / beta
    budgets = np.floor(np.linspace(2 * tokens - last, last, layers)).astype(np.int64)
    budgets = np.maximum(budgets, least)
    excess = int(budgets.sum()) - tokens * layers
    while excess > 0 and (above := np.flatnonzero(budgets > least)).size:
        cut = np.minimum(budgets[above] - least, -(-excess // above.size))
        cut[np.cumsum(cut) > excess] = 0
        if not cut.any():
            cut[0] = min(excess, int(budgets[above[0]] - least))
        budgets[above] -= cut
        excess = int(budgets.sum()) - tokens * layers
    budgets[: max(0, -excess)] += 1
    return budgets


POLICY = PyramidKV
