"""What the scheduler asks of the cache: integers only, so that it is tested without a model and without a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Too few blocks now. Ordinary traffic: nothing was changed, and waiting may help. `where`: the pool, in words."""

    short_by_blocks: int
    where: str = ""

    def __str__(self) -> str:
        return f"short of {self.short_by_blocks} blocks{f' in {self.where}' if self.where else ''}"


class CacheLedger(Protocol):
    """Sequences by id, their tokens by count."""

    def never_fits(self, total_tokens: int) -> str | None:
        """Why a sequence of so many tokens cannot fit even in an empty cache, with the numbers; None where it can.
        Monotone: what fits at n tokens fits at fewer."""
        ...

    def admit(
        self, seq_id: int, token_ids: Sequence[int], namespace: bytes, *, headroom_tokens: int = 0, reuse: bool = True
    ) -> int | NoRoom:
        """Register a sequence and share what the prefix index holds of it (reuse: else nothing).

        Returns the tokens that need not be computed, 0 to len(token_ids) - 1. NoRoom, and nothing registered, where the
        blocks for token_ids would not fit beside headroom_tokens more: what those already running still have to take.
        """
        ...

    def extend(self, seq_id: int, to_tokens: int) -> NoRoom | None:
        """Make sure that slots for the logical tokens [0, to_tokens) exist; all or nothing."""
        ...

    def fork(self, parent_id: int, child_id: int) -> NoRoom | None:
        """Register a child that shares the parent's blocks (n > 1); all or nothing."""
        ...

    def release(self, seq_id: int) -> None:
        """Give all blocks of a registered sequence back; those in the prefix index stay there."""
        ...
