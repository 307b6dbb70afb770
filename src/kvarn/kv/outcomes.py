"""Expected outcomes of asking the manager for room: values, not exceptions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Not now. why: in words, with numbers. short_by_blocks: how many blocks are missing, 0 where blocks are not what
    is missing. fits_tokens: how many more tokens of this sequence would fit now."""

    why: str
    short_by_blocks: int = 0
    fits_tokens: int = 0
