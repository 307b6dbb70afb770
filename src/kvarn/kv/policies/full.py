"""Keep everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvarn.kv.policies.base import Decision, KVPolicy, SequenceView


@dataclass(frozen=True)
class Full(KVPolicy):
    """The cache as it is without a policy."""

    prefix_pure: ClassVar[bool] = True
    decides: ClassVar[bool] = False

    def due(self, length: int, prompt_tokens: int, longest_row: int, block_size: int, bytes_per_token: int) -> bool:
        return False

    def decide(self, view: SequenceView) -> Decision | None:
        return None


POLICY = Full
