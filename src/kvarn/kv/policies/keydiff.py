"""Keys that differ from the others carry what the others do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from kvarn.kv.policies.base import GroupView, ScoredPolicy, SequenceView, Signal


@dataclass(frozen=True)
class KeyDiff(ScoredPolicy):
    """KeyDiff (Park et al. 2025, arXiv 2504.15364, section 3): drop the keys that are most alike to the mean direction
    of all keys (cosine similarity to the mean of the normalised keys); no attention weights needed.

    Here: keys are compared as they are stored, that is rotated; the newest tokens are protected.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS})

    def scores(self, group: GroupView, view: SequenceView) -> np.ndarray:
        held = torch.from_numpy(group.positions >= 0)[..., None]
        keys = torch.where(held, F.normalize(group.keys(), dim=-1), 0.0)
        anchor = keys.sum(1, keepdim=True) / held.sum(1, keepdim=True).clamp_min(1)
        return -F.cosine_similarity(keys, anchor, dim=-1).numpy()


POLICY = KeyDiff
