"""The newest tokens, and the first ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvarn.core.errors import IncompatiblePlan
from kvarn.kv.policies.base import Decision, GroupView, KVPolicy, SequenceView


@dataclass(frozen=True)
class Window(KVPolicy):
    """The last `tokens` tokens, and the first `sinks` (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453, section 3.2;
    without sinks it is window attention, whose damage the paper shows).

    Whole blocks are dropped, so between tokens and tokens + block_size - 1 of the newest stay, and the sinks' blocks.
    """

    tokens: int = 1024
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise IncompatiblePlan(f"a window of {self.tokens} tokens", fixes=("use 1 or more",))
        if self.sinks < 0:
            raise IncompatiblePlan(f"sinks is {self.sinks}; it must not be negative")

    def due(self, length: int, prompt_tokens: int, longest_row: int, block_size: int, bytes_per_token: int) -> bool:
        return longest_row >= self.tokens + block_size

    def decide(self, view: SequenceView) -> Decision | None:
        keep = tuple(None if g is None else self._keep(g, view.length) for g in view.groups)
        return Decision(keep, f"window of {self.tokens} tokens, {self.sinks} sinks")

    def _keep(self, group: GroupView, length: int) -> np.ndarray:
        at = group.positions
        return (at >= 0) & ((at < self.sinks) | (at >= length - self.tokens))


POLICY = Window
