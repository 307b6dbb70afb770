"""What the model needs to repeat the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvarn.kv.policies.base import GroupView, ScoredPolicy, SequenceView, Signal, top_places


@dataclass(frozen=True)
class KVzip(ScoredPolicy):
    """KVzip (Kim et al. 2025, arXiv 2505.23416, section 3): the model reads the text again, asked to repeat it; the
    score of a slot is the largest attention weight that any of the tokens and query heads then gives it. The slots of
    the highest scores stay, over all layers and heads together, so that heads which only look nearby are emptied. No
    question needs to be known: for what will be asked later.

    Here: weights are those of the attention as it is computed, over the whole text; the authors normalise over the part
    that is repeated, to save time. Parts have 512 tokens, theirs 2,048. The text is read again once, before the first
    decision, which takes about as long as its prefill and goes through the scheduler's steps as a prompt does, so that
    others decode meanwhile (in one go where several answers fork from one prompt); while the answer grows, its newest
    tokens go last. One budget holds for each cache group.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.RECONSTRUCTION})
    sinks: int = 4
    recent: int = 0

    def scores(self, group: GroupView, view: SequenceView) -> np.ndarray:
        assert group.reconstruction is not None, "reading the text again was asked for"
        later = 1.0 + group.positions / view.length  # above every weight
        return np.where(np.isnan(group.reconstruction), later, group.reconstruction)

    def counts(self, group: GroupView, scores: np.ndarray, fixed: np.ndarray, tokens: int) -> np.ndarray:
        one_row = np.where(fixed, np.inf, scores).reshape(1, -1)
        return top_places(one_row, [tokens * len(scores)]).reshape(scores.shape).sum(1)


POLICY = KVzip
