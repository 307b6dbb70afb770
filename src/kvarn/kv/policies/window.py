"""The newest tokens, and the first ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from kvarn.core.errors import IncompatiblePlan
from kvarn.kv.policies.base import Budget, Decision, GroupView, KVPolicy, SequenceView


@dataclass(frozen=True)
class Window(KVPolicy):
    """The newest tokens within the budget, and the first `sinks` beside it (StreamingLLM, Xiao et al. 2023, arXiv
    2309.17453, section 3.2; without sinks it is window attention, whose damage the paper shows).

    Paging: whole blocks are dropped, so up to block_size - 1 tokens more than the budget stay, and the sinks' blocks.
    The prompt is attended in full and cut when it is complete.
    """

    prefix_pure: ClassVar[bool] = True
    budget: Budget = field(default_factory=lambda: Budget(tokens=1024))
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise IncompatiblePlan(f"sinks is {self.sinks}; it must not be negative")

    def due(self, length: int, prompt_tokens: int, longest_row: int, block_size: int, bytes_per_token: int) -> bool:
        return longest_row >= self.budget.tokens_at(length, bytes_per_token) + block_size

    def decide(self, view: SequenceView) -> Decision | None:
        tokens = self.budget.tokens_at(view.length, view.bytes_per_token)
        keep = tuple(None if g is None else self._keep(g, view.length - tokens) for g in view.groups)
        return Decision(keep, f"window of {tokens} tokens, {self.sinks} sinks")

    def _keep(self, group: GroupView, oldest: int) -> np.ndarray:
        at = group.positions
        return (at >= 0) & ((at < self.sinks) | (at >= oldest))


POLICY = Window
