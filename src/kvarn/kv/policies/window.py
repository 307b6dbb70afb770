"""The newest tokens, and the first ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from kvarn.core.errors import IncompatiblePlan, UnknownName
from kvarn.kv.policies.base import Budget, Decision, GroupView, KVPolicy, SequenceView, Signal

Positions = Literal["original", "cache"]


@dataclass(frozen=True)
class Window(KVPolicy):
    """The newest tokens within the budget, and the first `sinks` beside it (StreamingLLM, Xiao et al. 2023, arXiv
    2309.17453, section 3.2; without sinks it is window attention, whose damage the paper shows).

    positions: 'original' leaves keys as they were rotated, so the distance to the sinks grows with the text. 'cache',
    the paper's rule, counts positions within the cache, so that no distance is longer than what is kept, and generation
    runs past the trained context. Only distances matter to RoPE, so the sinks are turned ahead by what was dropped
    between, instead of the window back.

    Paging: whole blocks are dropped, so up to block_size - 1 tokens more than the budget stay, and the sinks' blocks.
    The prompt is attended in full and cut when it is complete.
    """

    prefix_pure: ClassVar[bool] = True
    budget: Budget = field(default_factory=lambda: Budget(tokens=1024))
    sinks: int = 0
    positions: Positions = "original"

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise IncompatiblePlan(f"sinks is {self.sinks}; it must not be negative")
        if self.positions not in ("original", "cache"):
            raise UnknownName("window positions", self.positions, ("original", "cache"))

    @property
    def signals(self) -> frozenset[Signal]:
        return frozenset({Signal.ROTATION}) if self.positions == "cache" else frozenset()

    def due(self, length: int, prompt_tokens: int, longest_row: int, block_size: int, bytes_per_token: int) -> bool:
        return longest_row >= self.budget.tokens_at(length, bytes_per_token) + block_size

    def decide(self, view: SequenceView) -> Decision | None:
        tokens = self.budget.tokens_at(view.length, view.bytes_per_token)
        keep = tuple(None if g is None else self._keep(g, view.length - tokens) for g in view.groups)
        note = f"window of {tokens} tokens, {self.sinks} sinks"
        if self.positions == "original" or not self.sinks:
            return Decision(keep, note)
        first = -(-self.sinks // view.block_size)
        turns = tuple(
            None if k is None or g is None else self._ahead(g, k, first, view.block_size)
            for g, k in zip(view.groups, keep, strict=True)
        )
        return Decision(keep, note, first_blocks=first, turn=turns)

    def _keep(self, group: GroupView, oldest: int) -> np.ndarray:
        at = group.positions
        return (at >= 0) & ((at < self.sinks) | (at >= oldest))

    def _ahead(self, group: GroupView, keep: np.ndarray, first: int, block_size: int) -> int:
        """Tokens that are dropped by now between the sinks' blocks and the oldest block that stays."""
        behind = first * block_size
        kept = np.flatnonzero(keep[0, behind:])
        place = behind + (int(kept[0]) // block_size * block_size if kept.size else 0)
        return max(0, int(group.positions[0, place]) - behind) if place < group.positions.shape[1] else 0


POLICY = Window
