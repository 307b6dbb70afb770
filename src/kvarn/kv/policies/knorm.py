"""Keys of small norm get the most attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvarn.kv.policies.base import GroupView, ScoredPolicy, SequenceView, Signal


@dataclass(frozen=True)
class KNorm(ScoredPolicy):
    """L2 norm (Devoto et al. 2024, arXiv 2406.11430, section 3): keep the keys with the smallest norm, no attention
    weights needed. A rotation does not change a norm, so rotated keys serve.

    Here: the newest tokens are protected, so that a sentence is not cut while it is written.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS})

    def scores(self, group: GroupView, view: SequenceView) -> np.ndarray:
        return -group.keys().norm(dim=-1).numpy()


POLICY = KNorm
